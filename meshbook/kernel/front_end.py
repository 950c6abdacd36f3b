"""What a notebook's user sees and types: cells' output, notes and input() prompts, in Jupyter and in a terminal."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, cast

from IPython.core.error import StdinNotImplementedError

from meshbook.controller.console import Console, prompt_on_terminal
from meshbook.controller.past_cells import PastCell
from meshbook.ids import Ranks, name_ranks
from meshbook.kernel import sink
from meshbook.kernel.displays import OmittedDisplays, PublishedDisplay
from meshbook.wire.messages import Display, FoldedItem

# Number of front-end display ids to store, so that a later cell's update finds its display.
_MAX_DISPLAY_IDS = 10_000


class OutputSink(Protocol):
    """The destination of a cell's output."""

    def __call__(self, items: tuple[FoldedItem, ...], /) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class FrontEnd(ABC):
    """What shows cells and their output to the user.

    Attributes:
        kind: of client, as the supervisor lists it.
    """

    kind: str

    def __init__(self) -> None:
        self._notices: list[tuple[str, Callable[[], object]]] = []

    @abstractmethod
    def make_sink(self, ranks: Ranks, number: int) -> OutputSink:
        """Return the sink for a cell on these ranks; `number`: the cell's."""

    @abstractmethod
    def show_note(self, text: str) -> None:
        """Show a note under the current cell."""

    @abstractmethod
    def show_omitted(self, ranks: Ranks) -> None:
        """Show the omitted displays of these ranks, from the last cell with too many different displays.

        Raises:
            UsageError: nothing was omitted, or nothing of these ranks.
        """

    @property
    @abstractmethod
    def allows_input(self) -> bool:
        """Whether there is somebody to answer a prompt."""

    @abstractmethod
    def prompt(self, prompt: str, password: bool) -> str | None:
        """Ask the user for input() of ranks, or a debugger command, and return the reply; None: nobody is there."""

    def add_notice(self, text: str, then: Callable[[], object] = lambda: None) -> None:
        """Add a note to show with the next cell; `then` is called when it has been shown."""
        self._notices.append((text, then))

    def show_notices(self) -> None:
        """Show the notices since the previous cell, under the current cell."""
        notices, self._notices = self._notices, []
        for text, then in notices:
            self.show_note(text)
            then()

    def show_past_cell(self, cell: PastCell) -> None:
        """Show what an earlier cell showed, under the current cell."""
        output = self.make_sink(cell.ranks, cell.number or 0)
        output.note(cell.heading)
        output(cell.items)
        output.close()


class TerminalFrontEnd(FrontEnd):
    """An IPython shell in a terminal."""

    kind = "ipython"

    def make_sink(self, ranks: Ranks, number: int) -> OutputSink:
        return Console(ranks, echo=True)

    def show_note(self, text: str) -> None:
        print(text)

    def show_omitted(self, ranks: Ranks) -> None:
        OmittedDisplays().for_ranks(ranks)  # raises: a terminal omits nothing

    @property
    def allows_input(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty()

    def prompt(self, prompt: str, password: bool) -> str | None:
        return prompt_on_terminal(prompt, password)


class JupyterFrontEnd(FrontEnd):
    """A page of Jupyter's, through its kernel."""

    kind = "kernel"

    def __init__(self, kernel: Any, display_publisher: Any) -> None:
        super().__init__()
        self._kernel, self._display_publisher = kernel, display_publisher
        self._displays: OrderedDict[tuple[int, str], PublishedDisplay] = OrderedDict()
        self._omitted_displays = OmittedDisplays()

    def make_sink(self, ranks: Ranks, number: int) -> OutputSink:
        while len(self._displays) > _MAX_DISPLAY_IDS:
            self._displays.popitem(last=False)
        return sink.CellSink(
            sink.jupyter_publisher(self._kernel),
            ranks,
            displays=self._displays,
            omitted=self._omitted_displays,
            cell=number,
        )

    def show_note(self, text: str) -> None:
        sink.jupyter_publisher(self._kernel)("display_data", sink.note_content(text))

    def show_omitted(self, ranks: Ranks) -> None:
        for number, shown in self._omitted_displays.for_ranks(ranks):
            self.show_note(f"{name_ranks(shown.ranks)}, cell {number}:")
            item = cast(Display, shown.item)
            self._display_publisher.publish(dict(item.data), dict(item.metadata))

    @property
    def allows_input(self) -> bool:
        return bool(getattr(self._kernel, "_allow_stdin", True))

    def prompt(self, prompt: str, password: bool) -> str | None:
        try:
            reply = self._kernel.getpass(prompt) if password else self._kernel.raw_input(prompt)
        except StdinNotImplementedError:
            return None
        return str(reply)
