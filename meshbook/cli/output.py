"""Streams the output of cells to a terminal or a file.

Handles displays that are updated, such as progress bars. On a terminal they are redrawn; in a file only their last
state is written, once something follows it.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def strip_ansi(text: str) -> str:
    """Return the text without colours."""
    return _ANSI.sub("", text)


class CellOutputWriter:
    """Writes cells' messages to one stream.

    Attributes:
        indent: prefix of every line of output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._at_line_start = True
        self._live_display: tuple[str, str] | None = None  # the last display, which may be updated: its id, its text
        self.indent = ""

    def show_message(self, kind: str, content: dict[str, Any]) -> bool:
        """Show a message of the iopub channel if it has visible content. Return whether it has."""
        if kind == "stream":
            self.write(content["text"])
        elif kind in ("execute_result", "display_data", "update_display_data"):
            data = content["data"]
            text = data["text/plain"] if "text/plain" in data else f"({', '.join(data)})"
            name = (content.get("transient") or {}).get("display_id")
            if name is not None:
                self._show_live(name, text, update=kind == "update_display_data")
            elif kind != "update_display_data":
                self.write(text + "\n")
        else:
            return False
        return True

    def write(self, text: str) -> None:
        """Write a piece of a stream, which need not end at a line end."""
        self._flush_live()
        self._write_raw(text)

    def write_line(self, text: str) -> None:
        """Write a line of the command's own, without indent."""
        self.end_line()
        self._stream.write(text + "\n")
        self._stream.flush()

    def end_line(self) -> None:
        """End the current line: the next output starts on a new line."""
        self._flush_live()
        if not self._at_line_start:
            self._write_raw("\n")

    def _show_live(self, name: str, text: str, *, update: bool) -> None:
        before = self._live_display
        if before is None or before[0] != name:
            if update:
                return  # other output was written since
            self._flush_live()
        elif self._is_terminal:
            self._stream.write(f"\x1b[{before[1].count(chr(10)) + 1}A\r\x1b[J" if before[1] else "")
        self._live_display = name, text
        if self._is_terminal:
            if not self._at_line_start and before is None:
                self._write_raw("\n")
            self._write_raw(text and text + "\n")

    def _flush_live(self) -> None:
        """Write the last state of the current display: it can no longer be updated."""
        live, self._live_display = self._live_display, None
        if live is not None and live[1] and not self._is_terminal:
            self._write_raw(live[1] + "\n")

    def _write_raw(self, text: str) -> None:
        if not self._is_terminal:
            text = strip_ansi(text).replace("\r\n", "\n")
            text = "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))
        out = []
        for piece in re.split(r"(\n|\r)", text):
            if piece and piece not in "\n\r" and self._at_line_start:
                out.append(self.indent)
            out.append(piece)
            if piece:
                self._at_line_start = piece in "\n\r"
        self._stream.write("".join(out))
        self._stream.flush()
