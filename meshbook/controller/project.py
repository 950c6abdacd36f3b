"""A mesh's project, as this process brings it to the machines: at the start, on request, before cells of a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from meshbook import clock
from meshbook.controller.project_folder import ProjectFolder
from meshbook.controller.session import Session
from meshbook.controller.tables import format_bytes
from meshbook.errors import SyncError
from meshbook.wire import messages
from meshbook.wire.messages import HostFiles, ProjectFile

# A look takes 10 ms for 1,000 files (git 5, lstat 4; at a load of 11, 20 to 40). Before a cell it is left out for this
# many times as long as the last one took, so that looks take 2 % of the time, but for no longer than changes may take.
_PAUSE_FACTOR = 50
_MAX_PAUSE_S = 1.0
_MAX_LEFT_OUT = 5  # paths that are shown


@dataclass(frozen=True)
class Synced:
    """What a sync came to. Its text is what `%mesh sync` shows.

    Attributes:
        hosts: for each machine that is not lost.
        num_files: of the project.
        seconds: that it took.
        left_out: paths that do not travel, and why.
    """

    hosts: tuple[HostFiles, ...]
    num_files: int
    seconds: float
    left_out: dict[str, str]

    def __str__(self) -> str:
        alike: dict[tuple[int, int, int], list[str]] = {}
        for host in self.hosts:
            alike.setdefault((host.num_files, host.num_bytes, host.num_removed), []).append(host.machine)
        came = [
            f"{num_files:,} file{'s'[: num_files != 1]} ({format_bytes(num_bytes)}) went to {', '.join(machines)}"
            + (f", {num_removed:,} {'was' if num_removed == 1 else 'were'} removed there" if num_removed else "")
            for (num_files, num_bytes, num_removed), machines in alike.items()
        ]
        lines = [f"{'; '.join(came) or 'no machine is there'}; {self.num_files:,} in all, after {self.seconds:.2f} s."]
        return "\n".join([*lines, *describe_left_out(self.left_out)])

    __repr__ = __str__


class SyncedProject:
    """The project of one mesh."""

    def __init__(self, session: Session, spec: messages.ProjectSpec) -> None:
        self._session, self.folder = session, ProjectFolder(spec)
        self._sent: tuple[ProjectFile, ...] | None = None  # what all machines have; None: not known
        self._looked_at, self._look_s = float("-inf"), 0.0

    def look(self) -> tuple[ProjectFile, ...]:
        """Return the project's files as they are now. Raises SyncError."""
        began = clock.monotonic()
        files = self.folder.files()
        self._looked_at = clock.monotonic()
        self._look_s = self._looked_at - began
        return files

    def started(self, files: tuple[ProjectFile, ...]) -> None:
        """Take note that the mesh was started with these files."""
        self._sent = files

    def notes(self) -> list[str]:
        """Return what is to be known of the copies: what becomes of them, and what is not in them."""
        text = (
            f"ranks work in a copy of {self.folder.spec.root}, which is removed with the mesh: save results elsewhere"
        )
        return [text, *describe_left_out(self.folder.left_out)]

    def sync(self) -> Synced:
        """Bring the files to all machines. Blocks. Raises SyncError: some machine does not have them."""
        return self._send(self.look())

    def sync_if_changed(self) -> None:
        """Bring the files to all machines if one has changed; a look that was taken just now counts. Blocks.

        Raises:
            SyncError: some machine does not have them.
        """
        if clock.monotonic() - self._looked_at < min(_PAUSE_FACTOR * self._look_s, _MAX_PAUSE_S):
            return
        files = self.look()
        if files != self._sent:
            self._send(files)

    def _send(self, files: tuple[ProjectFile, ...]) -> Synced:
        self._sent, looked_at, self._looked_at = None, self._looked_at, float("-inf")
        self._session.check_attached()
        began = clock.monotonic()
        command = messages.SyncProject(call=self._session.connection.next_call_id(), files=files)
        hosts: tuple[HostFiles, ...] = self._session.connection.request(command).result().synced
        if failed := [f"{host.machine}: {host.error}" for host in hosts if host.error]:
            raise SyncError(f"the project folder was not brought to all machines. {'; '.join(failed)}")
        self._sent, self._looked_at = files, looked_at
        return Synced(hosts, len(files), clock.monotonic() - began + self._look_s, dict(self.folder.left_out))


def project_of(session: Session, spec: messages.MeshSpec | None = None) -> SyncedProject | None:
    """Return the project of a mesh; None: it was started without.

    Args:
        spec: of a mesh that is to start.
    """
    spec = session.info.spec if spec is None else spec
    if spec is None or spec.project is None:
        return None
    found: SyncedProject | None = session.extras.get("project")
    if found is None:
        found = session.extras["project"] = SyncedProject(session, spec.project)
    return found


def sync(session: Session) -> Synced:
    """Bring the project's files to the machines now; see `Mesh.sync`."""
    project = project_of(session)
    if project is None:
        raise SyncError(
            "this mesh was started without --sync, so that its machines have no copy of the project: %mesh restart "
            "--sync, or create_mesh(…, sync=True)"
        )
    return project.sync()


def describe_left_out(left_out: dict[str, str]) -> list[str]:
    """Return a line for each path that does not travel, up to a few."""
    lines = [f"left out: {path} {why}" for path, why in sorted(left_out.items())[:_MAX_LEFT_OUT]]
    more = len(left_out) - len(lines)
    return [*lines, *([f"… and {more} more"] if more > 0 else [])]
