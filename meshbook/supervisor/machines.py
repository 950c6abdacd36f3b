"""The machines of a mesh: what each says of itself, whether they fit each other, and how they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from meshbook.engines.addresses import Address
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire.messages import HostInfo, MachineFacts, MeshSpec

_GIB = 1 << 30


class HostWatch(Protocol):
    """What is measured of the connections to hosts."""

    def latency_s(self, host: int) -> float | None: ...

    def silent_s(self, host: int) -> float: ...

    def values_go(self, host: int) -> Literal["", "directly", "as messages"]: ...


class MachineTable:
    """The machine of each host.

    Attributes:
        lost: why hosts are lost, as phrases that follow their name: "has not answered for 4 s".
        watch: None: no host is on another machine.
        read_log: returns the last bytes of a host's log.
    """

    def __init__(self, ranks: RankTable, here: Callable[[], MachineFacts]) -> None:
        """here: returns the facts of the supervisor's own machine."""
        self._ranks, self._here = ranks, here
        self._facts: dict[int, MachineFacts | None] = {}
        self._hostnames: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.watch: HostWatch | None = None
        self.read_log: Callable[[int, int], str] = lambda host, limit_bytes: ""
        self._address: Address | None = None

    def begin(self, spec: MeshSpec) -> None:
        """Take note of the machines' names, as a mesh starts."""
        self._address = Address.parse(spec.on) if spec.on else None

    def ready(self, host: int, hostname: str, facts: MachineFacts | None) -> None:
        self._facts[host], self._hostnames[host] = facts, hostname
        self.lost.pop(host, None)

    def lose(self, host: int, reason: str) -> str:
        """Record that a host is lost; return how its ranks have ended, as a phrase that follows their name."""
        self.lost[host] = reason
        if self._address is None:
            return f"ended with its host, which {reason}"
        return f"is lost: {self.who(host)} {reason}"

    def heals_when(self, host: int) -> str:
        """Return what %mesh heal waits for before ranks of a host can start again; "": nothing."""
        if self._address is None or host not in self.lost:
            return ""
        return f"{self.who(host)}{' or another node' if self._address.scheme == 'ray' else ''} can be reached"

    def name(self, host: int) -> str:
        """Return what the user calls the machine of a host."""
        if self._address is not None and self._address.machines:
            return str(self._address.machines[host])
        return self._hostnames.get(host, "")

    def who(self, host: int) -> str:
        """Return a host's name for a sentence: "machine n2", or "host 1" where there is one machine only."""
        label = self.label(host)
        return f"machine {label}" if label == self.name(host) else label

    def label(self, host: int) -> str:
        """Return a host's name for a list: "n2", or "host 1" where there is one machine only."""
        return (self._address is not None and self.name(host)) or f"host {host}"

    def find(self, name: str) -> int | None:
        """Return the host that a user calls so: "gpu2", its machine's name for itself, or its number; None: none."""

        def names(host: int) -> tuple[str | None, ...]:
            label = self.label(host)
            return label, label.rpartition("@")[2].partition(":")[0], self._hostnames.get(host), str(host)

        return next((host for host in self._ranks.hosts if name in names(host)), None)

    def infos(self) -> tuple[HostInfo, ...]:
        return tuple(self._info(host) for host in self._ranks.hosts)

    def _info(self, host: int) -> HostInfo:
        silent_s = self.watch.silent_s(host) if self.watch is not None else 0.0
        state = (
            "lost" if host in self.lost else "silent" if silent_s else "ready" if host in self._facts else "starting"
        )
        facts = self._facts.get(host)
        return HostInfo(
            host=host,
            name=self.name(host),
            state=state,  # type: ignore[arg-type]
            ranks=self._ranks.on_host(host),
            facts=self._here() if facts is None and self._address is None else facts,
            latency_s=self.watch.latency_s(host) if self.watch is not None and host not in self.lost else None,
            values=self.watch.values_go(host) if self.watch is not None and host not in self.lost else "",
            silent_s=silent_s,
            reason=self.lost.get(host, ""),
        )

    def network_advice(self) -> str:
        """Return what to look at if ranks do not reach each other; "": they are on one machine."""
        found = {host: facts for host, facts in sorted(self._facts.items()) if facts is not None}
        if self._address is None or len(found) < 2:
            return ""
        machines = ", ".join(f"{self.name(host)} at {facts.address}" for host, facts in found.items())
        look = f"; meshbook doctor --on {self._address.scheme}://… tries it" if self._address.machines else ""
        return f"\nThe machines must reach each other at any port ({machines}): is there a firewall between them?{look}"

    def problem(self, spec: MeshSpec) -> str | None:
        """Return why ranks cannot start on these machines together, and what to do; None: they can."""
        found = {host: facts for host, facts in sorted(self._facts.items()) if facts is not None}
        if not found:
            return None
        return (
            self._same_machine(found, spec)
            or self._too_few_gpus(found, spec)
            or (
                None
                if self._address is not None and self._address.allows_any_versions
                else self._differences(found, spec)
            )
        )

    def _same_machine(self, found: dict[int, MachineFacts], spec: MeshSpec) -> str | None:
        first: dict[str, int] = {}
        for host, facts in found.items():
            if self._address is not None and self._address.job and (spec.device == "cpu" or not facts.gpus):
                continue  # a Monarch job may well have several hosts on a machine; only their GPUs would be taken twice
            other = first.setdefault(facts.machine, host)
            if other != host:
                return (
                    f"{self.name(other)} and {self.name(host)} are one machine (its name for itself is "
                    f"{facts.hostname}); name each machine once, and ask for more ranks per machine instead"
                )
        return None

    def _too_few_gpus(self, found: dict[int, MachineFacts], spec: MeshSpec) -> str | None:
        for host, facts in found.items():
            wanted = len(self._ranks.on_host(host))
            busy = [gpu.busy_by for gpu in facts.gpus if gpu.busy_by]
            if spec.device == "cuda" and wanted > len(facts.gpus) - len(busy):
                others = f", of which others use {len(busy)} ({', '.join(sorted(set(busy)))})" if busy else ""
                return (
                    f"{self.name(host)} has {len(facts.gpus)} GPUs{others}, and {wanted} ranks are to run there, each "
                    "on one; ask for fewer per machine, or for device cpu"
                )
        return None

    def _differences(self, found: dict[int, MachineFacts], spec: MeshSpec) -> str | None:
        everywhere = {"here": self._here(), **{self.name(host): facts for host, facts in found.items()}}
        rows: list[tuple[str, list[str]]] = []
        for what, version in _compared(spec).items():
            versions = [version(facts) for facts in everywhere.values()]
            if len(set(versions)) > 1:
                rows.append((what, versions))
        if not rows:
            return None
        lines = [("", list(everywhere)), *rows]
        widths = [max(len(line[1][column]) for line in lines) for column in range(len(everywhere))]
        head = max(len(what) for what, _ in lines)
        table = "\n".join(
            "  ".join(
                [f"  {what:{head}}", *(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))]
            ).rstrip()
            for what, cells in lines
        )
        scheme = "ssh" if self._address is None else self._address.scheme
        return (
            f"the machines differ in what must be equal:\n{table}\ninstall the same versions, or name an interpreter "
            f"that has them ({scheme}://…?python=/path/to/python); {scheme}://…?versions=any starts all the same"
        )


def _compared(spec: MeshSpec) -> dict[str, Callable[[MachineFacts], str]]:
    """Return what must be equal everywhere. Code travels as bytecode, and each minor version of Python has another.

    NCCL is not compared here: its ranks compare it themselves, and it belongs to the build of torch.
    """
    compared: dict[str, Callable[[MachineFacts], str]] = {
        "Meshbook": lambda facts: facts.meshbook,
        "Python": lambda facts: ".".join(facts.python.split(".")[:2]),
    }
    if spec.torch:
        compared["torch"] = lambda facts: (facts.torch or "none").partition("+")[0]
    return compared
