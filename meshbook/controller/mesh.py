"""`meshbook.Mesh`: the Python object for a mesh of processes, or for a slice of one."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, ParamSpec, overload

from meshbook.controller import extensions, healing, remote, resizing, running, scattering, spares
from meshbook.controller.console import Console, current_cell_number, find_prompter
from meshbook.controller.debugging_methods import DebuggingMethods
from meshbook.controller.functions import FunctionBodyCell, RemoteFunction
from meshbook.controller.healed import Healed, Resized
from meshbook.controller.remote import RemoteValue
from meshbook.controller.results import RankValues
from meshbook.controller.session import Session
from meshbook.controller.spares import Spares
from meshbook.data import batches
from meshbook.errors import UsageError
from meshbook.ids import Ranks, name_ranks
from meshbook.mesh_axes import MeshAxes, Slice

P = ParamSpec("P")


class Mesh(DebuggingMethods):
    """A grid of ranks with named axes. Slices (`mesh.slice(dp=0)`, `mesh[1:3]`) share its processes.

    `Mesh(4)` or `Mesh((2, 2), mesh_dim_names=("dp", "tp"))` starts a mesh, as `create_mesh` does. As a context manager,
    it stops when the block ends; otherwise it stops when this process exits, unless it was detached.
    """

    def __init__(
        self,
        shape: Sequence[int] | int | None = None,
        mesh_dim_names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        started = extensions.find("create_mesh")(shape=shape, mesh_dim_names=mesh_dim_names, **options)
        self._session, self._fixed_axes = started._session, started._fixed_axes

    @classmethod
    def of(cls, session: Session, axes: MeshAxes) -> Mesh:
        """Return the view of a session's mesh that `axes` selects."""
        mesh = cls.__new__(cls)
        mesh._session, mesh._fixed_axes = session, None if axes == session.axes else axes
        return mesh

    # ---- the grid

    def size(self, axis: str | None = None) -> int:
        """Return the number of ranks; with an axis, the size of that axis."""
        return self._axes.size if axis is None else self._axes.size_of(axis)

    def slice(self, **which: int | Slice) -> Mesh:
        """Return the slice at these coordinates: an int drops the axis, a slice keeps it. Raises MeshShapeError."""
        return Mesh.of(self._session, self._axes.slice(**which))

    def flatten(self, name: str = "rank") -> Mesh:
        """Return the same ranks along one axis."""
        return Mesh.of(self._session, self._axes.flatten(name))

    def rename(self, **names: str) -> Mesh:
        """Return the same grid with other axis names: `rename(dp="replica")`."""
        return Mesh.of(self._session, self._axes.rename(**names))

    @overload
    def __getitem__(self, key: int | Slice | tuple[int | Slice, ...]) -> Mesh: ...

    @overload
    def __getitem__(self, key: str) -> RemoteValue: ...

    def __getitem__(self, key: Any) -> Any:
        """Return a handle to a name on the ranks (`mesh["x"]`), or a slice along the first axis (`mesh[1:3]`).

        A name whose value is a tensor with the same metadata on every rank gives a RemoteTensor that shares the
        tensor's storage. `mesh[0]` drops the first axis.

        Raises:
            MeshNameError: no rank has that name.
            MeshShapeError: the index is out of range.
        """
        if isinstance(key, str):
            self._session.check_attached()
            meta = remote.name_tensor_meta(self._session, key, self.ranks)
            tensor = None if meta is None else extensions.find("tensor_named")(self, f"name:{key}", meta)
            return tensor if tensor is not None else remote.handle_by_name(self._session, key, self.ranks)
        return Mesh.of(self._session, self._axes.select(key))

    def __setitem__(self, name: str, value: Any) -> None:
        """Bind a name on every rank: `mesh["lr"] = 0.1`. A handle binds each rank's own object."""
        self.push(**{name: value})

    def __len__(self) -> int:
        return self._axes.size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = ""
        if self._session.ended is not None:
            state = f", ended: {self._session.ended}"
        elif lost := [rank for rank in self._session.lost if rank in self.ranks]:
            state = f", {name_ranks(lost)} lost"
        return f"<Mesh {self.name!r} {self._axes}{state}>"

    # ---- running code

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | int | str | None = None,
        timeout: float | None = None,
        wait: bool = True,
        echo: bool = True,
        setup: bool = False,
    ) -> Any:
        """Run source code on the ranks, as a cell.

        Args:
            ranks: which ranks, as ints or as a selection (`"0,2-3"`, `"dp=0"`); None: all live ranks of this view.
            timeout: seconds after which the cell is interrupted; None: no limit while the ranks live.
            wait: False returns a MeshFuture immediately.
            echo: write output to this process's standard streams as it arrives, folded by rank.
            setup: run the cell again on ranks that join later.

        Returns:
            CellResult; with `wait=False` a MeshFuture of one.

        Raises:
            CellError: the cell raised on ranks; one entry per distinct failure.
            RankLost: a rank died while the cell ran; the other ranks were stopped and keep their state.
            MeshTimeout: the cell was interrupted after `timeout` seconds.
            CellInterrupted: Ctrl-C.
        """
        chosen_at = self._session.info.num_rank_changes if ranks is None else None
        chosen = self.resolve_ranks(ranks)
        command = self._session.cell_command(
            running.dedent(source),
            chosen,
            number=current_cell_number(),
            chosen_at=chosen_at,
            setup=setup,
            allow_input=wait and timeout is None and find_prompter() is not None,
            label="the cell",
        )
        console = Console(chosen, echo=echo)
        if not wait:
            return running.submit_command(self._session, command, console)
        return running.run_command(self._session, command, console, timeout)

    def execute(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankValues:
        """Call a function on every rank. Handles among the arguments arrive as the rank's own objects. Blocks.

        All keyword arguments are the function's. With a time limit: `mesh.remote(function).within(30)(...)`.

        Raises:
            CellError, RankLost: as `run`.
            TransferError: the function or an argument cannot be pickled; the message names the part.
        """
        return RemoteFunction(self, function)(*args, **kwargs)

    def remote(self, function: Callable[P, Any]) -> RemoteFunction[P]:
        """Decorate a function so that calling it runs it on every rank and returns RankValues."""
        return RemoteFunction(self, function)

    def cell(self, function: Callable[[], Any]) -> FunctionBodyCell:
        """Decorate a function so that its body runs immediately, as a cell on every rank, and binds its names there.

        For notebooks without magics, such as marimo. The decorated object gives access to the CellResult; calling it
        runs the body again.

        Raises:
            UsageError: the function has parameters, or its source cannot be found.
        """
        return FunctionBodyCell(self, function)

    def spawn(self, name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
        """Spawn an actor of `Class` on every rank, beside its cells, and return an ActorMesh.

        Handles among the arguments arrive as the rank's own objects. Waits until the ranks have accepted the actor, not
        for `Class.__init__`.

        Raises:
            ValueError: an actor of that name lives on these ranks.
            TransferError: the class or an argument cannot be pickled; the message names the part.
        """
        return extensions.find("spawn")(self, name, Class, *args, **kwargs)

    def actors(self) -> Any:
        """Return the actors on these ranks as a table: mailbox size, running message and its duration, last error.

        Queries the ranks' service threads, so running cells do not delay it; ranks that do not reply within two seconds
        are left out.

        `mesh.actors()["trainers"]` is the ActorMesh of that name, whichever program spawned it. Actors whose owner has
        exited, for example after a kernel restart, then belong to this program, which receives their failures.
        """
        return extensions.find("actors")(self)

    # ---- names and values

    def push(self, **names: Any) -> None:
        """Bind names on every rank. Makes one copy through shared memory, whatever the number of ranks. Blocks.

        Raises:
            TransferError: a value cannot be pickled; the message names the part.
        """
        chosen_at = self._session.info.num_rank_changes
        self._session.set_names(names, self.resolve_ranks(None), chosen_at=chosen_at)

    def pull(self, what: str | RemoteValue, *, ranks: Sequence[int] | int | str | None = None) -> RankValues:
        """Return the ranks' values of a name (or of a handle), by rank. Blocks until the cells before it have ended.

        Args:
            what: a name ("losses"), also with attributes ("model.weight"), or a handle.

        Raises:
            MeshNameError: no rank has that name.
            TransferError: a value cannot be pickled.
        """
        chosen = self.resolve_ranks(ranks)
        if isinstance(what, str):
            self._session.check_attached()
            return remote.pull_by_name(self._session, what, chosen, self.ranks)
        if not isinstance(what, RemoteValue):  # a remote tensor
            command = self._session.call_command(operator.getitem, ((what,), 0), {}, chosen, retain=False, label="pull")
            return self._session.run_for_values(command)
        return remote.pull(what, chosen)

    @overload
    def scatter(
        self, batch: Any, *, axis: str | None = None, dim: int = 0, view: Literal["local"] = "local"
    ) -> RemoteValue: ...

    @overload
    def scatter(self, batch: Any, *, axis: str | None = None, dim: int = 0, view: Literal["global"]) -> Any: ...

    def scatter(self, batch: Any, *, axis: str | None = None, dim: int = 0, view: str = "local") -> Any:
        """Split a batch along `dim`, one piece per coordinate of `axis`. Blocks.

        The pieces are those of `torch.chunk`: the last ones are shorter if the length is not divisible. Ranks at the
        same coordinate of the axis get the same piece. `axis` may be omitted on a mesh with one axis.

        Args:
            batch: a tensor or an array; a table (Arrow, Polars, pandas, a DuckDB result), which becomes a dict of
                columns; a dict or a tuple of these, each of which is split; or another sequence, split by its items.
            view: "local" returns a handle to each rank's own piece; "global" returns a RemoteTensor of the complete
                batch, sharded along dim 0, as `feed` does.

        Returns:
            A handle to the pieces, or with view="global" the batch with RemoteTensors in it.
        """
        axis = self._resolve_axis(axis)
        batch = batches.materialize(batch)
        if view != "local":
            if dim != 0:
                raise UsageError(f"view={view!r} cuts along dim 0; meshbook.distribute takes any placements")
            return next(self.feed([batch], axis=axis, prefetch=0, uneven=True, view=view))
        return scattering.scatter(self._session, self._axes, batch, axis, dim)

    def feed(
        self,
        source: Any,
        *,
        axis: str | None = None,
        prefetch: int = 2,
        batch_size: int | None = None,
        drop_last: bool = False,
        uneven: bool = False,
        view: str = "global",
    ) -> Iterator[Any]:
        """Iterate over batches, copied into shared memory and sharded along dim 0 over `axis` while the ranks compute.

            for x, y in mesh.feed(loader, axis="dp"): ...

        Args:
            source: an iterable of batches, async or not: tensors, arrays, tables (Arrow, Polars, pandas; each becomes
                a dict of columns), or tuples and dicts of them. Or one table, array or DuckDB result, with
                `batch_size`. Other objects in a batch pass through unchanged. An async source runs in an event loop of
                its own, on another thread.
            axis: the axis to shard rows over; ranks at the same coordinate get the same rows. It may be omitted on a
                mesh with one axis.
            prefetch: number of batches that are ready or in flight while the loop body runs; 0 fetches each on demand,
                without a thread.
            batch_size: rows per batch, if the source has no batches of its own.
            drop_last: omit a last batch whose length is not divisible by the axis size.
            uneven: split batches that are not divisible as torch.chunk does, instead of raising.
            view: "global" yields a RemoteTensor of the complete batch; "local" yields a handle to each rank's own rows.

        Returns:
            An iterator with `close()`; it closes itself when it is exhausted or garbage-collected.

        Raises:
            PlacementError: a batch is not divisible; the message shows the calculation.
            Exception: what the source raised, at the batch where it raised it.
        """
        found: Iterator[Any] = extensions.find("feed")(
            self,
            source,
            axis=axis,
            prefetch=prefetch,
            batch_size=batch_size,
            drop_last=drop_last,
            uneven=uneven,
            view=view,
        )
        return found

    def gather(self, what: str | RemoteValue, *, axis: str | None = None, dim: int = 0) -> Any:
        """Return the pieces along `axis`, concatenated along `dim`: the inverse of `scatter`. Blocks.

        Among ranks at the same coordinate of the axis, the first one provides the piece.

        Returns:
            `torch.Tensor`, `numpy.ndarray`, or a list, as the pieces are.
        """
        return scattering.gather(self._axes, self._resolve_axis(axis), dim, lambda ranks: self.pull(what, ranks=ranks))

    # ---- remote tensors

    def activate(self) -> AbstractContextManager[Any]:
        """Create one tensor per rank, as a RemoteTensor: `with mesh.activate(): t = torch.rand(3, 4)`."""
        found: AbstractContextManager[Any] = extensions.find("activate")(self)
        return found

    def resilient(self, *things: Any, every: int = 50, restart: bool = False) -> Any:
        """Run a loop on remote tensors so that a fault loses no step.

            with mesh.resilient(model, opt, losses, every=50) as run:
                for x, y in run.steps(loader):
                    with run.step():
                        ...

        Every so many steps the ranks copy the state into their memory, while this process goes on. When a rank is lost
        in `run.step()`, the mesh is healed, and the loop goes on from the last snapshot. After any other fault, and
        without `run.step()`, it does so when the block is run again: after `mesh.heal()` where a rank was lost, after a
        Stop or an exception at once.

        Args:
            things: what the steps change: modules, optimizers and whatever else has `state_dict` and
                `load_state_dict`, tensors, `torch.Generator`s, lists, dicts and sets. They keep their identity. The
                random states of torch, NumPy and Python here are always part of it.
            every: steps between two snapshots.
            restart: begin anew, whatever was interrupted.

        Returns:
            Resilient: to be used as a block.

        Raises:
            UsageError: an object cannot be put back, an optimizer's module is missing, or nothing is on this mesh.
        """
        return extensions.find("resilient")(self, *things, every=every, restart=restart)

    def _resolve_axis(self, axis: str | None) -> str:
        if axis is not None:
            self._axes.size_of(axis)
            return axis
        if len(self.axes) != 1:
            raise UsageError(f"this mesh has the axes {', '.join(self.axes)}; say along which with axis=…")
        return next(iter(self.axes))

    # ---- control

    def interrupt(self, ranks: Sequence[int] | int | str | None = None) -> None:
        """Interrupt what the ranks run, as the Stop button does. Does not wait."""
        self._session.check_attached()
        chosen = self.ranks if ranks is None else self._parse_ranks(ranks)
        self._session.interrupt(chosen)

    def kill(self, ranks: Sequence[int] | int | str, *, signal: int = 9) -> None:
        """Send a signal to ranks; SIGKILL by default."""
        self._session.kill(self._parse_ranks(ranks), signal)

    def heal(
        self,
        ranks: Sequence[int] | int | str = (),
        *,
        replay: bool = True,
        share: bool = True,
        copy: bool | str | Sequence[str] = False,
        restore: bool | str | os.PathLike[str] = False,
    ) -> Healed:
        """Put new processes in the place of ranks that have exited; the other ranks keep all they have. Blocks.

        A rank whose CUDA context is dead is replaced too (a device-side assert, an illegal memory access).

        A new process runs the setup cells (`%%mesh --setup`, `run(..., setup=True)`), and the imports and definitions
        of other cells. Then it gets what is proven to be what the lost rank held: replicas (DDP models, DTensors, their
        optimizers), and models, optimizers and tensors that two or more others hold alike. The rest is listed.

        Args:
            ranks: replaced too, although they live.
            replay: run those cells.
            share: copy what the others hold.
            copy: names of what else to copy, where the others hold it alike; True: all. Also later, without a loss.
            restore: if something could not be had, bring all ranks back to the last checkpoint of this mesh that has
                it; or to the one in this folder.

        Returns:
            Healed: what is back, and by name what is not. Its text is what `%mesh heal` shows.

        Raises:
            HealError: a cell runs, or the attempt failed, or the restore did. Living ranks keep what they hold.
            CellInterrupted: Stop was pressed; the message says whether the ranks are healed, or still being healed.
        """
        options: dict[str, Any] = {"replay": replay, "share": share, "copy": copy, "restore": restore}
        return healing.heal(self._session, () if ranks == () else self._parse_ranks(ranks), **options)

    def resize(self, size: int | Mapping[str, int] | None = None, /, **axes: int) -> Resized:
        """Change the number of ranks: `resize(6)`, or by axes, `resize(dp=3)`. Blocks.

        Ranks above the new number end; new ones join, with what cells define and all that the others hold alike.
        The others keep all they have: DDP models, optimizers and process groups go on over the new number.
        Ranks that were lost are replaced, if they stay. `world_size` and `mesh` change on every rank. See
        docs/resize.md for what happens to batches and the learning rate (nothing).

        Args:
            size: of the first axis times the others; or all axes, as a dict.
            axes: new sizes of some axes.

        Returns:
            Resized: what has changed, and by name what new ranks have not. Its text is what `%mesh resize` shows.

        Raises:
            MeshShapeError, UsageError: the new axes are none, or need more GPUs than there are.
            ResizeError: a cell runs; models are cut for the present ranks (FSDP2, DTensors); or it was not completed.
            CellInterrupted: as `heal`.
        """
        return resizing.resize(self._session, size, axes)

    def spare(self, num: int | None = None) -> Spares:
        """Keep processes ready that new ranks of `heal` and `resize` can be: so many on each machine. Does not wait.

        They have imported what the ranks have, so that a new rank does not begin with it. Each costs the memory that
        those imports take. `spare(0)` ends them; without a number nothing changes.

        Returns:
            Spares: how many there are, how warm they are and what they cost. Its text is what `%mesh spare` shows.

        Raises:
            UsageError, MeshShapeError: the number is none, or more than the ranks of a machine.
        """
        return spares.spare(self._session, num)

    def dashboard(self) -> Any:
        """Return a live dashboard of these ranks with its controls: a widget, for the end of a cell.

        In marimo: `mo.ui.anywidget(mesh.dashboard())`. Repeated calls return the same widget; its `close()` ends it.
        Waits a few milliseconds for the first snapshot.

        Raises:
            NotAttached: the mesh has ended.
        """
        return extensions.find("dashboard")(self)

    def detach(self, orphan_ttl_s: float | None = None) -> None:
        """Leave the mesh running without this process; `meshbook.attach(name)` attaches to it again.

        Args:
            orphan_ttl_s: seconds that it may live without any client; None: until it is stopped.

        Raises:
            NotAttached: the supervisor did not reply; this process has detached anyway.
        """
        self._session.detach(orphan_ttl_s)

    def stop(self) -> None:
        """Stop every rank and the supervisor, after saves that are being written; Ctrl-C gives these up. Blocks."""
        try:
            self._finish_saves()
        finally:
            self._session.stop()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def resolve_ranks(self, ranks: Sequence[int] | int | str | None) -> Ranks:
        """Return the selected ranks, all of them alive; None: the live ranks of this view.

        Raises:
            MeshShapeError: a rank is not in this mesh.
            RankLost: a rank that was selected by number is lost.
            NotAttached: the mesh has ended.
        """
        self._session.check_attached()
        return running.require_living(self._session, self.ranks, None if ranks is None else self._parse_ranks(ranks))
