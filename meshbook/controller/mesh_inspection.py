"""What a mesh, or a slice of one, is, and what its ranks do: the part of `Mesh` that runs nothing on them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import datetime
from typing import Any, get_args, overload

from meshbook.controller import project, reports
from meshbook.controller.hosts import Hosts, fetch_hosts
from meshbook.controller.logs import DEFAULT_LIMIT, LogHit, Logs, follow, host_log, search
from meshbook.controller.past_cells import PastCell, fetch_past_cells
from meshbook.controller.project import Synced
from meshbook.controller.reports import Stacks, Why
from meshbook.controller.session import Session
from meshbook.controller.tables import MeshStatus, Table
from meshbook.errors import UsageError
from meshbook.ids import Ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.selections import parse_selection
from meshbook.wire import messages
from meshbook.wire.messages import Folding


class MeshInspection:
    """The ranks that a `Mesh` stands for, and reports of what they do."""

    _session: Session
    _fixed_axes: MeshAxes | None  # of a slice; None: the whole mesh

    @property
    def _axes(self) -> MeshAxes:
        """The axes of this slice; of the whole mesh those that it has now."""
        axes = self._session.axes if self._fixed_axes is None else self._fixed_axes
        assert axes is not None  # the mesh has started
        return axes

    @property
    def name(self) -> str:
        """The name of the mesh in `meshbook list` and `attach`."""
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
        """The `MeshAxes` of this view."""
        return self._axes

    @property
    def session(self) -> Session:
        """The session that all views of this mesh share."""
        return self._session

    @property
    def fold(self) -> Folding:
        """Which lines of several ranks are shown as one: "numbers" (the default: equal lines, and lines that differ
        only in numbers), "equal" or "off". Set it; it holds for the cells that this process runs from then on.
        """
        return self._session.fold

    @fold.setter
    def fold(self, lines: Folding) -> None:
        if lines not in get_args(Folding):
            raise UsageError(f'mesh.fold is "numbers", "equal" or "off", not {lines!r:.40}')
        self._session.fold = lines

    # ---- reports

    def status(self) -> MeshStatus:
        """Return the supervisor's current information about the mesh. Displays itself as a table."""
        return MeshStatus.of(self._session.status())

    def hosts(self) -> Hosts:
        """Return the mesh's machines, a row for each: state, ranks, GPUs or cores, versions, latency."""
        return fetch_hosts(self._session)

    def sync(self) -> Synced:
        """Bring what has changed in the project folder to all machines. Blocks. It takes `create_mesh(sync=True)`.

        Files that were removed here are removed there. A module that ranks have imported stays as it is:
        `importlib.reload`, or `%autoreload 2` on the ranks. In a notebook it happens before each cell.

        Returns:
            Synced: how many files went to each machine, and which do not travel.

        Raises:
            SyncError: the mesh has no project; it is too large; or a machine could not take it, and has what it had.
        """
        return project.sync(self._session)

    @overload
    def history(self) -> tuple[messages.HistoryEntry, ...]: ...

    @overload
    def history(self, number: int) -> PastCell: ...

    def history(self, number: int | None = None) -> tuple[messages.HistoryEntry, ...] | PastCell:
        """Return the cells that ran, oldest first; with a number, what the latest cell with that number showed.

        A cell that went on without its notebook or program is there, too. The supervisor keeps the latest 16 MiB of
        output, and 2 MiB of each cell.

        Raises:
            UsageError: no output of a cell with this number is kept; the message says of which cells it is.
        """
        return self._session.history() if number is None else fetch_past_cells(self._session, number)[-1]

    @overload
    def logs(self, rank: int, limit_bytes: int = ...) -> str: ...

    @overload
    def logs(self, *, host: str, limit_bytes: int = ...) -> str: ...

    @overload
    def logs(
        self,
        *,
        ranks: Sequence[int] | int | str | None = ...,
        grep: str = ...,
        since: str | float | datetime | None = ...,
        context: int = ...,
        limit: int = ...,
    ) -> Logs: ...

    def logs(
        self,
        rank: int | None = None,
        limit_bytes: int = 1 << 16,
        *,
        host: str | None = None,
        ranks: Sequence[int] | int | str | None = None,
        grep: str = "",
        since: str | float | datetime | None = None,
        context: int = 0,
        limit: int = DEFAULT_LIMIT,
    ) -> str | Logs:
        """Return the last output of a rank, or search in all that ranks have printed since the mesh started.

        With a rank alone: its last output as text, at most `limit_bytes` characters. Otherwise a search, on the
        machines where the ranks are: also in what ranks printed that are dead, were replaced by a heal, or have left;
        also errors of cells, and how ranks ended. Answers while a cell runs and while ranks hang. Blocks for 0.1 s, and
        some seconds for hundreds of MB.

        With a host alone: what its agent, and the ssh, srun, Ray or Monarch that started it, have last written as
        errors, also of a host that is lost or never came up.

        Args:
            rank: whose last output.
            host: "gpu2", as in `mesh.hosts()`, or its number.
            ranks: which ranks to search in, as for `run`; None: all of this view.
            grep: a regular expression, searched for in each line; "": all lines that are not blank.
            since: how long ago ("30s", "5m", "2h", "1d", or seconds), or when (an ISO date and time, or a datetime).
            context: lines of the same rank to show before and behind each hit, 0 to 20.
            limit: hits to return, the newest.

        Returns:
            Logs: a sequence of `LogHit` (`.time`, `.ranks`, `.text`), in order of time, that displays itself. Lines
            that several ranks printed within a second are one hit, as `mesh.fold` says.

        Raises:
            UsageError: the pattern or the time cannot be read, and the message shows where; or no host is called so.
            MeshShapeError: a rank is not in this mesh.
        """
        is_search = (ranks, grep, since, context) != (None, "", None, 0)
        if host is not None:
            if is_search or rank is not None:
                raise UsageError("the log of a host is shown alone; leave out ranks, grep, since and context")
            return host_log(self._session, host, limit_bytes)
        if rank is not None and not is_search:
            self._axes.check_ranks((rank,))
            return self._session.logs(rank, limit_bytes)
        where = self._ranks_to_search(rank if ranks is None else ranks)
        return search(self._session, where, grep=grep, since=since, context=context, limit=limit)

    def follow_logs(
        self,
        *,
        ranks: Sequence[int] | int | str | None = None,
        grep: str = "",
        since: str | float | datetime | None = None,
        context: int = 0,
    ) -> Generator[LogHit | str]:
        """Yield what ranks print, as it comes, until the mesh ends or the generator is closed. Blocks between hits.

        Begins with what was printed since `since`; None: with the last ten hits. Arguments as for `logs`; where
        something cannot be searched, as on a lost machine, a sentence comes in place of a hit.
        """
        where = self._ranks_to_search(ranks)
        return follow(self._session, where, grep=grep, since=since, context=context)

    def _ranks_to_search(self, ranks: Sequence[int] | int | str | None) -> Ranks:
        """Return the ranks to search in; (): all of the whole mesh, those that have left it too."""
        if ranks is None:
            return () if self._fixed_axes is None else self.ranks
        return self._parse_ranks(ranks)

    def why(self) -> Why:
        """Explain why the mesh hangs: who waits for whom, in what, at which line, and what to do. Blocks, at most 3 s.

        Any thread, also while a cell runs. On a slice: the findings that concern its ranks.

        Returns:
            Why: `.findings`, `.text`; it displays itself in a notebook.
        """
        return reports.why(self._session, self.ranks)

    def stacks(
        self, ranks: Sequence[int] | int | str | None = None, *, twice: bool = False, threads: bool = False
    ) -> Stacks:
        """Return the ranks' Python stacks, merged into one tree. Blocks, at most 3 s; usually milliseconds.

        Any thread, also while a cell runs. Also covers ranks that are stopped (SIGSTOP) or hold the GIL, if py-spy has
        permission.

        Args:
            ranks: which ranks, as for `run`; None: all of this view, dead ones included.
            twice: sample again half a second later, and report which ranks moved.
            threads: all threads of each rank, not only the main one.

        Returns:
            Stacks: `.tree`, `.text`, and by rank (`stacks[3]`) the threads' frames.

        Raises:
            MeshShapeError: a rank is not in this mesh.
        """
        chosen = self.ranks if ranks is None else self._parse_ranks(ranks)
        return reports.stacks(self._session, tuple(sorted(chosen)), twice=twice, threads=threads)

    def health(self) -> Table:
        """Return a table of each rank's activity, waits, CPU, memory and GPU. Blocks a few milliseconds.

        The values are from the ranks' last heartbeat, up to a second ago. Programs use `mesh.memory()` and
        `mesh.metrics()`.
        """
        return reports.health_table(reports.fetch_mesh_snapshot(self._session), self.ranks)

    def memory(self, *, history: bool = False, kind: str | None = None) -> Any:
        """Return the memory of each rank's process and GPU, in bytes. Blocks a few milliseconds.

        Args:
            history: one row per rank and sample since the mesh started, coarser for older samples, instead of one row
                per rank.
            kind: "pandas", "polars" or "dict"; None: the library that the program has imported, else polars, else
                pandas, else a dict of lists.

        Returns:
            Columns rank, host, device, rss_bytes, peak_rss_bytes, gpu_allocated_bytes, gpu_reserved_bytes,
            gpu_peak_bytes, gpu_used_bytes, gpu_total_bytes; with `history` rank, time (wall clock), rss_bytes,
            gpu_allocated_bytes. GPU columns are None without a GPU.
        """
        return reports.memory_dataframe(self._session, self.ranks, history=history, kind=kind)

    def metrics(self, *, kind: str | None = None) -> Any:
        """Return the values that ranks passed to `meshbook.log`, one row per value. Blocks a few milliseconds.

        Long curves are downsampled; their first and last points remain.

        Returns:
            Columns name, rank, step, value, time (wall clock), as `kind` says (see `memory`).
        """
        return reports.metrics_dataframe(self._session, self.ranks, kind=kind)

    def _parse_ranks(self, ranks: Sequence[int] | int | str) -> Ranks:
        if isinstance(ranks, str):
            return parse_selection(self._axes, ranks)
        return self._axes.check_ranks((ranks,) if isinstance(ranks, int) else ranks)
