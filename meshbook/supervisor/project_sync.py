"""The project's files on the hosts: each host has them before its ranks start, and changes when a client asks for it.

Hosts fetch the files (`host/project_copy`) from `project_server`. This module knows who waits for which hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshbook.ids import CallId
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.startup import MeshStartup
from meshbook.wire import messages
from meshbook.wire.messages import HostFiles, ProjectFile


@dataclass
class _Open:
    """A client's sync: the hosts that have yet to report, and what the others have reported."""

    client: str
    waiting: set[int]
    found: dict[int, HostFiles] = field(default_factory=dict)


class ProjectSync:
    """The files of one mesh's project."""

    def __init__(self, ranks: RankTable, machines: MachineTable, startup: MeshStartup) -> None:
        self._ranks, self._machines, self._startup = ranks, machines, startup
        self._files: tuple[ProjectFile, ...] | None = None  # None: those of the start
        self._held: dict[int, messages.HostReady] = {}  # hosts that have yet to get the files before their ranks start
        self._is_described = False  # the client has been sent what its start waits for
        self._open: dict[CallId, _Open] = {}

    @property
    def is_preparing(self) -> bool:
        """Whether a host gets the files, or its environment, before its ranks start."""
        return bool(self._held)

    def host_ready(self, host: int, report: messages.HostReady) -> list[Effect]:
        """Have a host that has come get the files first; []: the mesh has no project."""
        spec = self._startup.spec
        if spec is None or spec.project is None or report.facts is None:
            return []
        queued: list[Effect] = []
        if not self._held:
            later = f"{self._machines.name(host) or report.hostname} gets the project too"
            queued = self._startup.queued(later if self._is_described else self._describe())
            self._is_described = True
        self._held[host] = report
        return [*queued, self._send((host,), CallId(f"files-{host}"))]

    def begin(self, client: str, command: messages.SyncProject) -> list[Effect]:
        """Bring files to all hosts that are there. The reply comes when all have them, or have failed or are lost."""
        spec = self._startup.spec
        if spec is None or spec.project is None or not self._startup.is_done:
            text = "this mesh has no copies of the project; %mesh restart --sync gives them to its machines"
            return [SendToClient(client, messages.Refused(call=command.call, error="SyncError", text=text))]
        self._files = command.files
        hosts = tuple(host for host in self._ranks.hosts if host not in self._machines.lost or host in self._held)
        self._open[command.call] = _Open(client, set(hosts))
        return [self._send(hosts, command.call)] if hosts else self._finish(command.call)

    def synced(
        self, host: int, report: messages.FilesSynced
    ) -> tuple[list[Effect], messages.HostReady | messages.HostFailed | None]:
        """Take note that a host has the files, or cannot have them.

        Returns:
            Effects, and what is to be done about a host whose ranks wait for that: it is ready, or has failed.
        """
        if (sync := self._open.get(report.call)) is not None:
            name = self._machines.name(host)
            sync.found[host] = HostFiles(name, report.num_files, report.num_bytes, report.num_removed, report.error)
            return self._reported(report.call, host), None
        held = self._held.pop(host, None) if report.call == f"files-{host}" else None
        if held is None:
            return [], None
        if report.error:
            return [], messages.HostFailed(host, f"{self._machines.name(host) or held.hostname}: {report.error}")
        return [] if self._held else self._startup.queued(""), held

    def host_lost(self, host: int) -> list[Effect]:
        """Wait no longer for a host."""
        self._held.pop(host, None)
        return [effect for call in list(self._open) for effect in self._reported(call, host)]

    def _reported(self, call: CallId, host: int) -> list[Effect]:
        self._open[call].waiting.discard(host)
        return [] if self._open[call].waiting else self._finish(call)

    def _finish(self, call: CallId) -> list[Effect]:
        sync = self._open.pop(call)
        synced = tuple(found for _, found in sorted(sync.found.items()))
        return [SendToClient(sync.client, messages.CommandReply(call=call, synced=synced))]

    def _send(self, hosts: tuple[int, ...], call: CallId) -> SendToHosts:
        assert self._startup.spec is not None
        project = self._startup.spec.project
        assert project is not None
        return SendToHosts(hosts, messages.SyncFiles(call, project.root, self._current(), project.uv))

    def _current(self) -> tuple[ProjectFile, ...]:
        return self._startup.files if self._files is None else self._files

    def _describe(self) -> str:
        """Return what the ranks' start waits for, as a sentence for the user."""
        assert self._startup.spec is not None
        project = self._startup.spec.project
        assert project is not None
        num_files, num_hosts = len(self._current()), len(self._ranks.hosts)
        size = sum(file.nbytes for file in self._current()) / (1 << 20)
        uv = "; uv sync --frozen runs there" if project.uv is not None else ""
        machines = f"{num_hosts} machine{'s'[: num_hosts != 1]}"
        return f"{project.root} goes to {machines}: {num_files} file{'s'[: num_files != 1]}, {size:.1f} MiB{uv}"
