"""Items of output: joined, measured, and counted where they are dropped."""

from __future__ import annotations

from meshbook.rank.output.captured_streams import StreamName
from meshbook.wire.messages import Display, Notice, OutputItem, Text


class OutputTruncation:
    """Counts what was dropped from the middle of the output."""

    def __init__(self) -> None:
        self.lines = self.nbytes = self.displays = 0

    def __bool__(self) -> bool:
        return bool(self.nbytes or self.displays)

    def add(self, item: OutputItem) -> None:
        if isinstance(item, Text):
            self._add_text(item.text)
        elif isinstance(item, Display):
            self.displays += 1

    def _add_text(self, text: str) -> None:
        self.lines += text.count("\n")
        self.nbytes += len(text.encode())

    def align_to_lines(self, head: list[OutputItem], tail: list[OutputItem]) -> None:
        """Extend the gap to line ends, so that no partial line is shown."""
        if head and isinstance(last := head[-1], Text) and "\n" in last.text:
            split_at = last.text.rindex("\n") + 1
            self._add_text(last.text[split_at:])
            head[-1] = Text(last.stream, last.text[:split_at])
        if tail and isinstance(first := tail[0], Text) and "\n" in first.text:
            split_at = first.text.index("\n") + 1
            self._add_text(first.text[:split_at])
            tail[0] = Text(first.stream, first.text[split_at:])

    def to_notice(self) -> Notice:
        parts = []
        if self.nbytes:
            parts.append(f"{_format_count(self.lines, 'line')} ({_format_count(self.nbytes, 'byte')})")
        if self.displays:
            parts.append(_format_count(self.displays, "display"))
        return Notice(f"{' and '.join(parts)} left out here: printed faster than the output could be taken away")


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def merge_texts(items: list[OutputItem]) -> tuple[OutputItem, ...]:
    merged: list[OutputItem] = []
    texts: list[str] = []
    stream: StreamName = "stdout"
    for item in items:
        if isinstance(item, Text):
            if texts and item.stream != stream:
                merged.append(Text(stream, "".join(texts)))
                texts = []
            stream = item.stream
            texts.append(item.text)
            continue
        if texts:
            merged.append(Text(stream, "".join(texts)))
            texts = []
        merged.append(item)
    if texts:
        merged.append(Text(stream, "".join(texts)))
    return tuple(item for item in merged if not (isinstance(item, Text) and not item.text))


def estimate_chars(item: OutputItem) -> int:
    """Return the approximate size of an item in characters.

    Structured data counts by its repr: it is rare and usually small.
    """
    if not isinstance(item, Display):
        return 0
    return sum(len(value) if isinstance(value, (str, bytes)) else len(repr(value)) for value in item.data.values())
