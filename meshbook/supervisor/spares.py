"""How many spares each host is to keep, and what hosts report of them. Pure: commands and reports in, effects out."""

from __future__ import annotations

from meshbook.ids import CallId
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import SpareInfo


class SpareTable:
    """The spares of one mesh. Hosts start ranks from them as far as they are ready."""

    def __init__(self, ranks: RankTable, startup: MeshStartup, machines: MachineTable) -> None:
        self._ranks, self._startup, self._machines = ranks, startup, machines
        self._num = 0  # on each host
        self._infos: dict[int, tuple[SpareInfo, ...]] = {}  # by host

    @property
    def infos(self) -> tuple[SpareInfo, ...]:
        living = (host for host in sorted(self._infos) if host not in self._machines.lost)
        return tuple(info for host in living for info in self._infos[host])

    def keep(self, client: str, command: messages.KeepSpares) -> list[Effect]:
        """Have each host keep so many spares."""
        if not self._startup.is_done:
            return _refuse(client, command.call, "NotAttached", "the mesh has no ranks yet; wait for it to start")
        most = max(len(self._ranks.on_host(host)) for host in self._ranks.hosts)
        if command.num > most:
            text = (
                f"{command.num} spares for {most} ranks of a machine: more than {most} can never be needed; "
                f"%mesh spare {most} keeps one for each"
            )
            return _refuse(client, command.call, "MeshShapeError", text)
        self._num = command.num
        return [*self._prepare(), SendToClient(client, messages.CommandReply(call=command.call))]

    def replace_used(self) -> list[Effect]:
        """Have hosts make spares for those that have become ranks."""
        return self._prepare() if self._num else []

    def reported(self, host: int, infos: tuple[SpareInfo, ...]) -> None:
        self._infos[host] = infos

    def _prepare(self) -> list[Effect]:
        spec = self._startup.spec
        assert spec is not None  # the mesh has started
        return [
            SendToHosts((host,), messages.PrepareSpares(spec, self._num, self._ranks.on_host(host)))
            for host in self._ranks.hosts
            if host not in self._machines.lost
        ]


def _refuse(client: str, call: CallId, error: str, text: str) -> list[Effect]:
    return [SendToClient(client, messages.Refused(call=call, error=error, text=text))]
