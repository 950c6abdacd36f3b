"""Output of a cell on the ranks, as Jupyter messages under that cell.

`CellSink` converts folded lines, displays and notices to messages; its creator provides the function that publishes a
message. The parent message never changes: output of a background cell continues under it while other cells run.
"""

from __future__ import annotations

import html
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from meshbook.errors import UsageError
from meshbook.fold import rendering
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, Notice, RankDisplay

# Maximum number of different displays shown among those that ranks make at the same position of a cell.
MAX_DISTINCT_DISPLAYS = 4
# Seconds between two states of a progress bar; faster updates are not readable.
LIVE_INTERVAL_S = 0.1
# Number of recent lines and displays that are republished when other ranks clear their output.
_MAX_REPLAYED_ITEMS = 200

_NUMBER = re.compile(r"\d[\d.,]*")

_HEADING_HTML = '<div class="meshbook-ranks" style="opacity:.6;font-size:smaller">{}</div>'
# JupyterLab indents text by this padding, and HTML not at all; a note stands below text.
_NOTE_HTML = (
    '<div class="meshbook-note" style="opacity:.6;font-size:smaller;padding-left:var(--jp-code-padding,0)">{}</div>'
)


class Publish(Protocol):
    """Sends one message under the cell: its type and its content. Thread-safe."""

    def __call__(self, kind: str, content: dict[str, Any], /) -> None: ...


def jupyter_publisher(kernel: Any) -> Publish:
    """Return a function that publishes under the cell that this kernel runs now, also after that cell has ended.

    Works with ipykernel 6 and later.
    """
    parent = kernel.get_parent("shell")
    session, socket = kernel.session, kernel.iopub_socket

    def publish(kind: str, content: dict[str, Any], /) -> None:
        topic = f"stream.{content['name']}".encode() if kind == "stream" else kind.encode()
        session.send(socket, kind, content, parent=parent, ident=topic)

    return publish


def note_content(text: str) -> dict[str, Any]:
    """Return the content of a display for a note of Meshbook's own, in a muted style."""
    data = {"text/plain": text, "text/html": _NOTE_HTML.format(html.escape(text))}
    return {"data": data, "metadata": {}, "transient": {}}


class CellSink:
    """Displays one call's output. Call it with folded items, in order; `close()` it when the call has ended.

    Args:
        publish: sends a message.
        ranks: the call's ranks; output that all of them share has no label.
        display_ids: the front end's display ids by (rank, the rank's display id); the notebook stores them, because a
            later cell may update an earlier one's display.
        on_omitted: receives displays that are not shown.
    """

    def __init__(
        self,
        publish: Publish,
        ranks: Ranks,
        *,
        display_ids: dict[tuple[int, str], str] | None = None,
        on_omitted: Callable[[RankDisplay], None] = lambda display: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish, self._ranks, self._on_omitted, self._clock = publish, ranks, on_omitted, clock
        self._display_ids = {} if display_ids is None else display_ids
        self._lock = threading.RLock()
        self._progress = _ProgressBlock()
        self._progress_drawn_at = float("-inf")
        self._timer: threading.Timer | None = None
        self._recent: deque[Line | RankDisplay] = deque(maxlen=_MAX_REPLAYED_ITEMS)
        self._num_displays: dict[int, int] = {}  # number of displays that each rank has made
        self._displays_by_index: dict[
            int, list[_PublishedDisplay]
        ] = {}  # index among a rank's displays -> the displays shown
        self._omitted_ranks: set[int] = set()  # ranks with omitted displays

    def __call__(self, items: Iterable[FoldedItem]) -> None:
        with self._lock:
            text: list[str] = []
            stream = ""
            for item in _in_rank_order(items):
                if isinstance(item, Line) and (item.live or self._progress.has_live_line(item)):
                    self._progress.apply(item)
                    if item.live or self._progress.retained_last:
                        continue
                if text and not (isinstance(item, Line) and item.stream == stream):
                    self._stream(stream, "".join(text))
                    text.clear()
                if isinstance(item, Line):
                    stream = item.stream
                    text.append(rendering.render_line(item, self._ranks) + item.end)
                    self._recent.append(item)
                else:
                    self._draw_progress(now=True)
                    self._show_item(item)
            if text:
                self._stream(stream, "".join(text))
            self._draw_progress()

    def note(self, text: str) -> None:
        """Show a note of Meshbook's own, in a muted style."""
        with self._lock:
            self._publish("display_data", note_content(text))

    def close(self) -> None:
        """Draw pending output, and report omitted displays: the call has ended."""
        with self._lock:
            self._draw_progress(now=True)
            if self._omitted_ranks:
                ranks = tuple(sorted(self._omitted_ranks))
                self._omitted_ranks.clear()
                what = f"what {name_ranks(ranks)} displayed differs and is not shown here"
                self._publish("display_data", note_content(f"{what}; %mesh show {ranks[0]} shows it"))

    # ---- displays

    def _show_item(self, shown: RankDisplay) -> None:
        item = shown.item
        match item:
            case Notice(text=text):
                self._stream("stderr", f"[meshbook] {text}\n")
            case ClearOutput(wait=wait):
                self._clear(set(shown.ranks), wait)
            case Display(update=True):
                self._update(shown, item)
            case Display():
                self._display(shown, item)

    def _display(self, shown: RankDisplay, item: Display) -> None:
        index = max(self._num_displays.get(rank, 0) for rank in shown.ranks)
        for rank in shown.ranks:
            self._num_displays[rank] = index + 1
        others = self._displays_by_index.setdefault(index, [])
        content = msgspec.msgpack.encode([item.data, item.metadata, item.display_id])
        same = next((other for other in others if other.content == content), None)
        if same is not None:  # arrived later from other ranks; a figure takes time to be drawn
            same.ranks = tuple(sorted({*same.ranks, *shown.ranks}))
            if item.display_id is not None:
                self._remember_id(shown.ranks, item.display_id, same.name)
            self._publish("update_display_data", self._heading(same))
            return
        if len(others) >= MAX_DISTINCT_DISPLAYS:
            self._omitted_ranks.update(shown.ranks)
            self._on_omitted(shown)
            return
        self._recent.append(shown)
        others.append(self._send_display(shown, item, content))

    def _send_display(self, shown: RankDisplay, item: Display, content: bytes = b"") -> _PublishedDisplay:
        """Publish a display, below a heading with its ranks unless all ranks share it."""
        published = _PublishedDisplay(shown.ranks, content, f"meshbook-{secrets.token_hex(8)}", item.display_id)
        if shown.ranks != self._ranks:
            if item.display_id is not None:  # ranks may show different displays under one id
                published.name = f"{item.display_id} {name_ranks(shown.ranks)}"
            self._publish("display_data", self._heading(published))
        if item.display_id is not None:
            self._remember_id(shown.ranks, item.display_id, published.name)
        self._publish("display_data", display_content(item, published.name))
        return published

    def _heading(self, published: _PublishedDisplay) -> dict[str, Any]:
        label = name_ranks(published.ranks)
        data = {"text/plain": f"{label}:", "text/html": _HEADING_HTML.format(label)}
        return {"data": data, "metadata": {}, "transient": {"display_id": published.heading}}

    def _remember_id(self, ranks: Ranks, display_id: str, name: str | None) -> None:
        for rank in ranks:
            self._display_ids[rank, display_id] = name or display_id

    def _update(self, shown: RankDisplay, item: Display) -> None:
        names = {self._display_ids.get((rank, item.display_id or "")) for rank in shown.ranks} - {None}
        for name in sorted(filter(None, names)):
            self._publish("update_display_data", display_content(item, name))

    def _clear(self, ranks: set[int], wait: bool) -> None:
        """Clear these ranks' output, and republish that of other ranks."""
        remaining = (_without_ranks(item, ranks) for item in self._recent)
        self._recent = replayed = deque((item for item in remaining if item is not None), self._recent.maxlen)
        for rank in ranks:
            self._num_displays.pop(rank, None)
        if ranks >= set(self._ranks):
            self._displays_by_index.clear()
            self._omitted_ranks.clear()
        self._progress.discard_ranks(ranks)
        # Republished output follows immediately, so wait=True avoids flicker.
        self._publish("clear_output", {"wait": bool(wait or replayed)})
        for item in list(replayed):
            if isinstance(item, Line):
                self._stream(item.stream, rendering.render_line(item, self._ranks) + item.end)
            elif isinstance(item.item, Display):
                self._send_display(item, item.item)
        self._progress.display_cleared()

    def _stream(self, name: str, text: str) -> None:
        self._publish("stream", {"name": name, "text": text})

    # ---- progress bars: lines that are still being written

    def _draw_progress(self, *, now: bool = False) -> None:
        """Publish the progress bars' state: now, or when `LIVE_INTERVAL_S` has passed since the last one."""
        if not self._progress.changed:
            return
        wait = self._progress_drawn_at + LIVE_INTERVAL_S - self._clock()
        if wait > 0 and not now:
            if self._timer is None:
                self._timer = threading.Timer(wait, self._draw_deferred)
                self._timer.daemon = True
                self._timer.start()
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._progress_drawn_at = self._clock()
        kind, name, text = self._progress.render(self._ranks)
        self._publish(kind, {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}})

    def _draw_deferred(self) -> None:
        with self._lock:
            self._timer = None
            self._draw_progress(now=True)


@dataclass
class _PublishedDisplay:
    """A display on the page.

    Attributes:
        ranks: the ranks that made an equal display.
        content: encoded content, compared for equality.
        heading: display id of the heading above it.
        name: its own display id on the page; None: it cannot be updated.
    """

    ranks: Ranks
    content: bytes
    heading: str
    name: str | None


class OmittedDisplays:
    """Displays that were omitted, to be shown on request. Bounded: the oldest are dropped first."""

    # Total size of all stored displays.
    MAX_BYTES = 64 << 20

    def __init__(self) -> None:
        self._entries: deque[tuple[int, RankDisplay, int]] = deque()  # cell, display, bytes

    def add(self, cell: int, shown: RankDisplay) -> None:
        data = shown.item.data if isinstance(shown.item, Display) else {}
        self._entries.append((cell, shown, sum(len(part) for part in data.values() if isinstance(part, str | bytes))))
        while len(self._entries) > 1 and sum(num_bytes for _, _, num_bytes in self._entries) > self.MAX_BYTES:
            self._entries.popleft()

    def for_ranks(self, ranks: Ranks) -> list[tuple[int, RankDisplay]]:
        """Return these ranks' displays that the last cell with omitted displays left out, with the cell's number.

        Raises:
            UsageError: there are none.
        """
        if not self._entries:
            raise UsageError("every display of the cells that ran is shown already")
        last = max(cell for cell, _, _ in self._entries)
        omitted = [shown for cell, shown, _ in self._entries if cell == last]
        chosen = [(last, shown) for shown in omitted if not set(ranks).isdisjoint(shown.ranks)]
        if not chosen:
            whose = name_ranks(rank for shown in omitted for rank in shown.ranks)
            raise UsageError(f"cell {last} left out displays of {whose}, and none of {name_ranks(ranks)}")
        return sorted(chosen, key=lambda one: one[1].ranks)


class _ProgressBlock:
    """Progress bars of one call: a block of lines, each at a fixed position until the last one is finished."""

    def __init__(self) -> None:
        self.changed = False
        self.retained_last = False  # whether the last applied line stays in the block
        self._lines: list[Line] = []
        self._display_id: str | None = None  # display id of the block; None: not shown yet

    def has_live_line(self, line: Line) -> bool:
        """Whether a finished line replaces a live one."""
        return any(
            other.live and other.stream == line.stream and not set(other.ranks).isdisjoint(line.ranks)
            for other in self._lines
        )

    def apply(self, line: Line) -> None:
        """Apply a line to the block.

        A live line replaces its ranks' previous one; a finished one stays in place if it ends that line.
        """
        updated_ranks = set(line.ranks)
        self.retained_last = False
        lines: list[Line] = []
        placed = False
        for other in self._lines:
            if not other.live or other.stream != line.stream or updated_ranks.isdisjoint(other.ranks):
                lines.append(other)
                continue
            same = line.live or _is_end_of(other.text, line.text)
            if not placed and same and line.text:
                lines.append(line)
                placed = True
            remaining = tuple(rank for rank in other.ranks if rank not in updated_ranks)
            if remaining:
                lines.append(Line(remaining, other.stream, other.text, live=True))
        if line.live and line.text and not placed:
            lines.append(line)
            placed = True
        self.retained_last = placed and not line.live
        self.changed = self.changed or lines != self._lines
        self._lines = lines

    def discard_ranks(self, ranks: set[int]) -> None:
        self._lines = [line for line in self._lines if not set(line.ranks) <= ranks]

    def display_cleared(self) -> None:
        """Redraw the remaining lines as a new display: the old one was cleared."""
        self._display_id = None
        self.changed = bool(self._lines)

    def render(self, ranks: Ranks) -> tuple[str, str, str]:
        """Return the message that shows the block's state: its type, the display id, the text.

        A block without live lines is complete; the next line begins another.
        """
        kind = "display_data" if self._display_id is None else "update_display_data"
        name = self._display_id or f"meshbook-{secrets.token_hex(8)}"
        # The last updated line must not move up: live lines are in rank order, at the positions of live lines.
        live = iter(sorted((line for line in self._lines if line.live), key=lambda line: line.ranks))
        lines = [next(live) if line.live else line for line in self._lines]
        text = "\n".join(rendering.render_line(line, ranks) for line in lines)
        self.changed = False
        self._display_id = name
        if not any(line.live for line in self._lines):
            self._lines, self._display_id = [], None
        return kind, name, text


def display_content(item: Display, display_id: str | None = None) -> dict[str, Any]:
    """Return the content of `display_data` or `update_display_data`."""
    transient = {} if display_id is None else {"display_id": display_id}
    return {"data": dict(item.data), "metadata": dict(item.metadata), "transient": transient}


def _in_rank_order(items: Iterable[FoldedItem]) -> Iterator[FoldedItem]:
    """Yield the items, with adjacent displays of different ranks in rank order."""
    side_by_side: list[RankDisplay] = []
    for item in items:
        is_display = isinstance(item, RankDisplay) and isinstance(item.item, Display)
        if side_by_side and not (is_display and all(set(item.ranks).isdisjoint(one.ranks) for one in side_by_side)):
            yield from sorted(side_by_side, key=lambda one: one.ranks)
            side_by_side.clear()
        if isinstance(item, RankDisplay) and is_display:
            side_by_side.append(item)
        else:
            yield item
    yield from sorted(side_by_side, key=lambda one: one.ranks)


def _is_end_of(live: str, finished: str) -> bool:
    """Whether a finished line is the last state of the live one, and not other output of its rank.

    A live line of nested bars has several rows.
    """
    return any(_same_up_to_number(row, finished) for row in live.split("\n"))


def _same_up_to_number(row: str, finished: str) -> bool:
    """Whether two rows match up to the first number and one character behind it, as two states of one bar do."""
    numbers = _NUMBER.search(row), _NUMBER.search(finished)
    if numbers[0] is None or numbers[1] is None:
        return bool(row.strip()) and finished.startswith(row.rstrip())
    (head, tail), (other_head, other_tail) = (
        (text[: number.start()].strip(), text[number.end() : number.end() + 1])
        for text, number in zip((row, finished), numbers, strict=True)
        if number is not None
    )
    return head == other_head and tail == other_tail


def _without_ranks(item: Line | RankDisplay, ranks: set[int]) -> Line | RankDisplay | None:
    remaining = tuple(rank for rank in item.ranks if rank not in ranks)
    if not remaining:
        return None
    if isinstance(item, Line):
        return item if remaining == item.ranks else Line(remaining, item.stream, item.text, end=item.end)
    return item if remaining == item.ranks else RankDisplay(remaining, item.item)
