"""Where a mesh's machines are, as users write it.

`ssh://user@gpu1:2222,gpu2?python=/opt/venv/bin/python`, `slurm://PARTITION?account=x&time=2:00:00`, `ray://auto`.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from meshbook.errors import UsageError

_EXAMPLE = "Write it like: ssh://gpu1,gpu2 or ssh://me@gpu1:2222,me@gpu2"
_SLURM_EXAMPLE = 'Write it like: slurm://gpu or "slurm://gpu?account=x&time=2:00:00"'
_RAY_EXAMPLE = "Write it like: ray://auto, ray://head:6379 or ray://auto?num_gpus=8; ray://local starts a Ray"
_OPTIONS = {
    "python": "the interpreter on those machines",
    "versions": '"any" to go on although versions differ',
}
_SSH_OPTIONS = {**_OPTIONS, "before": "a line for bash on those machines, before Python is started"}
# What is asked of Ray for each node, in its own words.
_RAY_OPTIONS = {"num_cpus": "cores of each node", "num_gpus": "GPUs of each node", **_OPTIONS}
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
        scheme: "ssh", "slurm" or "ray".
        machines: empty: Slurm or Ray chooses them.
        python: the interpreter there; None: the engine's choice.
        partition: of Slurm; "": its default.
        options: further ones of sbatch, without the hyphens; a value "" is none. Of Ray: num_cpus, num_gpus.
        head: of Ray's cluster: "auto", "local" or GCS's "host:port"; "": it is no Ray.
        before: a line that bash runs on each machine before Python starts: "module load cuda"; ssh only.
    """

    scheme: str
    machines: tuple[Machine, ...]
    python: str | None = None
    allows_any_versions: bool = False
    partition: str = ""
    options: tuple[tuple[str, str], ...] = ()
    head: str = ""
    before: str = ""

    @property
    def gpus_per_node(self) -> int | None:
        """How many GPUs of each node Slurm or Ray is asked for; None: no option says it."""
        for name, value in self.options:
            if name == "num_gpus":
                return int(value) or None
            kind, _, count = value.rpartition(":") if ":" in value else ("", "", value)
            if count.isdecimal() and (name == "gpus-per-node" or (name == "gres" and kind.partition(":")[0] == "gpu")):
                return int(count)
        return None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises UsageError: it is not an address; the message says what is wrong with it, and gives an example."""
        scheme, separator, rest = text.partition("://")
        if not separator:
            raise UsageError(f"{text!r} says no way to its machines. {_EXAMPLE}")
        if scheme == "slurm":
            return cls._parse_slurm(text, rest)
        if scheme == "ray":
            return cls._parse_ray(text, rest)
        if scheme != "ssh":
            raise UsageError(f"there is no way {scheme}:// to machines; known: ssh://, slurm://, ray://. {_EXAMPLE}")
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
