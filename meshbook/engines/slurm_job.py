"""A job of Slurm that holds the nodes of a mesh: submitted, waited for in the queue, cancelled.

Its script does nothing but end, soon after the last host has: if the supervisor is killed, its hosts end with their
srun, and the job does not hold their nodes until its time limit. It contains no secret.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from meshbook.engines.addresses import Address
from meshbook.engines.host_launch import last_lines, quoted
from meshbook.errors import StartError
from meshbook.wire.child_processes import run_command

# Seconds that Slurm's commands may take: their own time limits are shorter, and longer only at very busy sites.
_COMMAND_TIMEOUT_S = 60.0
# Seconds between two questions to the queue: the tenth part of the time for which it has been waited, within these.
_MIN_POLL_S, _MAX_POLL_S = 0.3, 15.0
# Seconds between two questions when it will end: an administrator may move that.
_END_POLL_S = 60.0
# Seconds by which the estimated start must move to be reported again.
_START_MOVED_S = 300.0
# Seconds for which a job must be hopeless: the first reason is that of its submission, before the scheduler has looked.
_HOPELESS_S = 3.0
# Seconds that an answer about a job that runs may be old: all hosts of a job that ends ask at once.
_FRESH_S = 2.0
_CANCEL_TIMEOUT_S = 5.0
_ENDING_TRIES, _ENDING_POLL_S = 6, 0.5

# Reasons with which Slurm accepts a job and leaves it pending for ever. Others may pass by themselves.
_HOPELESS = {
    "PartitionNodeLimit": "the partition does not let a job have so many nodes",
    "PartitionTimeLimit": "the partition does not let a job run for so long",
    "PartitionConfig": "the partition does not have what is asked for",
    "AccountNotAllowed": "the account may not use the partition",
    "QOSNotAllowed": "the quality of service may not be used there",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such quality of service",
    "BadConstraints": "no node has what is asked for",
    "DependencyNeverSatisfied": "what it depends on has failed",
    "JobHeldAdmin": "an administrator holds it",
}
_HOPELESS_ENDINGS = ("PerJobLimit", "PerJob")  # QOSMaxWallDurationPerJobLimit, AssocMaxNodePerJobLimit, …

# How a job has ended, by its state.
_ENDS = {
    "TIMEOUT": "has come to its time limit (slurm://…?time=4:00:00 asks for more)",
    "CANCELLED": "was cancelled",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "has lost a node",
    "COMPLETING": "is being ended by Slurm",
}

# It ends 20 s after the last host, or after a minute without a first one. Its look every 2 s costs Slurm nothing: it is
# whether a host is on the job's first node. Only without one squeue is asked, which knows the steps on all nodes.
_SCRIPT = """\
#!/bin/sh
# Holds the nodes of the mesh {mesh}; ends when none of its hosts is left.
left=60
while [ $left -gt 0 ]; do
  sleep 2
  left=$((left - 2))
  if pgrep -f {pattern} >/dev/null 2>&1; then
    left=20
  elif [ $((left % 10)) = 0 ]; then
    steps=$(squeue -h -s -j "$SLURM_JOB_ID" -o %i) || steps=$SLURM_JOB_ID.0
    case "$steps" in *"$SLURM_JOB_ID".[0-9]*) left=20;; esac
  fi
done
"""

# Variables of sbatch, which go with the job; others may be secrets.
_SBATCH_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SLURM_CONF")


@dataclass(frozen=True)
class JobState:
    """What squeue says of a job.

    Attributes:
        state: "PENDING", "RUNNING", "TIMEOUT", …; "" if it is forgotten.
        reason: why it is pending, "Priority", or has ended.
        nodes: as Slurm writes them, "n[1-4]".
        start: when it has started or will, ISO; "N/A" if that is not known.
        end: when it has come to its time limit, ISO; another word if there is none.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    start: str = "N/A"
    end: str = "N/A"

    @classmethod
    def parse(cls, line: str) -> JobState:
        state, reason, nodes, start, end = (*line.strip().split("|"), "", "", "", "", "")[:5]
        return cls(state, "" if reason == "None" else reason, nodes, start or "N/A", end or "N/A")

    @property
    def is_over(self) -> bool:
        return self.state not in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING")

    def why_hopeless(self) -> str | None:
        """Return why a pending job will never run; None: it may."""
        if self.state != "PENDING":
            return None
        if self.reason.endswith(_HOPELESS_ENDINGS):
            return "it asks for more than a job of this account may have"
        return _HOPELESS.get(self.reason)

    def start_time(self) -> datetime | None:
        return _parse_time(self.start)

    def ends_at(self) -> float | None:
        """Return when it comes to its time limit, in seconds since the epoch; None: it has none."""
        end = _parse_time(self.end)
        return end.timestamp() if end is not None else None

    def describe(self) -> str:
        """Return it for a user who waits: "PENDING (Priority), starts about 14:07"."""
        text = f"{self.state} ({self.reason})" if self.reason else self.state
        start = self.start_time()
        if self.state != "PENDING" or start is None:
            return text
        when = f"{start:%H:%M}" if start.date() == datetime.now().date() else f"{start:%a %d %b %H:%M}"
        return f"{text}, starts about {when}"


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def sbatch_options(address: Address, *, num_nodes: int, ranks_per_node: int) -> list[str]:
    """Return the options of sbatch that say what is asked for; the user's come last, and win."""
    own = {
        "nodes": str(num_nodes),
        "ntasks-per-node": "1",
        # A minute before the time limit hosts hear of it, as they do of a preemption.
        "signal": "TERM@60",
    }
    names = {name for name, _ in address.options}
    if names.isdisjoint(("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus")):
        own["cpus-per-task"] = str(ranks_per_node)
    if address.partition:
        own["partition"] = address.partition
    own |= dict(address.options)
    return [f"--{name}={value}" if value else f"--{name}" for name, value in own.items()]


def run_slurm(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Blocks.

    Raises:
        StartError: it is not on this machine, or does not end.
    """
    try:
        return run_command(words, timeout_s=_COMMAND_TIMEOUT_S, env=slurm_environment() if env is None else env)
    except FileNotFoundError:
        raise StartError(
            f"there is no {words[0]} on this machine: slurm:// is for one from which jobs are submitted, such as a "
            "cluster's login node; start the notebook there"
        ) from None
    except subprocess.TimeoutExpired:
        raise StartError(f"{words[0]} did not end within {_COMMAND_TIMEOUT_S:.0f} s; does `sinfo` answer?") from None


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without what a job of Slurm, in which it may run, says of itself."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def sbatch_environment() -> dict[str, str]:
    """Return the environment of sbatch: a job takes it along."""
    known = slurm_environment()
    return {name: value for name, value in known.items() if name in _SBATCH_VARIABLES or name.startswith("SBATCH_")}


class SlurmJob:
    """One allocation. Any thread may ask it; its own thread submits it, waits in the queue, and asks
    when it will end.

    Attributes:
        queue_state: what the queue says while the job waits in it; "" otherwise.
        ends_at: when it comes to its time limit, in seconds since the epoch; None: it does not run yet, or has none.
    """

    def __init__(self, mesh: str, hosts: str, options: list[str]) -> None:
        """
        Args:
            hosts: the name that the mesh's host processes have as an argument.
            options: of sbatch, what is asked for.
        """
        self._mesh, self._options = mesh, options
        pattern = shlex.quote(f"meshbook.host.remote {hosts} ")
        self._script = _SCRIPT.format(mesh=mesh, pattern=pattern)
        self.queue_state = ""
        self.ends_at: float | None = None
        self._id: str | None = None
        self._uncancelled: str | None = None  # its id, until it is cancelled
        self._cancel_lock = threading.Lock()
        self._nodes: tuple[str, ...] = ()
        self._failure: str | None = None
        self._is_decided = threading.Event()  # the nodes are known, or will never be
        self._is_closed = threading.Event()
        self._asked_lock = threading.Lock()
        self._asked: tuple[float, JobState] | None = None  # the last answer, and when
        self._thread = threading.Thread(target=self._run, name="slurm job", daemon=True)

    @property
    def id(self) -> str:
        return self._id or "?"

    def begin(self) -> None:
        """Submit it, and wait for its nodes, on a thread."""
        self._thread.start()

    def nodes(self) -> tuple[str, ...]:
        """Return its nodes in Slurm's order. Blocks until they are there.

        Raises:
            StartError: the job cannot run, or has been given up.
        """
        self._is_decided.wait()
        if self._failure is not None:
            raise StartError(self._failure)
        return self._nodes

    def check(self, node: str) -> None:
        """Raise StartError if it has ended or has lost this node. Blocks."""
        now = self._ask()
        if now is None:
            return  # srun will say why
        if now.is_over:
            raise StartError(f"{self.describe_end(now)}; start the mesh again with %mesh restart")
        if now.state == "RUNNING" and node not in self._hostnames(now.nodes):
            raise StartError(
                f"{node} has failed, and Slurm has taken it out of job {self.id}; it gives no other to a job that "
                "runs. Go on without its ranks with %mesh resize, or start again with %mesh restart"
            )

    def end(self) -> JobState | None:
        """Return how it has ended; None: it runs, as far as is known. Blocks for up to some seconds."""
        with self._asked_lock:
            if self._asked is not None and time.monotonic() - self._asked[0] < _FRESH_S:
                now: JobState | None = self._asked[1]
            else:
                for _ in range(_ENDING_TRIES):
                    now = self._ask()
                    if now is None or now.state != "COMPLETING" or self._is_closed.wait(_ENDING_POLL_S):
                        break
                if now is not None:
                    self._asked = (time.monotonic(), now)
        return now if now is not None and now.is_over else None

    def describe_end(self, state: JobState) -> str:
        how = _ENDS.get(state.state) or f"has ended ({state.state or 'Slurm knows no more of it'})"
        return f"Slurm's job {self.id} {how}"

    def take_over(self) -> None:
        """Go on in a process that was forked from the one that has begun it, whose threads may have held the locks."""
        self._cancel_lock, self._asked_lock = threading.Lock(), threading.Lock()
        self._decide("the mesh's supervisor was killed while the job waited for its nodes; start again")
        self._thread = threading.Thread(target=self._follow_end, name="slurm job", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Have nobody wait for its nodes any more. Does not block."""
        self._is_closed.set()
        self._decide("the start was given up")

    def close(self) -> None:
        """Cancel it, if it is there still. Blocks until Slurm has taken note, for some seconds at most."""
        self.give_up()
        self._thread.join(_CANCEL_TIMEOUT_S)  # one that is being submitted is cancelled there
        self._cancel()

    # ---- its thread

    def _run(self) -> None:
        try:
            self._submit()
            self._wait_for_nodes()
            self._follow_end()
        except StartError as error:
            self._cancel()
            self._decide(str(error))
        finally:
            self.queue_state = ""  # it failed
            if self._is_closed.is_set():  # meanwhile
                self._cancel()

    def _decide(self, failure: str | None) -> None:
        if not self._is_decided.is_set():
            self._failure = failure
            self._is_decided.set()

    def _submit(self) -> None:
        done = run_slurm(
            "sbatch", "--parsable", "--no-requeue", "--no-kill", f"--job-name=meshbook-{self._mesh}", "--chdir=/",
            "--output=/dev/null", *self._options, f"--wrap={self._script}", env=sbatch_environment(),
        )  # fmt: skip
        if done.returncode:
            raise StartError(
                f"Slurm refused the job{quoted(last_lines(done.stderr))}; `meshbook doctor --on slurm://…` shows what "
                "there is, and sinfo the partitions"
            )
        self._id = self._uncancelled = done.stdout.strip().partition(";")[0]

    def _wait_for_nodes(self) -> None:
        begun = time.monotonic()
        shown: JobState | None = None
        hopeless_since: float | None = None
        while not self._is_closed.wait(min(_MAX_POLL_S, max(_MIN_POLL_S, (time.monotonic() - begun) / 10))):
            now = self._ask()
            if now is None:
                continue
            if now.is_over:
                reason = f" ({now.reason})" if now.reason else ""
                raise StartError(f"{self.describe_end(now)}{reason} before the mesh came up")
            why = now.why_hopeless()
            hopeless_since = None if why is None else hopeless_since or time.monotonic()
            if hopeless_since is not None and time.monotonic() - hopeless_since > _HOPELESS_S:
                raise StartError(
                    f"Slurm would never run the job: {why} ({now.reason}). It was cancelled; ask for less, or look "
                    "with `meshbook doctor --on slurm://…`"
                )
            if now.state == "RUNNING":
                self._nodes = self._hostnames(now.nodes)
                self.queue_state, self.ends_at = "", now.ends_at()
                self._decide(None)
                return
            if now.describe() == "PENDING":
                continue  # just submitted: Slurm has not looked at it yet
            if shown is None or _is_news(shown, now):
                shown = now
                self.queue_state = f"Slurm: job {self.id} is {now.describe()}"

    def _follow_end(self) -> None:
        while not self._is_closed.wait(_END_POLL_S):
            now = self._ask()
            if now is not None and now.state == "RUNNING":
                self.ends_at = now.ends_at()

    def _ask(self) -> JobState | None:
        """Return what squeue says of it; None: it cannot be asked now."""
        try:
            done = run_slurm("squeue", "-h", "-j", self.id, "-t", "all", "-o", "%T|%r|%N|%S|%e")
        except StartError:
            return None
        if done.returncode:
            return JobState("") if "Invalid job id" in done.stderr else None
        return JobState.parse(done.stdout)

    def _hostnames(self, nodes: str) -> tuple[str, ...]:
        done = run_slurm("scontrol", "show", "hostnames", nodes)
        if done.returncode:
            raise StartError(f"Slurm does not tell the names of {nodes}{quoted(last_lines(done.stderr))}")
        return tuple(done.stdout.split())

    def _cancel(self) -> None:
        with self._cancel_lock:
            job, self._uncancelled = self._uncancelled, None
        if job is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # the job's script ends the job, as its hosts have ended
            run_command(["scancel", job], timeout_s=_CANCEL_TIMEOUT_S, env=slurm_environment())


def _is_news(before: JobState, now: JobState) -> bool:
    """Whether someone who waits is to hear it."""
    if (before.state, before.reason) != (now.state, now.reason):
        return True
    starts = before.start_time(), now.start_time()
    if starts[0] is None or starts[1] is None:
        return starts[0] is not starts[1]
    return abs((starts[1] - starts[0]).total_seconds()) >= _START_MOVED_S
