"""`meshbook top`: the dashboard in a terminal.

From `FOLD_FROM_RANKS` ranks on, ranks in the same state share a row. Text from ranks is drawn as text, never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, DataTable, Footer, Label, Static

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription
from meshbook.controller.tables import format_bytes, format_spread
from meshbook.dashboard import view
from meshbook.diagnose.findings import Finding, dated
from meshbook.errors import MeshbookError
from meshbook.ids import Ranks, format_ranks, name_ranks, parse_ranks
from meshbook.wire.messages import RankStatus

# From this many ranks on, the table is folded: ranks in the same state share a row.
FOLD_FROM_RANKS = 33
_PERIOD_S = 0.5
_LOG_BYTES = 1 << 16
_STATE_COLORS = {
    "busy": "dodger_blue1",
    "waiting": "yellow",
    "idle": "",
    "silent": "dark_orange",
    "dead": "red",
    "starting": "magenta",
}
_STATE_SYMBOLS = {"busy": "▶", "waiting": "‖", "idle": "○", "silent": "?", "dead": "✕", "starting": "◌"}
_COLUMNS = ("ranks", "state", "where", "waits in", "memory", "CPU", "steps/s", "device")

_DETAILS_PLACEHOLDER = "What s (stacks), w (why) and l (logs) show comes here. Enter: keys are about that row."


class SnapshotSource(Protocol):
    """The part of a subscription that the screen needs."""

    @property
    def snapshot(self) -> MeshSnapshot: ...


class Confirm(ModalScreen[bool]):
    """A confirmation dialog whose default is No."""

    CSS = """
    Confirm { align: center middle; }
    #question { grid-size: 2; grid-rows: auto 3; grid-gutter: 1 2; padding: 1 2; width: 64; height: auto;
                border: thick $error; background: $surface; }
    #question Label { column-span: 2; width: 100%; }
    #question Button { width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "dismiss(False)", "no"),
        Binding("y", "dismiss(True)", "yes"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Grid(id="question"):
            yield Label(Text(self._question))
            yield Button("Cancel", id="no", variant="primary")
            yield Button("Kill", id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class TopApp(App[None]):
    """A live view of a mesh, until `q`."""

    TITLE = "meshbook top"
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    #findings { height: auto; max-height: 9; padding: 0 1; }
    #ranks { height: auto; min-height: 6; max-height: 50%; }
    #below { height: 1fr; border-top: solid $panel; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stacks", "stacks"),
        Binding("w", "why", "why"),
        Binding("l", "logs", "logs"),
        Binding("i", "interrupt", "interrupt"),
        Binding("k", "kill", "kill"),
        Binding("a", "all", "all/row"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, mesh: Mesh, source: SnapshotSource) -> None:
        super().__init__()
        self._mesh, self._source = mesh, source
        self._all_ranks = True  # keys apply to all ranks, not to those of the selected row
        self._rows: dict[str, tuple[Text, ...]] = {}
        # the findings of `why`, and the calls that ran then
        self._why_result: tuple[tuple[Finding, ...], Any] | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="findings")
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="below"):
            yield Static(_DETAILS_PLACEHOLDER, id="said")
        yield Footer()

    def on_mount(self) -> None:
        self._table.add_columns(*((name, name) for name in _COLUMNS))
        self._table.focus()
        self.redraw()
        self.set_interval(_PERIOD_S, self.redraw)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#ranks", DataTable)

    # ---- drawing

    def redraw(self) -> None:
        """Draw the current snapshot."""
        if not self.query("#head"):
            return  # the app ends, and its widgets are gone; the timer is not yet
        snapshot = self._source.snapshot
        shown_ranks = set(self._mesh.ranks)
        ranks = [rank for rank in snapshot.ranks if rank.rank in shown_ranks]
        self.query_one("#head", Static).update(
            status_line(snapshot, ranks, self._selected_ranks() if not self._all_ranks else None)
        )
        self.query_one("#findings", Static).update(Text("\n").join(map(finding_text, self._current_findings(snapshot))))
        rows = rank_rows(ranks)
        if list(rows) != list(self._rows):
            at = self._table.cursor_row
            self._table.clear()
            for key, row in rows.items():
                self._table.add_row(*row, key=key)
            self._table.move_cursor(row=min(at, len(rows) - 1))
        else:
            for key, row in rows.items():
                for name, new, old in zip(_COLUMNS, row, self._rows[key], strict=True):
                    if new != old:
                        self._table.update_cell(key, name, new, update_width=True)
        self._rows = rows

    def _current_findings(self, snapshot: MeshSnapshot) -> Sequence[Finding]:
        if self._why_result is not None:
            found, calls = self._why_result
            if calls == snapshot.calls:
                return found
            self._why_result = None
        return snapshot.findings

    def _selected_ranks(self) -> Ranks:
        """Return the ranks that keys apply to."""
        keys = list(self._rows)
        if self._all_ranks or not keys:
            return tuple(self._mesh.ranks)
        return parse_ranks(keys[self._table.cursor_row])

    def show_details(self, text: str | Text) -> None:
        """Show text below the ranks."""
        self.query_one("#said", Static).update(Text(text) if isinstance(text, str) else text)
        self.query_one("#below", VerticalScroll).scroll_home(animate=False)

    # ---- keys

    def on_data_table_row_selected(self) -> None:
        self._all_ranks = False
        self.redraw()

    def action_all(self) -> None:
        """Toggle whether keys apply to all ranks or to those of the selected row."""
        self._all_ranks = not self._all_ranks
        self.redraw()

    def action_stacks(self) -> None:
        ranks = self._selected_ranks()
        self.run_query(f"taking stacks of {name_ranks(ranks)} ...", lambda: self._mesh.stacks(ranks).text)

    def action_why(self) -> None:
        def why() -> str:
            found = self._mesh.why()
            self._why_result = dated(found.findings, time.time()), self._source.snapshot.calls
            return found.text

        self.run_query("looking ...", why)

    def action_logs(self) -> None:
        rank = self._selected_ranks()[0]

        def logs() -> str:
            text = str(view.logs_message(rank, self._mesh.logs(rank, _LOG_BYTES), _LOG_BYTES)["text"])
            return f"rank {rank} said last:\n" + "\n".join(line[:2000] for line in text.split("\n")[-200:])

        self.run_query(f"reading the log of rank {rank} ...", logs)

    def action_interrupt(self) -> None:
        ranks = self._selected_ranks()

        def interrupt() -> str:
            self._mesh.interrupt(ranks)
            return f"{name_ranks(ranks)} interrupted"

        self.run_query(f"interrupting {name_ranks(ranks)} ...", interrupt)

    def action_kill(self) -> None:
        if self._all_ranks:
            self.show_details("choose a row first (Enter), then k kills its ranks; a goes back to all ranks")
            return
        ranks = self._selected_ranks()

        def kill() -> str:
            self._mesh.kill(ranks)
            return f"{name_ranks(ranks)} killed"

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_query(f"killing {name_ranks(ranks)} ...", kill)

        self.push_screen(Confirm(f"Kill {name_ranks(ranks)}? What they hold is lost."), answered)

    def run_query(self, status: str, query: Callable[[], str]) -> None:
        """Run a blocking query to the mesh on a worker thread, and show its result."""
        self.show_details(status)
        self._run_query_in_thread(query)

    @work(thread=True, exit_on_error=False)
    def _run_query_in_thread(self, query: Callable[[], str]) -> None:
        try:
            text = query()
        except (MeshbookError, ValueError, OSError) as error:
            text = str(error)
        self.call_from_thread(self.show_details, text)


def status_line(snapshot: MeshSnapshot, ranks: Sequence[RankStatus], selected: Ranks | None) -> Text:
    """Return one line: the mesh, the number of ranks per state, and the ranks that keys apply to."""
    line = Text(f"{snapshot.name}  ", style="bold")
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[display_state(rank)] = counts.get(display_state(rank), 0) + 1
    for state, count in counts.items():
        line.append(f"{_STATE_SYMBOLS.get(state, '')} {count} {state}  ", style=_STATE_COLORS.get(state, ""))
    line.append("keys: all ranks" if selected is None else f"keys: {name_ranks(selected)}", style="dim")
    if snapshot.ended is not None:
        line.append(f"  ended: {snapshot.ended}", style="bold red")
    return line


def finding_text(found: Finding) -> Text:
    """Return one finding in a few lines."""
    message = view.finding_message(found)
    text = Text()
    is_note = message["severity"] == "note"
    text.append(("  " if is_note else "! ") + message["text"], style="bold" if is_note else "bold red")
    for line in message["evidence"][:4]:
        text.append(f"\n    {line}", style="dim")
    if message["next"]:
        text.append(f"\n    Next: {message['next']}")
    return text


def display_state(rank: RankStatus) -> str:
    return "waiting" if rank.state == "busy" and view.wait_label(rank) else rank.state


def rank_rows(ranks: Sequence[RankStatus]) -> dict[str, tuple[Text, ...]]:
    """Return the table's rows by their ranks: one per rank, or, with many ranks, one per group in the same state."""
    groups: dict[Any, list[RankStatus]] = {}
    for rank in ranks:
        state = display_state(rank)
        group_key = (state, rank.cell, rank.line, view.wait_label(rank), rank.beat_age_s // 5, rank.exit)
        groups.setdefault(rank.rank if len(ranks) < FOLD_FROM_RANKS else group_key, []).append(rank)
    memory_scale = max((rank.peak_rss_bytes or rank.rss_bytes or 0 for rank in ranks), default=0)
    return {format_ranks(rank.rank for rank in group): _make_row(group, memory_scale) for group in groups.values()}


def _make_row(ranks: Sequence[RankStatus], memory_scale: int) -> tuple[Text, ...]:
    first, state = ranks[0], display_state(ranks[0])
    style = _STATE_COLORS.get(state, "")
    memories = [used for rank in ranks if (used := view.memory_usage(rank, memory_scale)[0]) is not None]
    where = first.exit if first.state == "dead" and first.exit else first.cell or ""
    cpus = [rank.cpu_percent for rank in ranks if rank.cpu_percent is not None]
    steps = [rank.steps_per_s for rank in ranks if rank.steps_per_s is not None]
    devices = {rank.device for rank in ranks}
    return (
        Text(_truncate(format_ranks(rank.rank for rank in ranks), 28), style="bold"),
        Text(f"{_STATE_SYMBOLS.get(state, '')} {state}{_describe_age(ranks)}", style=style),
        Text(f"{where}, line {first.line}" if where == first.cell and first.line else where),
        Text(view.wait_label(first), style=style),
        Text(format_spread(memories, format_bytes)),
        Text(format_spread(cpus, lambda share: f"{share:.0f} %")),
        Text(format_spread(steps, lambda rate: f"{rate:.3g}")),
        Text(next(iter(devices)) if len(devices) == 1 else f"{len(devices)} devices"),
    )


def _describe_age(ranks: Sequence[RankStatus]) -> str:
    """Return the time since the last heartbeat, if it is late."""
    oldest = max(rank.beat_age_s for rank in ranks)
    return f", last beat {oldest} s ago" if oldest else ""


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def run(name: str | None = None) -> None:
    """Show a mesh in this terminal until `q`. The observer connection does not keep the mesh alive.

    Raises:
        NotAttached, MeshNameError: as `meshbook.attach`.
    """
    mesh = attach(name, kind="cli", observer=True)
    try:
        with MeshSubscription(mesh.session, max_updates_per_s=1 / _PERIOD_S) as subscription:
            TopApp(mesh, subscription).run()
    finally:
        mesh.session.close()
