"""`meshbook.Mesh`: a mesh of processes, or a part of one, as an object in Python."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import secrets
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from meshbook.controller import batches, extensions, marimo, remote, reports
from meshbook.controller.background_output import background_output_of
from meshbook.controller.config import read_defaults
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.console import Console, prompt_on_terminal
from meshbook.controller.futures import MeshFuture
from meshbook.controller.launch import launch_supervisor
from meshbook.controller.remote import RemoteValue
from meshbook.controller.reports import Stacks, Why
from meshbook.controller.results import CellResult, RankValues
from meshbook.controller.session import Session
from meshbook.controller.tables import Table
from meshbook.errors import MeshTimeout, NotAttached, RankLost, StartError, UsageError
from meshbook.host.gpus import count_gpus
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.mesh_axes import MeshAxes, Slice
from meshbook.placement import shard_spans
from meshbook.rank import expressions
from meshbook.wire import keys, messages

P = ParamSpec("P")
T = TypeVar("T")

ENGINES = ("local",)


class Mesh:
    """Ranks in a grid of named axes. Views (`mesh.slice(dp=0)`, `mesh[1:3]`) share its processes.

    `Mesh(shape=(2, 2), mesh_dim_names=("dp", "tp"))` starts one, as `create_mesh` does. As a context manager it is
    stopped at the end; otherwise when this process ends, unless it was detached.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        started = create_mesh(shape=shape, mesh_dim_names=mesh_dim_names, **options)
        self._session: Session = started._session
        self._axes: MeshAxes = started._axes

    @classmethod
    def of(cls, session: Session, axes: MeshAxes) -> Mesh:
        """The view of a session's mesh that `axes` cuts out."""
        mesh = cls.__new__(cls)
        mesh._session, mesh._axes = session, axes
        return mesh

    # ---- the grid

    @property
    def name(self) -> str:
        """What `meshbook list` and `attach` know it by."""
        return self._session.name

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> size, outermost first."""
        return self._axes.axes

    @property
    def ranks(self) -> Ranks:
        """Global ranks, in grid order."""
        return self._axes.ranks

    @property
    def grid(self) -> MeshAxes:
        """The arithmetic behind this view."""
        return self._axes

    @property
    def session(self) -> Session:
        """What all views of this mesh share."""
        return self._session

    def size(self, axis: str | None = None) -> int:
        """How many ranks; with an axis, how many places it has."""
        return self._axes.size if axis is None else self._axes.size_of(axis)

    def slice(self, **which: int | Slice) -> Mesh:
        """The part at these places: an int drops the axis, a slice keeps it. Raises MeshShapeError."""
        return Mesh.of(self._session, self._axes.slice(**which))

    def flatten(self, name: str = "rank") -> Mesh:
        """The same ranks along one axis."""
        return Mesh.of(self._session, self._axes.flatten(name))

    def rename(self, **names: str) -> Mesh:
        """The same grid with other axis names: `rename(dp="replica")`."""
        return Mesh.of(self._session, self._axes.rename(**names))

    @overload
    def __getitem__(self, key: int | Slice | tuple[int | Slice, ...]) -> Mesh: ...

    @overload
    def __getitem__(self, key: str) -> RemoteValue: ...

    def __getitem__(self, key: Any) -> Any:
        """`mesh["x"]`: a handle to the ranks' `x`; a RemoteTensor, with its storage, where every rank has one alike.
        `mesh[0]`, `mesh[1:3]`: a part, along the first axis.

        Raises:
            MeshNameError: no rank has that name.
            MeshShapeError: no such place.
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
        """Run source on the ranks, as a cell.

        Args:
            ranks: some of them, as ints or as a selection (`"0,2-3"`, `"dp=0"`); None: all of this view that live.
            timeout: seconds, after which the cell is interrupted; None waits for as long as the ranks live.
            wait: False gives a MeshFuture at once.
            echo: show output as it comes, folded by rank, on this process's standard streams.
            setup: run it again on ranks that join later.

        Returns:
            CellResult; with `wait=False` a MeshFuture of one.

        Raises:
            CellError: it raised on ranks; one entry per distinct failure.
            RankLost: a rank died while it ran; the others were stopped and keep their state.
            MeshTimeout: it was interrupted after `timeout` seconds.
            CellInterrupted: Ctrl-C.
        """
        chosen = self.resolve_ranks(ranks)
        command = self._session.cell_command(
            textwrap.dedent(source), chosen, setup=setup, allow_input=wait, label="the cell"
        )
        console = Console(chosen, echo=echo)
        return self._run_command(command, console, timeout, wait)

    def execute(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankValues:
        """Call a function on every rank. Handles among the arguments arrive as the rank's own objects. Blocks.

        Raises:
            CellError, RankLost: as `run`.
            TransferError: function or arguments cannot be pickled; the message names the part.
        """
        ranks = self.resolve_ranks(None)
        label = f"{getattr(function, '__name__', 'the function')}()"
        command = self._session.call_command(function, args, kwargs, ranks, label=label)
        console = Console(ranks, echo=True)
        result: CellResult = self._run_command(command, console, None, True)
        return result.values

    def remote(self, function: Callable[P, Any]) -> RemoteFunction[P]:
        """Decorator: a function that runs on every rank when it is called, and returns RankValues."""
        return RemoteFunction(self, function)

    def cell(self, function: Callable[[], Any]) -> FunctionBodyCell:
        """Decorator: the function's body runs at once, as a cell on every rank; its names bind there.

        For notebooks without magics, such as marimo. Gives the CellResult; call it to run the body again.

        Raises:
            UsageError: the function has parameters, or its source cannot be found.
        """
        return FunctionBodyCell(self, function)

    def _run_command(self, command: Any, console: Console, timeout: float | None, wait: bool) -> Any:
        session = self._session

        def finish(finished: messages.CallFinished) -> CellResult:
            session.raise_for_status(finished, command.ranks, label=command.label)
            return session.cell_result(finished, console.text)

        if not wait:
            source = session.request(command, on_output=console)
            return session.future(source, command, finish)
        if timeout is not None:
            return self._run_with_timeout(timeout, command, console, finish)
        on_input = prompt_on_terminal if sys.stdin is not None and sys.stdin.isatty() else None
        return finish(session.run_foreground(command, on_output=console, on_input=on_input))

    def _run_with_timeout(
        self, timeout: float, command: Any, console: Console, finish: Callable[[messages.CallFinished], CellResult]
    ) -> CellResult:
        source = self._session.request(command, on_output=console)
        future: MeshFuture[CellResult] = self._session.future(source, command, finish)
        try:
            return future.result(timeout)
        except MeshTimeout:
            future.interrupt()
            future.exception(10.0)
            raise MeshTimeout(f"{command.label} did not end within {timeout:g} s and was interrupted") from None
        except KeyboardInterrupt:
            future.interrupt()
            return future.result(10.0)

    def spawn(self, name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
        """Make an actor of `Class` on every rank, beside its cells; an ActorMesh. Handles among the arguments arrive as
        the rank's own objects. Waits until the ranks have taken it, not for `Class.__init__`.

        Raises:
            ValueError: an actor of that name lives on these ranks.
            TransferError: the class or an argument cannot be pickled; the message names the part.
        """
        return extensions.find("spawn")(self, name, Class, *args, **kwargs)

    def actors(self) -> Any:
        """The actors on these ranks, as a table: what waits in their mailboxes, what they run and for how long, their
        last error. Asks them beside whatever they do; ranks that do not answer within two seconds are left out.

        `mesh.actors()["trainers"]` gives those of a name, an ActorMesh, whoever has spawned them. Actors whose owner is
        gone, as after a restart of the kernel, are from then on this program's: it hears of their failures.
        """
        return extensions.find("actors")(self)

    # ---- names and values

    def push(self, **names: Any) -> None:
        """Bind names on every rank. One copy through shared memory, whatever the number of ranks. Blocks.

        Raises:
            TransferError: a value cannot be pickled; the message names the part.
        """
        self._session.set_names(names, self.resolve_ranks(None))

    def pull(self, what: str | RemoteValue, *, ranks: Sequence[int] | int | str | None = None) -> RankValues:
        """Bring what the ranks hold under a name (or behind a handle) here, by rank. Blocks.

        Raises:
            MeshNameError: no rank has that name.
            TransferError: a value cannot be pickled.
        """
        chosen = self.resolve_ranks(ranks) if ranks is not None else self._session.living(self.ranks)
        if isinstance(what, str):
            self._session.check_attached()
            what = remote.handle_by_name(self._session, what, self.ranks)
        if not isinstance(what, RemoteValue):  # a remote tensor
            command = self._session.call_command(operator.getitem, ((what,), 0), {}, chosen, retain=False, label="pull")
            finished = self._session.run_foreground(command)
            self._session.raise_for_status(finished, chosen, label="pull")
            return self._session.rank_values(finished.outcomes)
        return remote.pull(what, chosen)

    @overload
    def scatter(
        self, batch: Any, *, axis: str | None = None, dim: int = 0, view: Literal["local"] = "local"
    ) -> RemoteValue: ...

    @overload
    def scatter(self, batch: Any, *, axis: str | None = None, dim: int = 0, view: Literal["global"]) -> Any: ...

    def scatter(self, batch: Any, *, axis: str | None = None, dim: int = 0, view: str = "local") -> Any:
        """Cut a batch along `dim`, one piece per place of `axis`. Blocks.

        The pieces are as `torch.chunk` would cut them, the last ones shorter where it does not divide. Ranks at the
        same place of the axis get the same piece. With one axis it need not be named.

        Args:
            batch: a tensor or an array; a table (Arrow, Polars, pandas, a DuckDB result), which becomes a dict of
                columns; a dict or a tuple of these, each cut; or another sequence, cut by its items.
            view: "local" gives a handle to each rank's own piece; "global" a RemoteTensor of the whole batch, cut
                along dim 0, as `feed` does.

        Returns:
            A handle to the pieces, or with view="global" the batch with RemoteTensors in it.
        """
        axis = self._resolve_axis(axis)
        batch = batches.materialize(batch)
        if view != "local":
            if dim != 0:
                raise UsageError(f"view={view!r} cuts along dim 0; meshbook.distribute takes any placements")
            return next(self.feed([batch], axis=axis, prefetch=0, uneven=True, view=view))
        spans = [shard_spans(length, self._axes.size_of(axis)) for length in batches.cut_lengths(batch, dim)]
        pieces = {
            rank: batches.slice_batch(batch, dim, [span[self._axes.point(rank)[axis]] for span in spans])
            for rank in self._session.living(self.ranks)
        }
        key = RemoteValue(self._session, expressions.Expression(expressions.NameRef("rank")), tuple(pieces))
        command = self._session.call_command(
            operator.getitem, (pieces, key), {}, tuple(pieces), always_retain=True, label="scatter", inline_limit=0
        )
        finished = self._session.run_foreground(command)
        self._session.raise_for_status(finished, command.ranks, label="scatter")
        values = self._session.rank_values(finished.outcomes)
        return remote.result_handle(self._session, command.call, command.ranks, values, "scattered")

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
        """Batches for the ranks, copied into shared memory and cut along dim 0 over `axis` while the ranks compute.

            for x, y in mesh.feed(loader, axis="dp"): ...

        Args:
            source: gives batches: tensors, arrays, tables (Arrow, Polars, pandas; a dict of columns each), or tuples
                and dicts of them. Or one table, array or DuckDB result, with `batch_size`. What is none of these
                in a batch comes through as it is.
            axis: over which rows are cut; every rank at the same place of it gets the same. With one axis it need not
                be named.
            prefetch: batches that are ready or on their way while the loop is busy; 0 fetches each when it is asked
                for, without a thread.
            batch_size: rows of a batch, where the source has no batches of its own.
            drop_last: leave out a last batch that does not divide by the axis.
            uneven: cut batches that do not divide as torch.chunk would, instead of refusing them.
            view: "global" gives a RemoteTensor of the whole batch; "local" a handle to each rank's own rows.

        Returns:
            An iterator with `close()`; it closes itself at its end, and when nobody holds it.

        Raises:
            PlacementError: a batch that does not divide; the message has the sum.
            Whatever the source raises, at the batch where it raised.
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
        """The pieces along `axis`, joined along `dim`: what `scatter` took apart. Blocks.

        Of ranks at the same place of the axis the first is taken.

        Returns:
            `torch.Tensor`, `numpy.ndarray`, or a list, as the pieces are.
        """
        axis = self._resolve_axis(axis)
        first: dict[int, int] = {}
        for rank in self.ranks:
            first.setdefault(self._axes.point(rank)[axis], rank)
        values = self.pull(what, ranks=list(first.values()))
        return _concatenate([values[first[position]] for position in sorted(first)], dim)

    # ---- remote tensors

    def activate(self) -> AbstractContextManager[Any]:
        """`with mesh.activate(): t = torch.rand(3, 4)` makes a tensor on every rank, one each: a RemoteTensor."""
        found: AbstractContextManager[Any] = extensions.find("activate")(self)
        return found

    def _resolve_axis(self, axis: str | None) -> str:
        if axis is not None:
            self._axes.size_of(axis)
            return axis
        if len(self.axes) != 1:
            raise UsageError(f"this mesh has the axes {', '.join(self.axes)}; say along which with axis=…")
        return next(iter(self.axes))

    # ---- looking at it, steering it

    def status(self) -> messages.MeshInfo:
        """What the supervisor knows now."""
        return self._session.status()

    def history(self) -> tuple[messages.HistoryEntry, ...]:
        """The cells that ran, oldest first."""
        return self._session.history()

    def logs(self, rank: int, limit_bytes: int = 1 << 16) -> str:
        """The last output of a rank, also of a dead one."""
        self._axes.check_ranks((rank,))
        return self._session.logs(rank, limit_bytes)

    def why(self) -> Why:
        """Why it does not get on: who waits for whom, in what, at which line, and what to do. Blocks, at most 3 s.

        From any thread, also while a cell runs. Of a slice: what concerns its ranks.

        Returns:
            Why: `.findings`, `.text`; it shows itself in a notebook.
        """
        return reports.why(self._session, self.ranks)

    def stacks(
        self, ranks: Sequence[int] | int | str | None = None, *, twice: bool = False, threads: bool = False
    ) -> Stacks:
        """Where ranks are in their code, as one tree of their Python stacks. Blocks, at most 3 s; mostly milliseconds.

        From any thread, also while a cell runs; also of ranks that are stopped or keep the GIL, if py-spy may look.

        Args:
            ranks: some of them, as for `run`; None: all of this view, dead ones included.
            twice: look again half a second later, and tell who moved.
            threads: all threads of each rank, not only the main one.

        Returns:
            Stacks: `.tree`, `.text`, and by rank (`stacks[3]`) the threads' frames.

        Raises:
            MeshShapeError: not in this mesh.
        """
        chosen = self.ranks if ranks is None else self._parse_ranks(ranks)
        return reports.stacks(self._session, tuple(sorted(chosen)), twice=twice, threads=threads)

    def health(self) -> Table:
        """How each rank is: what it does and waits for, CPU, memory, GPU. Blocks a few milliseconds.

        As of the ranks' last beat, a second ago; for programs there is `mesh.memory()`, `mesh.metrics()`.
        """
        return reports.health_table(reports.fetch_mesh_snapshot(self._session), self.ranks)

    def memory(self, *, history: bool = False, kind: str | None = None) -> Any:
        """Memory of each rank, in bytes: of its process, and on its GPU. Blocks a few milliseconds.

        Args:
            history: one row per rank and moment since the mesh started, in coarser steps the longer ago, instead of one
                per rank.
            kind: "pandas", "polars" or "dict"; None: of what the program has imported, else polars, else pandas, else
                a dict of lists.

        Returns:
            Columns rank, host, device, rss_bytes, peak_rss_bytes, gpu_allocated_bytes, gpu_reserved_bytes,
            gpu_peak_bytes, gpu_used_bytes, gpu_total_bytes; with `history` rank, time (wall clock), rss_bytes,
            gpu_allocated_bytes. None where there is no GPU.
        """
        return reports.memory_dataframe(self._session, self.ranks, history=history, kind=kind)

    def metrics(self, *, kind: str | None = None) -> Any:
        """What ranks gave to `meshbook.log`, one row per value. Blocks a few milliseconds.

        Long curves are thinned out, their first and last points kept.

        Returns:
            Columns name, rank, step, value, time (wall clock), as `kind` says (see `memory`).
        """
        return reports.metrics_dataframe(self._session, self.ranks, kind=kind)

    def interrupt(self, ranks: Sequence[int] | int | str | None = None) -> None:
        """Stop what the ranks run, as the Stop button would. Does not wait."""
        self._session.check_attached()
        chosen = self.ranks if ranks is None else self._parse_ranks(ranks)
        self._session.interrupt(chosen)

    def kill(self, ranks: Sequence[int] | int | str, *, signal: int = 9) -> None:
        """Send a signal to ranks; by default one they do not survive."""
        self._session.kill(self._parse_ranks(ranks), signal)

    def dashboard(self) -> Any:
        """A live picture of these ranks, with what can be done about them: a widget, for the end of a cell.

        In marimo `mo.ui.anywidget(mesh.dashboard())`. It is the same widget however often it is asked for; its
        `close()` ends it. Waits a few milliseconds for the first picture.

        Raises:
            NotAttached: the mesh is gone.
        """
        return extensions.find("dashboard")(self)

    def detach(self, orphan_ttl_s: float | None = None) -> None:
        """Leave the mesh running without this process; `meshbook.attach(name)` finds it again.

        Args:
            orphan_ttl_s: how long it may live with no client at all, in seconds; None: until it is stopped.

        Raises:
            NotAttached: it did not answer; this process has left it all the same.
        """
        self._session.detach(orphan_ttl_s)

    def stop(self) -> None:
        """End every rank and the supervisor. Waits until they are gone; harmless when they are."""
        self._session.stop()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def resolve_ranks(self, ranks: Sequence[int] | int | str | None) -> Ranks:
        """The ranks that are meant, all of them alive; None: those of this view that live.

        Raises:
            MeshShapeError: not in this mesh.
            RankLost: asked for by number, and gone.
            NotAttached: the mesh is no more.
        """
        self._session.check_attached()
        if ranks is None:
            living = self._session.living(self.ranks)
            if not living:
                raise RankLost(f"no rank of {self!r} is left; %mesh restart starts as many anew", ranks=self.ranks)
            return tuple(sorted(living))
        chosen = self._parse_ranks(ranks)
        lost = tuple(rank for rank in chosen if rank in self._session.lost)
        if lost:
            living = self._session.living(self.ranks)
            raise RankLost(
                f"{name_ranks(lost)} {'is' if len(lost) == 1 else 'are'} gone; nothing was run. "
                f"Living: {format_ranks(living)}",
                ranks=lost,
                survivors=living,
            )
        return chosen

    def _parse_ranks(self, ranks: Sequence[int] | int | str) -> Ranks:
        if isinstance(ranks, str):
            return self._axes.parse_selection(ranks)
        return self._axes.check_ranks((ranks,) if isinstance(ranks, int) else ranks)


class RemoteFunction(Generic[P]):
    """A function that runs on every rank of its mesh."""

    def __init__(self, mesh: Mesh, function: Callable[P, Any]) -> None:
        self._mesh, self._function = mesh, function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> RankValues:
        return self._mesh.execute(self._function, *args, **kwargs)

    def on(self, mesh: Mesh) -> RemoteFunction[P]:
        """The same function on another mesh, or on a part of this one."""
        return RemoteFunction(mesh, self._function)

    def __repr__(self) -> str:
        return f"<{getattr(self._function, '__name__', 'function')} on {self._mesh!r}>"


class FunctionBodyCell:
    """A function's body as a cell: `result` is what its last run gave; call it to run it again."""

    def __init__(self, mesh: Mesh, function: Callable[[], Any]) -> None:
        self._mesh = mesh
        self.__name__ = function.__name__
        self.source = function_body_source(function)
        self.result: CellResult = mesh.run(self.source)

    def __call__(self) -> CellResult:
        self.result = self._mesh.run(self.source)
        return self.result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result, name)

    def __repr__(self) -> str:
        return repr(self.result)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.result._repr_mimebundle_()

    def _mime_(self) -> tuple[str, Any]:
        return self.result._mime_()


def function_body_source(function: Callable[..., Any]) -> str:
    """The source of a function's body, at the left margin; a `return` at its end becomes the cell's value.

    Raises:
        UsageError: it takes parameters, or its source is not to be had.
    """
    if inspect.signature(function).parameters:
        raise UsageError(
            f"{function.__name__} takes parameters, and a cell has none; use @mesh.remote for a function with arguments"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise UsageError(
            f"the source of {function.__name__} cannot be found ({error}); use mesh.run with a string"
        ) from error
    import ast

    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    last = definition.body[-1]
    lines = source.splitlines()
    if isinstance(last, ast.Return):
        row = last.lineno - 1
        replaced = "pass" if last.value is None else ast.get_source_segment(source, last.value) or "pass"
        indent = lines[row][: last.col_offset]
        lines[row : last.end_lineno] = [f"{indent}({replaced})" if last.value is not None else f"{indent}pass"]
    first = definition.body[0]
    if first.lineno == definition.lineno:
        raise UsageError(f"write the body of {function.__name__} on lines of its own")
    return textwrap.dedent("\n".join(lines[first.lineno - 1 :])) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Starting and finding


def create_mesh(
    axes: int | Mapping[str, int] | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    name: str | None = None,
    engine: str | None = None,
    num_hosts: int = 1,
    start_method: str | None = None,
    device: str | None = None,
    process_group: bool = True,
    torch: bool = True,
    env: Mapping[str, str] | None = None,
    end_on_error: bool | None = None,
    listen: str | None = None,
    orphan_ttl_s: float | None = None,
    kind: str = "script",
    owner: str | None = None,
) -> Mesh:
    """Start a mesh and wait until its process group is up. It ends with this process, unless detached.

    In a marimo notebook, a cell that runs again finds the mesh that it made before, if it still asks for the same.

    Args:
        axes: a number of ranks, or {axis: size}; see also `nodes` and `gpus_per_node`, or `shape` and `mesh_dim_names`.
            Nothing at all: one rank per visible GPU, else 2 to 4 by cores (`MESHBOOK_RANKS`, meshbook.toml).
        name: what `attach` and `meshbook list` know it by; by default made from the script's name.
        engine: "local".
        num_hosts: simulate so many hosts on this machine.
        start_method: "fork" (from a warm server) or "fresh" (new interpreters).
        device: "auto", "cpu" or "cuda".
        process_group: False leaves torch.distributed alone.
        torch: False starts light ranks that import no torch.
        env: environment variables for the ranks.
        end_on_error: False has ranks that wait in a collective for one that raised, or ended, wait until Stop.
        listen: a tcp address to be reached at, encrypted, instead of a local socket.
        orphan_ttl_s: seconds it may live without any client.

    Raises:
        MeshShapeError: axes that make no mesh.
        MeshInUse: the name is taken.
        StartError: it did not come up; nothing is left running.
    """
    defaults = read_defaults()
    if axes is None and nodes is None and gpus_per_node is None and shape is None:
        axes = defaults.num_ranks()
    grid = MeshAxes.of(axes, nodes=nodes, gpus_per_node=gpus_per_node, shape=shape, mesh_dim_names=mesh_dim_names)
    spec = make_spec(
        grid,
        engine=engine or defaults.engine,
        num_hosts=num_hosts,
        start_method=start_method or defaults.start_method,
        device=device or defaults.device,
        process_group=process_group,
        torch=torch,
        env=env,
        end_on_error=defaults.end_on_error if end_on_error is None else end_on_error,
    )

    def start(*, owner: str | None, kind: str, default_ttl_s: float | None, stop_at_exit: bool) -> Session:
        ttl_s = next(s for s in (orphan_ttl_s, default_ttl_s, defaults.orphan_ttl_s) if s is not None)
        found = launch_supervisor(name or generate_mesh_name(), owner=owner, listen=listen)
        session = Session(SupervisorConnection(found, kind=kind, orphan_ttl_s=ttl_s), stop_at_exit=stop_at_exit)
        session.start(grid, spec, timeout_s=defaults.start_timeout_s)
        return session

    cell = marimo.running_cell() if owner is None else None
    if cell is not None:
        return _new_mesh(cell.get_or_start_session(spec, name, start), grid)
    return _new_mesh(start(owner=owner, kind=kind, default_ttl_s=None, stop_at_exit=True), grid)


def prewarm_session(name: str, *, torch: bool, orphan_ttl_s: float, fork_from: Session | None = None) -> Session:
    """A mesh without ranks yet, whose fork server warms up, for `start_prewarmed`. Ends with this process. Blocks.

    Args:
        fork_from: a living mesh of the same kind; the fork server is branched off its own.

    Raises:
        StartError: it did not come up.
    """
    fork_server_socket = str(keys.runtime_folder() / fork_from.name / "h0-fork.sock") if fork_from is not None else None
    connection_info = launch_supervisor(name, light=not torch, fork_server_socket=fork_server_socket)
    return Session(SupervisorConnection(connection_info, kind="script", orphan_ttl_s=orphan_ttl_s), stop_at_exit=True)


def start_prewarmed(
    session: Session,
    grid: MeshAxes,
    *,
    torch: bool,
    device: str = "auto",
    env: Mapping[str, str] | None = None,
) -> Mesh:
    """Ranks for actors: without a process group, and without torch where it is not asked for. Blocks.

    Raises:
        StartError: they did not come up.
    """
    spec = make_spec(grid, device=device if torch else "cpu", process_group=False, torch=torch, env=env)
    session.start(grid, spec, timeout_s=read_defaults().start_timeout_s)
    return _new_mesh(session, grid)


def make_spec(
    grid: MeshAxes,
    *,
    engine: str = "local",
    num_hosts: int = 1,
    start_method: str = "fork",
    device: str = "auto",
    process_group: bool = True,
    torch: bool = True,
    env: Mapping[str, str] | None = None,
    end_on_error: bool = True,
) -> messages.MeshSpec:
    """What a supervisor is asked for; checked.

    Raises:
        UsageError: an engine, start method or device that does not exist.
        StartError: more hosts than ranks.
    """
    for what, value, known in (
        ("engine", engine, ENGINES),
        ("start method", start_method, ("fork", "fresh")),
        ("device", device, ("auto", "cpu", "cuda")),
    ):
        if value not in known:
            raise UsageError(f"there is no {what} {value!r}; known: {', '.join(known)}")
    if device == "cuda" and (num_gpus := count_gpus()) < grid.size:
        raise StartError(
            f"{grid.size} ranks on cuda need {grid.size} GPUs, and {num_gpus} are visible here; ask for fewer ranks, "
            "or for device cpu"
        )
    if not 1 <= num_hosts <= grid.size:
        raise StartError(f"{grid.size} ranks cannot be spread over {num_hosts} hosts; every host needs a rank")
    return messages.MeshSpec(
        axes=grid.axes,
        engine=engine,
        num_hosts=num_hosts,
        start_method=start_method,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        process_group=process_group and torch,
        torch=torch,
        env=dict(env or {}),
        cwd=os.getcwd(),
        end_on_error=end_on_error,
        sys_path=tuple(dict.fromkeys(os.path.abspath(path) for path in sys.path if os.path.isdir(path or "."))),
    )


def attach(name: str | None = None, *, kind: str = "script", observer: bool = False) -> Mesh:
    """A mesh that runs already; without a name the only one there is. It does not end with this process.

    Raises:
        NotAttached: none is running, or it has no ranks.
        MeshNameError: no such name, or several meshes and no name.
        VersionMismatch: it is of another version of Meshbook.
    """
    session = Session(
        SupervisorConnection(keys.find_connection(name), kind=kind, observer=observer), stop_at_exit=False
    )
    if session.axes is None:
        session.close()
        raise NotAttached(f"the mesh {session.name!r} has no ranks yet; start them with %mesh start -n 4")
    return _new_mesh(session, session.axes)


def _new_mesh(session: Session, axes: MeshAxes) -> Mesh:
    background_output_of(session)
    return Mesh.of(session, axes)


def generate_mesh_name(stem: str | None = None) -> str:
    """A name that no mesh has: the script's, and four letters."""
    if stem is None:
        stem = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "mesh").stem
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:32] or "mesh"
    return f"{stem}-{secrets.token_hex(2)}"


# ---------------------------------------------------------------------------------------------------------------------


def _concatenate(pieces: list[Any], dim: int) -> Any:
    first = pieces[0]
    if type(first).__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(pieces, dim)
    if hasattr(first, "shape"):
        import numpy

        return numpy.concatenate(pieces, axis=dim)
    return [item for piece in pieces for item in piece]
