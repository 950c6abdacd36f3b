"""Values and displays of a rank's cells: the last value is the cell's result, displays go into the output.

Parts of `RankShell`.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import sys
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from meshbook.rank.cells.mime import WIDGET_VIEW, encode_mime, to_json_data
from meshbook.wire.messages import ClearOutput, Display, Notice

_WIDGET_NOTE = (
    "widgets of ranks are shown as text and do not change. ipywidgets work in %%controller cells; for a progress bar "
    "take tqdm.auto"
)


def is_widget(value: Any) -> bool:
    """Whether a value is a widget of ipywidgets."""
    module = sys.modules.get("ipywidgets")
    return module is not None and isinstance(value, module.Widget)


class RankDisplayHook(DisplayHook):
    """Retains the value of a cell's last expression instead of printing it."""

    shell: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = 0
        self._text = ""
        self._is_capturing = False  # between `begin_cell` and `end_cell`
        self._has_value = False
        self._value: Any = None
        super().__init__(*args, **kwargs)

    @property
    def prompt_count(self) -> int:
        return self._number

    def begin_cell(self, number: int, text: str, *, silent: bool) -> None:
        """Start a cell: the value displayed from now on is its result."""
        self._number, self._text = number, text
        self._has_value, self._value = False, None
        self._is_capturing = not silent

    def end_cell(self) -> tuple[bool, Any]:
        """Return whether the cell had a value, and the value, and drop the reference to it."""
        found = self._has_value, self._value
        self._is_capturing = self._has_value = False
        self._value = None
        return found

    def quiet(self) -> bool:
        return ";" in self._text and self.semicolon_at_end_of_expression(self._text)

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is None or self.quiet():
            return
        if self._has_value:  # a second value is displayed (ast_node_interactivity = "all", or a cell within a cell)
            self._display(self._value)
        if is_widget(result):
            self.shell.display_pub.note_widget()
        self.update_user_ns(result)
        self.shell.history_manager.register_numbered_name(f"_{self._number}")
        self.fill_exec_result(result)
        if self._is_capturing:
            self._has_value, self._value = True, result
        else:
            self._display(result)

    def _display(self, value: Any) -> None:
        data, metadata = self.compute_format_data(value)
        if data:
            self.shell.display_pub.publish(data, metadata)


class RankDisplayPublisher(DisplayPublisher):
    """Puts displays into the rank's output, in order with its text."""

    shell: Any
    _widget_noted_in: int | None = None  # the cell

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_kwargs: Any,
    ) -> None:
        self._validate_data(data, metadata)
        if WIDGET_VIEW in data:
            self.note_widget()
        shown = {mime: encode_mime(mime, value) for mime, value in data.items() if mime != WIDGET_VIEW}
        display_id = (transient or {}).get("display_id")
        self.shell.output.put(
            Display(
                data=shown,
                metadata=to_json_data(metadata or {}),
                display_id=None if display_id is None else str(display_id),
                update=update,
            )
        )

    def note_widget(self) -> None:
        """Say, once in a cell, where widgets work: those of a rank are shown as text."""
        cell = self.shell.displayhook.prompt_count
        if cell != self._widget_noted_in:
            self._widget_noted_in = cell
            self.shell.output.put(Notice(_WIDGET_NOTE))

    def clear_output(self, wait: bool = False) -> None:
        self.shell.output.put(ClearOutput(bool(wait)))
