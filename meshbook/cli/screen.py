"""Output of cells as it goes by, on a terminal or in a file.

Knows what can change after it was shown: a progress bar is a display that is updated. On a terminal it is drawn over;
in a file only its last state is written, once something follows it.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def plain(text: str) -> str:
    """Without colours."""
    return _ANSI.sub("", text)


class Screen:
    """One stream, to which cells' messages are written.

    Attributes:
        indent: what every line of output begins with.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._at_margin = True
        self._live: tuple[str, str] | None = None  # the display that was shown last and may change: its id, its text
        self.indent = ""

    def message(self, kind: str, content: dict[str, Any]) -> bool:
        """Show a message of the iopub channel, if it is one that shows something. Returns whether it was."""
        if kind == "stream":
            self.write(content["text"])
        elif kind in ("execute_result", "display_data", "update_display_data"):
            data = content["data"]
            text = data.get("text/plain") or f"({', '.join(data)})"
            name = (content.get("transient") or {}).get("display_id")
            if name is not None:
                self._show_live(name, text, update=kind == "update_display_data")
            elif kind != "update_display_data":
                self.write(text + "\n")
        else:
            return False
        return True

    def write(self, text: str) -> None:
        """A piece of a stream, which need not be whole lines."""
        self._settle()
        self._put(text)

    def line(self, text: str) -> None:
        """A line of our own, at the margin and not set in."""
        self.finish()
        self._stream.write(text + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """End what goes on: the next thing stands on a line of its own."""
        self._settle()
        if not self._at_margin:
            self._put("\n")

    def _show_live(self, name: str, text: str, *, update: bool) -> None:
        before = self._live
        if before is None or before[0] != name:
            if update:
                return  # it scrolled away: something else was written since
            self._settle()
        elif self._is_terminal:
            self._stream.write(f"\x1b[{before[1].count(chr(10)) + 1}A\r\x1b[J")
        self._live = name, text
        if self._is_terminal:
            if not self._at_margin and before is None:
                self._put("\n")
            self._put(text + "\n")

    def _settle(self) -> None:
        """What could have changed has its last state."""
        live, self._live = self._live, None
        if live is not None and not self._is_terminal:
            self._put(live[1] + "\n")

    def _put(self, text: str) -> None:
        if not self._is_terminal:
            text = plain(text).replace("\r\n", "\n")
            text = "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))
        out = []
        for piece in re.split(r"(\n|\r)", text):
            if piece and piece not in "\n\r" and self._at_margin:
                out.append(self.indent)
            out.append(piece)
            if piece:
                self._at_margin = piece in "\n\r"
        self._stream.write("".join(out))
        self._stream.flush()
