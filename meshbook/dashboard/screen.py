"""`meshbook top`: the dashboard in a terminal.

Ranks that do the same share a row where there are many. What ranks say is drawn as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, DataTable, Footer, Label, Static

from meshbook.controller.mesh import Mesh, attach
from meshbook.controller.onlooker import Onlooker, Picture
from meshbook.controller.tables import format_bytes
from meshbook.dashboard import view
from meshbook.diagnose.findings import Finding
from meshbook.errors import MeshbookError
from meshbook.ids import Ranks, format_ranks, name_ranks, parse_ranks
from meshbook.supervisor.watching import RankNow

# More ranks than this are shown folded: those that do the same in one row.
FOLDED_FROM = 33
_PERIOD_S = 0.5
_LOG_BYTES = 1 << 16
_COLOURS = {
    "busy": "dodger_blue1",
    "waiting": "yellow",
    "idle": "",
    "silent": "dark_orange",
    "dead": "red",
    "starting": "magenta",
}
_SIGNS = {"busy": "▶", "waiting": "‖", "idle": "○", "silent": "?", "dead": "✕", "starting": "◌"}
_COLUMNS = ("ranks", "state", "where", "waits in", "memory", "CPU", "steps/s", "device")

_NOTHING_ASKED = "What s (stacks), w (why) and l (logs) show comes here. Enter: keys are about that row."


class Watched(Protocol):
    """What the screen asks of a mesh's mirror."""

    @property
    def picture(self) -> Picture: ...


class Confirm(ModalScreen[bool]):
    """One question, with No as the answer of who hurries."""

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


class Top(App[None]):
    """A mesh, live, until `q`."""

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

    def __init__(self, mesh: Mesh, watched: Watched) -> None:
        super().__init__()
        self._mesh, self._watched = mesh, watched
        self._everyone = True  # keys are about all ranks, not those of the row
        self._rows: dict[str, tuple[Text, ...]] = {}
        self._asked: tuple[tuple[Finding, ...], Any] | None = None  # what `why` found, and of which calls

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="findings")
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="below"):
            yield Static(_NOTHING_ASKED, id="said")
        yield Footer()

    def on_mount(self) -> None:
        self._table.add_columns(*((name, name) for name in _COLUMNS))
        self._table.focus()
        self.look()
        self.set_interval(_PERIOD_S, self.look)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#ranks", DataTable)

    # ---- drawing

    def look(self) -> None:
        """Draw the picture as it is now."""
        picture = self._watched.picture
        mine = set(self._mesh.ranks)
        ranks = [rank for rank in picture.ranks if rank.rank in mine]
        self.query_one("#head", Static).update(head(picture, ranks, self._ranks() if not self._everyone else None))
        self.query_one("#findings", Static).update(Text("\n").join(map(finding, self._findings(picture))))
        rows = table(ranks)
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

    def _findings(self, picture: Picture) -> Sequence[Finding]:
        if self._asked is not None:
            found, calls = self._asked
            if calls == picture.calls:
                return found
            self._asked = None
        return picture.findings

    def _ranks(self) -> Ranks:
        """Those that keys are about."""
        keys = list(self._rows)
        if self._everyone or not keys:
            return tuple(self._mesh.ranks)
        return parse_ranks(keys[self._table.cursor_row])

    def say(self, text: str | Text) -> None:
        """Show something below the ranks."""
        self.query_one("#said", Static).update(Text(text) if isinstance(text, str) else text)
        self.query_one("#below", VerticalScroll).scroll_home(animate=False)

    # ---- keys

    def on_data_table_row_selected(self) -> None:
        self._everyone = False
        self.look()

    def action_all(self) -> None:
        """Keys are about all ranks, or about those of the row."""
        self._everyone = not self._everyone
        self.look()

    def action_stacks(self) -> None:
        ranks = self._ranks()
        self.ask(f"taking stacks of {name_ranks(ranks)} ...", lambda: self._mesh.stacks(ranks).text)

    def action_why(self) -> None:
        def why() -> str:
            found = self._mesh.why()
            self._asked = found.findings, self._watched.picture.calls
            return found.text

        self.ask("looking ...", why)

    def action_logs(self) -> None:
        rank = self._ranks()[0]

        def logs() -> str:
            text = str(view.logs(rank, self._mesh.logs(rank, _LOG_BYTES), _LOG_BYTES)["text"])
            return f"rank {rank} said last:\n" + "\n".join(line[:2000] for line in text.split("\n")[-200:])

        self.ask(f"reading the log of rank {rank} ...", logs)

    def action_interrupt(self) -> None:
        ranks = self._ranks()

        def interrupt() -> str:
            self._mesh.interrupt(ranks)
            return f"{name_ranks(ranks)} interrupted"

        self.ask(f"interrupting {name_ranks(ranks)} ...", interrupt)

    def action_kill(self) -> None:
        if self._everyone:
            self.say("choose a row first (Enter), then k kills its ranks; a goes back to all ranks")
            return
        ranks = self._ranks()

        def kill() -> str:
            self._mesh.kill(ranks)
            return f"{name_ranks(ranks)} killed"

        def answered(yes: bool | None) -> None:
            if yes:
                self.ask(f"killing {name_ranks(ranks)} ...", kill)

        self.push_screen(Confirm(f"Kill {name_ranks(ranks)}? What they hold is lost."), answered)

    def ask(self, meanwhile: str, question: Callable[[], str]) -> None:
        """Say what a question to the mesh gave, from a thread that may wait for it."""
        self.say(meanwhile)
        self._wait_for(question)

    @work(thread=True, exit_on_error=False)
    def _wait_for(self, question: Callable[[], str]) -> None:
        try:
            text = question()
        except (MeshbookError, ValueError, OSError) as error:
            text = str(error)
        self.call_from_thread(self.say, text)


def head(picture: Picture, ranks: Sequence[RankNow], about: Ranks | None) -> Text:
    """One line: the mesh, how many ranks are how, and whom keys are about."""
    line = Text(f"{picture.name}  ", style="bold")
    counted: dict[str, int] = {}
    for rank in ranks:
        counted[look_of(rank)] = counted.get(look_of(rank), 0) + 1
    for look, count in counted.items():
        line.append(f"{_SIGNS.get(look, '')} {count} {look}  ", style=_COLOURS.get(look, ""))
    line.append("keys: all ranks" if about is None else f"keys: {name_ranks(about)}", style="dim")
    if picture.ended is not None:
        line.append(f"  ended: {picture.ended}", style="bold red")
    return line


def finding(found: Finding) -> Text:
    """One finding in a few lines."""
    told = view.finding(found)
    text = Text()
    fine = told["severity"] == "note"
    text.append(("  " if fine else "! ") + told["text"], style="bold" if fine else "bold red")
    for line in told["evidence"][:4]:
        text.append(f"\n    {line}", style="dim")
    if told["next"]:
        text.append(f"\n    Next: {told['next']}")
    return text


def look_of(rank: RankNow) -> str:
    return "waiting" if rank.state == "busy" and view.doing(rank) else rank.state


def table(ranks: Sequence[RankNow]) -> dict[str, tuple[Text, ...]]:
    """Rows by the ranks they are about: one per rank, or, of many, one for all that do the same."""
    groups: dict[Any, list[RankNow]] = {}
    for rank in ranks:
        look = look_of(rank)
        alike = (look, rank.cell, rank.line, view.doing(rank), rank.beat_age_s // 5, rank.exit)
        groups.setdefault(rank.rank if len(ranks) < FOLDED_FROM else alike, []).append(rank)
    most = max((rank.peak_rss_bytes or rank.rss_bytes or 0 for rank in ranks), default=0)
    return {format_ranks(rank.rank for rank in some): _row(some, most) for some in groups.values()}


def _row(ranks: Sequence[RankNow], most: int) -> tuple[Text, ...]:
    first, look = ranks[0], look_of(ranks[0])
    style = _COLOURS.get(look, "")
    memories = [used for rank in ranks if (used := view.memory(rank, most)[0]) is not None]
    where = first.exit if first.state == "dead" and first.exit else first.cell or ""
    cpus = [rank.cpu_percent for rank in ranks if rank.cpu_percent is not None]
    steps = [rank.steps_per_s for rank in ranks if rank.steps_per_s is not None]
    devices = {rank.device for rank in ranks}
    return (
        Text(_short(format_ranks(rank.rank for rank in ranks), 28), style="bold"),
        Text(f"{_SIGNS.get(look, '')} {look}{_age(ranks)}", style=style),
        Text(f"{where}, line {first.line}" if where == first.cell and first.line else where),
        Text(view.doing(first), style=style),
        Text(_range(memories, format_bytes)),
        Text(_range(cpus, lambda share: f"{share:.0f} %")),
        Text(_range(steps, lambda rate: f"{rate:.3g}")),
        Text(next(iter(devices)) if len(devices) == 1 else f"{len(devices)} devices"),
    )


def _age(ranks: Sequence[RankNow]) -> str:
    """Since when nothing was heard of a rank, where that is longer than it should be."""
    oldest = max(rank.beat_age_s for rank in ranks)
    return f", last beat {oldest} s ago" if oldest else ""


def _range(values: Sequence[Any], write: Callable[[Any], str]) -> str:
    if not values:
        return ""
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most - 3]}..."


def run(name: str | None = None) -> None:
    """Watch a mesh in this terminal until `q`. Its presence does not keep the mesh alive.

    Raises:
        NotAttached, MeshNameError: as `meshbook.attach`.
    """
    mesh = attach(name, kind="cli", observer=True)
    try:
        with Onlooker(mesh.session, per_s=1 / _PERIOD_S) as onlooker:
            Top(mesh, onlooker).run()
    finally:
        mesh.session.close()
