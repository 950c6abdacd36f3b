"""The machines of a mesh, and of a cluster on which none runs yet, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from meshbook.controller.session import Session
from meshbook.controller.tables import Table, TableOf, count_of, format_bytes
from meshbook.ids import format_ranks
from meshbook.wire import messages
from meshbook.wire.messages import HostInfo, MachineFacts


class Hosts(TableOf[HostInfo]):
    """The machines of a mesh, in the order of their ranks. Displays itself as a table."""


def fetch_hosts(session: Session) -> Hosts:
    """Ask the supervisor for the mesh's machines. Raises MeshTimeout."""
    infos = session.call_supervisor(messages.QueryHosts(call=session.connection.next_call_id())).hosts
    return Hosts(hosts_table(session.name, infos), infos)


def hosts_table(mesh: str, infos: Sequence[HostInfo]) -> Table:
    """Return a row for each machine."""
    lost = [info for info in infos if info.state == "lost"]
    notes = [
        f"Host {info.host}, {info.name}, {info.reason}; %mesh heal starts it again, when it is back." for info in lost
    ]
    rows = tuple(
        (
            info.name,
            f"silent for {info.silent_s:.0f} s" if info.state == "silent" else info.state,
            format_ranks(info.ranks),
            *facts_cells(info.facts),
            "" if info.latency_s is None else f"{info.latency_s * 1000:.1f} ms",
            info.values,
        )
        for info in infos
    )
    columns = ("machine", "state", "ranks", *FACTS_COLUMNS, "latency", "values")
    return Table(f"Mesh {mesh}: {count_of(len(infos), 'machine')}.", columns, rows, tuple(notes))


FACTS_COLUMNS = ("GPUs", "cores", "free memory", "Python", "torch", "NCCL", "driver", "Meshbook")


def facts_cells(facts: MachineFacts | None) -> tuple[str, ...]:
    """Return what a machine says of itself, in the order of `FACTS_COLUMNS`."""
    if facts is None:
        return ("",) * len(FACTS_COLUMNS)
    return (
        _describe_gpus(facts),
        str(facts.num_cpus),
        format_bytes(facts.free_memory_bytes),
        facts.python,
        facts.torch or "none",
        facts.nccl or "",
        facts.driver or "",
        facts.meshbook,
    )


def _describe_gpus(facts: MachineFacts) -> str:
    if not facts.gpus:
        return ""
    names = {gpu.name for gpu in facts.gpus}
    free = [gpu for gpu in facts.gpus if not gpu.busy_by]
    text = f"{len(facts.gpus)} {' and '.join(sorted(names))}"
    if busy := busy_gpus(facts):
        text += f", {busy}"
    return f"{text}, at least {format_bytes(min(gpu.free_bytes for gpu in free))} free on each" if free else text


def busy_gpus(facts: MachineFacts) -> str:
    """Return how many GPUs of a machine others use, and who: "3 busy (alice)"; "" for none."""
    users = [gpu.busy_by for gpu in facts.gpus if gpu.busy_by]
    return f"{len(users)} busy ({', '.join(sorted(set(users)))})" if users else ""
