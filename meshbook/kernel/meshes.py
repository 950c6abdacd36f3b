"""The meshes of one notebook: started, found again after a restart, attached, and left or stopped."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from meshbook.controller.background_output import background_output_of
from meshbook.controller.config import Defaults, read_defaults
from meshbook.controller.mesh import Mesh
from meshbook.controller.session import Session
from meshbook.controller.starting import attach, generate_mesh_name, launch_session, make_spec, start_ranks
from meshbook.controller.tables import format_some
from meshbook.errors import MeshInUse, MeshNameError, NotAttached, UsageError
from meshbook.ids import name_ranks
from meshbook.kernel.mesh_options import MeshOptions
from meshbook.kernel.unattended_cells import NoticeHandler, report_cells
from meshbook.kernel.warm_start import WarmStarter, mesh_name_stem, owner_key
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import keys, messages

_MAX_NAMES_LISTED = 8


class NotebookMeshes(Mapping[str, Mesh]):
    """This notebook's meshes by name, in the order in which they were added, and the current one.

    Attributes:
        current: the mesh that cells run on; None: none was started, or it was stopped or detached.
    """

    def __init__(
        self,
        kind: str,
        *,
        on_switch: Callable[[Mesh | None], object],
        on_notice: NoticeHandler,
        on_orphan: Callable[[Session, messages.OpenCall], object],
    ) -> None:
        """Begin without meshes.

        Args:
            kind: the kind of client, "kernel" or "ipython".
            on_switch: called with the new current mesh.
            on_notice: receives sentences for the user about meshes that were found.
            on_orphan: called with a running cell whose client is gone, after the notice of it.
        """
        self.current: Mesh | None = None
        self._kind, self._on_switch, self._on_notice, self._on_orphan = kind, on_switch, on_notice, on_orphan
        self._meshes: dict[str, Mesh] = {}
        self._persistent: set[str] = set()  # the meshes that do not end with this notebook
        self._owner = owner_key()
        self._warm_starter: WarmStarter | None = None

    def __getitem__(self, name: str) -> Mesh:
        return self._meshes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._meshes))

    def __len__(self) -> int:
        return len(self._meshes)

    def get_mesh(self, name: str | None) -> Mesh:
        """Return a mesh of this notebook; None: the current one.

        Raises:
            NotAttached: there is no current one.
            MeshNameError: no mesh of this notebook has that name.
        """
        if name is None:
            if self.current is None:
                raise NotAttached("this notebook has no mesh; start one with %mesh start -n 4")
            return self.current
        if name not in self._meshes:
            own_names = ", ".join(self._meshes) or "none"
            raise MeshNameError(f"no mesh of this notebook is named {name!r}; its own: {own_names}")
        return self._meshes[name]

    def others(self) -> list[str]:
        """Return the names of this user's meshes that this notebook does not have, those with ranks only."""
        return [found.name for found in keys.list_connections() if found.has_ranks and found.name not in self]

    # ---- starting

    def begin_warm_start(self, *, warm: bool) -> None:
        """Search for this notebook's existing meshes in the background.

        Args:
            warm: launch a supervisor for the first cell if there are none.
        """
        if self._warm_starter is None:
            ttl = _lenient_defaults().orphan_ttl_s
            self._warm_starter = WarmStarter(self._owner, kind=self._kind, orphan_ttl_s=ttl, warm=warm)

    def reattach(self) -> None:
        """Attach to the existing meshes that the search found. Waits for the search to finish."""
        if self._warm_starter is None:
            return
        found = []
        for session in self._warm_starter.pop_sessions():
            assert session.axes is not None
            if not session.living(session.axes.ranks):
                session.stop()
                self._on_notice(f"every rank of this notebook's mesh {session.name} had died; the mesh was stopped")
                continue
            self._add(Mesh.of(session, session.axes), persistent=_lenient_defaults().keep)
            self._on_notice(
                f"back on mesh {session.name}: {name_ranks(session.living(session.axes.ranks))} kept what they hold"
                f"{format_names(session.info.names)}; %mesh restart gives fresh ranks"
            )
            found.append(session)
        while self._warm_starter.in_use:
            name, kernels = self._warm_starter.in_use.pop()
            self._on_notice(
                f"this notebook's mesh {name} is left to {kernels}, attached to it; %mesh attach {name} goes back"
            )
        for session in found:  # after all were added, because what shows their output depends on that
            self._report_cells(session, "from before the kernel's restart")

    def start(self, options: MeshOptions, name: str | None = None) -> Mesh:
        """Start a mesh and make it current. Waits until its process group is ready.

        If the notebook's mesh already runs and is what the options ask for, it is returned, so a cell with `%mesh
        start` may run again. Otherwise a new mesh starts.

        Args:
            name: None: derived from the notebook. A name makes it an additional mesh beside the notebook's others.

        Raises:
            MeshInUse: the notebook's mesh differs from the options; or the name is taken.
            MeshShapeError, UsageError, StartError: as `create_mesh`.
        """
        self.reattach()
        defaults = read_defaults()
        running = self._find_running(name)
        if running is not None and not running.session.living(running.ranks):
            running.stop()  # no live rank holds any state
            self._remove(running)
        elif running is not None:
            if differences := options.differences(running.session.info):
                raise MeshInUse(
                    f"this notebook's mesh {running.name!r} is running already, but {'; '.join(differences)}. %mesh "
                    "restart, with the same options, replaces it by fresh ranks (what the old ones hold is lost); "
                    "%mesh start --name OTHER starts one beside it"
                )
            if options.keep:
                self._make_persistent(running)
            if options.orphan_ttl_s is not None:
                running.session.connection.send(messages.SetOrphanTtl(orphan_ttl_s=options.orphan_ttl_s))
            self.use(running.name)
            return running
        grid = options.grid or MeshAxes.of(defaults.num_ranks())
        spec = make_spec(grid, **options.spec_fields())
        persistent = defaults.keep if options.keep is None else options.keep
        return self._start(grid, spec, name, persistent, options.orphan_ttl_s)

    def restart(self, options: MeshOptions, name: str | None = None) -> Mesh:
        """Replace a mesh's ranks by new ones; the old ranks' state is lost. Waits until the process group is ready.

        Args:
            options: what is not given stays as it was.
            name: None: the current mesh. The name does not change.

        Raises:
            NotAttached: there is no mesh to restart.
            MeshNameError, MeshShapeError, UsageError: the options are invalid; the mesh keeps running unchanged.
            StartError: the old ranks have exited, and the new ones did not start.
        """
        self.reattach()
        mesh = self.get_mesh(name)
        old = mesh.session.info.spec
        assert old is not None
        grid = options.grid or MeshAxes.of(dict(old.axes))
        spec = make_spec(grid, **options.spec_fields(old))
        persistent = mesh.name in self._persistent if options.keep is None else options.keep
        mesh.stop()
        self._remove(mesh)
        return self._start(grid, spec, mesh.name, persistent, options.orphan_ttl_s)

    def _start(
        self, grid: MeshAxes, spec: messages.MeshSpec, name: str | None, persistent: bool, orphan_ttl_s: float | None
    ) -> Mesh:
        session, environment = self._obtain_supervisor(name, orphan_ttl_s, cold=bool(spec.on))
        mesh = Mesh.of(start_ranks(session, grid, _with_environment(spec, environment)), grid)
        self._add(mesh, persistent=persistent)
        return mesh

    def _obtain_supervisor(
        self, name: str | None, ttl: float | None, *, cold: bool
    ) -> tuple[Session, Mapping[str, str]]:
        """Return a session of a supervisor without ranks, and the environment that its ranks will inherit."""
        warm_starter = self._warm_starter
        if warm_starter is not None and name is None and ttl is None:
            standby = warm_starter.pop_standby()
            if standby is not None:
                return standby, warm_starter.inherited_environment
        elif warm_starter is not None and not self._meshes:
            warm_starter.close()
        generated = generate_mesh_name(mesh_name_stem(self._owner))
        orphan_ttl_s = read_defaults().orphan_ttl_s if ttl is None else ttl
        session = launch_session(
            name or generated, owner=self._owner, cold=cold, kind=self._kind, orphan_ttl_s=orphan_ttl_s
        )
        return session, dict(os.environ)

    def _find_running(self, name: str | None) -> Mesh | None:
        """Return the running mesh that `start` refers to, or None if it must be started.

        With a name: the mesh of that name. Without: this notebook's mesh with a generated name, else the current mesh.
        """
        alive = {mesh.name: mesh for mesh in self._meshes.values() if mesh.session.ended is None}
        if name is not None:
            return alive.get(name)
        unnamed = re.compile(re.escape(mesh_name_stem(self._owner)) + "-[0-9a-f]{4}")
        found = [mesh for mesh in alive.values() if unnamed.fullmatch(mesh.name)]
        return found[-1] if found else alive.get(self.current.name) if self.current is not None else None

    # ---- choosing, attaching, leaving

    def use(self, name: str) -> None:
        """Make this one of the notebook's meshes current. Raises MeshNameError."""
        self.current = self.get_mesh(name)
        self._on_switch(self.current)

    def attach(self, name: str | None = None) -> Mesh:
        """Attach to a running mesh, whoever started it, and make it current; it does not end with this notebook.

        Args:
            name: None: the only mesh besides this notebook's; without one, this notebook's current one.

        Raises:
            NotAttached, MeshNameError, VersionMismatch: as `meshbook.attach`.
        """
        self.reattach()
        if name is None:
            others = self.others()
            current = self.current.name if self.current is not None and not others else None
            name = others[0] if len(others) == 1 else current
        if name is not None and name in self._meshes and self._meshes[name].session.ended is None:
            self.use(name)
            return self._meshes[name]
        mesh = attach(name, kind=self._kind)
        self._add(mesh, persistent=True)
        self._report_cells(mesh.session, "of another client")
        return mesh

    def detach(self, name: str | None = None, orphan_ttl_s: float | None = None) -> None:
        """Leave a mesh running without this notebook.

        Args:
            name: None: the current one.
            orphan_ttl_s: seconds that it may live without any client; None: until it is stopped.
        """
        mesh = self.get_mesh(name)
        mesh.detach(orphan_ttl_s)
        self._remove(mesh)

    def stop(self, name: str | None = None) -> None:
        """Stop a mesh and everything on it; None: the current one. Waits until it has exited."""
        mesh = self.get_mesh(name)
        mesh.stop()
        self._remove(mesh)

    def close(self, *, restart: bool) -> None:
        """Handle an orderly shutdown of the kernel: stop its meshes, except persistent ones and before a restart.

        Args:
            restart: the kernel will start again; its running cell is interrupted and its meshes stay.
        """
        if self._warm_starter is not None:
            self._warm_starter.close()
        meshes = list(self._meshes.values())
        if restart:
            for mesh in meshes:
                mesh.session.foreground.interrupt(may_escalate=False)
        for mesh in meshes:
            if restart:
                mesh.session.disable_stop_at_exit()
            elif mesh.name not in self._persistent:
                mesh.stop()

    def interrupt_foreground(self) -> bool:
        """Interrupt the foreground cells, as the Stop button does. Thread-safe.

        Returns:
            Whether ranks were running anything for this notebook's foreground.
        """
        interrupted = [
            mesh.session.foreground.interrupt(expect_sigint=True) for mesh in list(self._meshes.values())
        ]  # a list, so that every session is interrupted, not only the first
        return any(interrupted)

    def _add(self, mesh: Mesh, *, persistent: bool) -> None:
        """Add a mesh and make it current; `persistent`: it does not end with this notebook."""
        if persistent:
            self._make_persistent(mesh)
        for other in list(self._meshes.values()):
            if other.session.ended is not None:
                self._remove(other)
        background_output_of(mesh.session)
        self._meshes[mesh.name] = mesh
        self.use(mesh.name)

    def _make_persistent(self, mesh: Mesh) -> None:
        mesh.session.disable_stop_at_exit()
        self._persistent.add(mesh.name)

    def _remove(self, mesh: Mesh) -> None:
        self._meshes.pop(mesh.name, None)
        self._persistent.discard(mesh.name)
        if self.current is not None and self.current.session is mesh.session:
            self.current = next(reversed(self._meshes.values()), None)
            self._on_switch(self.current)

    def _report_cells(self, session: Session, origin: str) -> None:
        report_cells(
            session,
            origin=origin,
            is_only_mesh=len(self._meshes) == 1,
            on_notice=self._on_notice,
            on_orphan=self._on_orphan,
        )


def format_names(names: Sequence[str]) -> str:
    """Return names in brackets for the end of a clause, or nothing if there are none."""
    return f" ({format_some(names, _MAX_NAMES_LISTED)})" if names else ""


def _lenient_defaults() -> Defaults:
    """Return the defaults, without raising on an invalid file: starting a mesh reports that error."""
    try:
        return read_defaults()
    except UsageError:
        return Defaults()


def _with_environment(spec: messages.MeshSpec, inherited: Mapping[str, str]) -> messages.MeshSpec:
    """Return the spec with the environment variables set in this process since the supervisor was launched."""
    changed = {name: value for name, value in os.environ.items() if inherited.get(name) != value}
    return msgspec.structs.replace(spec, env={**changed, **spec.env}) if changed else spec
