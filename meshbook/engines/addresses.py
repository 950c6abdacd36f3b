"""Where a mesh's machines are, as users write it.

`ssh://user@gpu1:2222,gpu2?python=/opt/venv/bin/python`, `slurm://PARTITION?account=x&time=2:00:00`, `ray://auto`,
`monarch://slurm?partition=gpu`, `monarch:my_cluster.py:job`.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from meshbook.errors import UsageError

_EXAMPLE = "Write it like: ssh://gpu1,gpu2 or ssh://me@gpu1:2222,me@gpu2"
_SLURM_EXAMPLE = 'Write it like: slurm://gpu or "slurm://gpu?account=x&time=2:00:00"'
_RAY_EXAMPLE = "Write it like: ray://auto, ray://head:6379 or ray://auto?num_gpus=8; ray://local starts a Ray"
_MONARCH_EXAMPLE = (
    "Write it like: monarch://process, monarch://slurm?partition=gpu, or monarch:mine.py:job for one of your own"
)
_OPTIONS = {
    "python": "the interpreter on those machines",
    "versions": '"any" to go on although versions differ',
}
_SSH_OPTIONS = {**_OPTIONS, "before": "a line for bash on those machines, before Python is started"}
# What is asked of Ray for each node, in its own words.
_RAY_OPTIONS = {"num_cpus": "cores of each node", "num_gpus": "GPUs of each node", **_OPTIONS}
# Kinds of Monarch jobs, and what is asked of each, in Monarch's words.
_MONARCH_JOBS = {
    "process": {},
    "local": {},
    "ssh": {"hosts": "the machines, with commas", "monarch_port": "the port of Monarch's workers"},
    "slurm": {
        "partition": "the partition",
        "account": "the account",
        "qos": "the quality of service",
        "time_limit": "hours:minutes:seconds",
        "gpus_per_node": "GPUs of each node",
        "cpus_per_task": "cores of each node",
        "mem": "memory of each node",
        "exclusive": "yes or no",
        "monarch_port": "the port of Monarch's workers",
        "job_start_timeout": "seconds in the queue at most",
        "log_dir": "a folder that all nodes share",
    },
    "kubernetes": {
        "namespace": "the namespace",
        "image": "of pods that are made",
        "gpus_per_node": "GPUs of each pod that is made",
        "label_selector": "of pods that are there",
        "kubeconfig": "a path, outside of the cluster",
        "attach_to": "tcp://host:port of a pod's Monarch",
        "port": "the port of Monarch's workers",
        "timeout": "seconds to wait for pods at most",
    },
}
_MONARCH_NEEDS = {"ssh": "hosts", "kubernetes": "namespace"}
_NUMBERS = ("gpus_per_node", "cpus_per_task", "monarch_port", "job_start_timeout", "port", "timeout")
_GCS_PORT = 6379  # unless `ray start --port` says another
# Options of sbatch that say what a mesh is, and what says it.
_SLURM_OWN = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "--nodes of the mesh, nodes= in Python"),
    "partition": "the partition, as in slurm://gpu",
    "before": "the environment in which the notebook was started, which srun takes along",
    "job-name": "the name of the mesh",
    **dict.fromkeys(
        ("array", "wrap", "parsable", "wait", "requeue", "no-requeue", "kill", "no-kill", "output", "error", "input",
         "export", "export-file", "test-only", "hold", "help", "version"),
        "Meshbook itself",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One machine as ssh takes it.

    Attributes:
        destination: `user@host`, or a name of ~/.ssh/config.
        port: None: ssh's own choice.
    """

    destination: str
    port: int | None = None

    def __str__(self) -> str:
        return self.destination if self.port is None else f"{self.destination}:{self.port}"


@dataclass(frozen=True)
class Address:
    """The machines of a mesh, and options.

    Attributes:
        scheme: "ssh", "slurm", "ray" or "monarch".
        machines: empty: Slurm, Ray or Monarch chooses them.
        python: the interpreter there; None: the engine's choice.
        partition: of Slurm; "": its default.
        options: further ones of sbatch, without the hyphens; a value "" is none. Of Ray: num_cpus, num_gpus.
            Of Monarch: those of the kind of job.
        head: of Ray's cluster: "auto", "local" or GCS's "host:port"; "": it is no Ray.
        before: a line that bash runs on each machine before Python starts: "module load cuda"; ssh only.
        job: of Monarch: a kind of job, "process", or where one is made, "my_cluster.py:job"; "": it is no Monarch.
    """

    scheme: str
    machines: tuple[Machine, ...]
    python: str | None = None
    allows_any_versions: bool = False
    partition: str = ""
    options: tuple[tuple[str, str], ...] = ()
    head: str = ""
    before: str = ""
    job: str = ""

    @property
    def gpus_per_node(self) -> int | None:
        """How many GPUs of each node a launcher is asked for; None: no option says it."""
        for name, value in self.options:
            if name in ("num_gpus", "gpus_per_node"):
                return int(value) or None
            kind, _, count = value.rpartition(":") if ":" in value else ("", "", value)
            if count.isdecimal() and (name == "gpus-per-node" or (name == "gres" and kind.partition(":")[0] == "gpu")):
                return int(count)
        return None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises UsageError: it is not an address; the message says what is wrong with it, and gives an example."""
        if is_job_file(text):
            return cls._parse_job_file(text)
        scheme, separator, rest = text.partition("://")
        if not separator:
            raise UsageError(f"{text!r} says no way to its machines. {_EXAMPLE}")
        if scheme == "slurm":
            return cls._parse_slurm(text, rest)
        if scheme == "ray":
            return cls._parse_ray(text, rest)
        if scheme == "monarch":
            return cls._parse_monarch(text, rest)
        if scheme != "ssh":
            raise UsageError(
                f"there is no way {scheme}:// to machines; known: ssh://, slurm://, ray://, monarch://. {_EXAMPLE}"
            )
        names, _, query = rest.partition("?")
        options = _parse_options(text, query, _SSH_OPTIONS)
        machines = (
            tuple(_parse_machine(name.strip(), text) for name in rest.partition("?")[0].split(",")) if names else ()
        )
        if not machines:
            raise UsageError(f"{text!r} names no machine. {_EXAMPLE}")
        if twice := sorted({str(machine) for machine in machines if machines.count(machine) > 1}):
            raise UsageError(f"{text!r} names {twice[0]} twice; name each machine once")
        return cls(
            scheme, machines, options.get("python") or None, "versions" in options, before=options.get("before", "")
        )

    @classmethod
    def _parse_slurm(cls, text: str, rest: str) -> Address:
        partition, _, query = rest.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        _check_versions(options)
        python = options.pop("python", None)
        any_versions = options.pop("versions", None) is not None
        if partition.startswith("-") or not all(c.isalnum() or c in "-_.,+" for c in partition):
            raise UsageError(f"{partition!r} in {text!r} is no partition. {_SLURM_EXAMPLE}")
        for name in options:
            if name in _SLURM_OWN:
                raise UsageError(f"{text!r} has the option {name!r}, which is set by {_SLURM_OWN[name]}; leave it out")
            if len(name) < 2 or not all(c.isascii() and (c.isalnum() or c == "-") for c in name) or name[0] == "-":
                raise UsageError(f"{name!r} in {text!r} is no long option of sbatch. {_SLURM_EXAMPLE}")
        return cls("slurm", (), python or None, any_versions, partition, tuple(options.items()))

    @classmethod
    def _parse_ray(cls, text: str, rest: str) -> Address:
        name, _, query = rest.partition("?")
        options = _parse_options(text, query, _RAY_OPTIONS)
        if name not in ("auto", "local"):
            try:
                machine = _parse_machine(name, text)
            except UsageError:
                raise UsageError(f"{name!r} in {text!r} is no head of a Ray cluster. {_RAY_EXAMPLE}") from None
            if "@" in name or "," in name:
                raise UsageError(f"{name!r} in {text!r} is no head of a Ray cluster. {_RAY_EXAMPLE}")
            name = f"{machine.destination}:{machine.port or _GCS_PORT}"
        asked_for = {name: value for name, value in options.items() if name in ("num_cpus", "num_gpus")}
        for option, value in asked_for.items():
            if not value.isdecimal():
                raise UsageError(f"{option}={value} in {text!r} is no number of {_RAY_OPTIONS[option]}")
        return cls(
            "ray", (), options.get("python") or None, "versions" in options, "", tuple(asked_for.items()), head=name
        )

    @classmethod
    def _parse_monarch(cls, text: str, rest: str) -> Address:
        kind, _, query = rest.partition("?")
        if kind not in _MONARCH_JOBS:
            raise UsageError(
                f"{kind!r} in {text!r} is no kind of Monarch job; known: {', '.join(_MONARCH_JOBS)}. {_MONARCH_EXAMPLE}"
            )
        known = _MONARCH_JOBS[kind]
        options = _parse_options(text, query, {**known, **_OPTIONS})
        if (needed := _MONARCH_NEEDS.get(kind)) is not None and not options.get(needed):
            raise UsageError(f"{text!r} does not say {known[needed]}: monarch://{kind}?{needed}=…")
        for name in _NUMBERS:
            if not options.get(name, "0").isdecimal():
                raise UsageError(f"{name}={options[name]} in {text!r} is no number")
        asked_for = tuple((name, value) for name, value in options.items() if name in known)
        return cls("monarch", (), options.get("python") or None, "versions" in options, options=asked_for, job=kind)

    @classmethod
    def _parse_job_file(cls, text: str) -> Address:
        place, _, query = text.removeprefix("monarch:").partition("?")
        options = _parse_options(text, query, {"mesh": "the job's mesh of hosts", **_OPTIONS})
        file, _, name = place.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise UsageError(f"{place!r} in {text!r} is no Python file and name in it. {_MONARCH_EXAMPLE}")
        asked_for = tuple((name, value) for name, value in options.items() if name == "mesh")
        return cls("monarch", (), options.get("python") or None, "versions" in options, options=asked_for, job=place)


def is_job_file(text: str) -> bool:
    """Whether an address is that of a Monarch job in a file of the user's."""
    return text.startswith("monarch:") and not text.startswith("monarch://")


def _parse_options(text: str, query: str, known: dict[str, str]) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - known.keys()):
        scheme = text.partition(":")[0]
        words = "; ".join(f"{name}, {what}" for name, what in known.items())
        raise UsageError(f"{text!r} has the option {unknown[0]!r}, which {scheme}:// does not know; it knows {words}")
    _check_versions(options)
    return options


def _check_versions(options: dict[str, str]) -> None:
    if (versions := options.get("versions", "any")) != "any":
        raise UsageError(f"versions={versions} is not known; versions=any goes on although versions differ")


def _parse_machine(name: str, text: str) -> Machine:
    destination, separator, port = name.rpartition(":")
    if not separator:
        destination, port = name, ""
    # A name that begins with a hyphen would be taken by ssh for an option.
    if not destination or destination.startswith("-") or any(c.isspace() for c in destination) or "/" in destination:
        raise UsageError(f"{name!r} in {text!r} is no machine. {_EXAMPLE}")
    if separator and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"{port!r} in {text!r} is no port. {_EXAMPLE}")
    return Machine(destination, int(port) if separator else None)
