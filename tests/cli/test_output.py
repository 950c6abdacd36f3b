"""What a terminal and a file get of displays that are updated."""

from __future__ import annotations

import io
from typing import Any

import pytest

from meshbook.cli.output import CellOutputWriter


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *texts: str) -> str:
    """What a display with these texts, one after the other, leaves before a line of a cell's own."""
    writer = CellOutputWriter(stream)
    for index, text in enumerate(texts):
        content: dict[str, Any] = {"data": {"text/plain": text}, "transient": {"display_id": "d"}}
        writer.show_message("update_display_data" if index else "display_data", content)
    writer.show_message("stream", {"text": "1\n"})
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Screen])
def test_a_display_that_has_become_empty_leaves_nothing(stream: type[io.StringIO]) -> None:
    assert shown(stream(), "") == "1\n"
    assert shown(stream(), "starting", "").endswith("\x1b[1A\r\x1b[J1\n" if stream is Screen else "1\n")
    assert "text/plain" not in shown(stream(), "starting", "")


def test_a_file_gets_the_last_state_of_a_display() -> None:
    assert shown(io.StringIO(), "a", "b") == "b\n1\n"
