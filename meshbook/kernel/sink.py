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
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from meshbook.errors import UsageError
from meshbook.fold import rendering
from meshbook.fold.entries import without_ranks
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, Notice, Preview, RankDisplay

# Maximum number of different displays shown among those that ranks make at the same position of a cell.
MAX_DISTINCT_DISPLAYS = 4
# Seconds between two states of a progress bar; faster updates are not readable.
LIVE_INTERVAL_S = 0.1
# Number of recent lines and displays that are published again when other ranks clear their output.
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

    Each rank has a frame of its own on the page: what it has printed and displayed since its last clear_output. When
    ranks clear, the page is cleared, and what the frames of the others still have is published again.

    Args:
        publish: sends a message.
        ranks: the call's ranks; output that all of them share has no label.
        displays: the displays on the page by (rank, the rank's display id); the notebook stores them, because a later
            cell may update an earlier one's display.
        omitted: stores displays that are not shown.
        cell: the call's number in `omitted`.
    """

    def __init__(
        self,
        publish: Publish,
        ranks: Ranks,
        *,
        displays: MutableMapping[tuple[int, str], PublishedDisplay] | None = None,
        omitted: OmittedDisplays | None = None,
        cell: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish, self._ranks, self._cell, self._clock = publish, ranks, cell, clock
        self._omitted = OmittedDisplays() if omitted is None else omitted
        self._displays: MutableMapping[tuple[int, str], PublishedDisplay] = {} if displays is None else displays
        self._lock = threading.RLock()
        self._progress = _ProgressBlock()
        self._progress_drawn_at = float("-inf")
        self._timer: threading.Timer | None = None
        self._text: list[str] = []  # of one stream, not published yet
        self._text_stream = ""
        self._recent: deque[Line | RankDisplay | PublishedDisplay] = deque(maxlen=_MAX_REPLAYED_ITEMS)
        self._updated: dict[PublishedDisplay, None] = {}  # whose present content is not published yet
        self._clearing: set[int] = set()  # ranks whose output is cleared when they show something next
        self._num_displays: dict[int, int] = {}  # number of displays in each rank's frame
        self._displays_by_index: dict[int, list[PublishedDisplay]] = {}  # by their index in the frames
        self._omitted_ranks: set[int] = set()  # ranks with omitted displays

    def __call__(self, items: Iterable[FoldedItem]) -> None:
        with self._lock:
            for item in _in_rank_order(items):
                if not self._clearing.isdisjoint(item.ranks) and _is_new_output(item):
                    self._clear(self._clearing & set(item.ranks), is_followed=True)
                if isinstance(item, Line):
                    self._show_line(item)
                else:
                    self._draw_progress(now=True)
                    self._show_item(item)
            self._publish_text()
            self._publish_updates()
            self._draw_progress()

    def note(self, text: str) -> None:
        """Show a note of Meshbook's own, in a muted style."""
        with self._lock:
            self._publish("display_data", note_content(text))

    def close(self) -> None:
        """Draw pending output, and report omitted displays: the call has ended."""
        with self._lock:
            self._draw_progress(now=True)
            for one in self._recent:
                if isinstance(one, PublishedDisplay):
                    one.contents.clear()
            self._recent.clear()
            if self._omitted_ranks:
                ranks = tuple(sorted(self._omitted_ranks))
                self._omitted_ranks.clear()
                what = f"what {name_ranks(ranks)} displayed differs and is not shown here"
                self._publish("display_data", note_content(f"{what}; %mesh show {ranks[0]} shows it"))

    # ---- text

    def _show_line(self, line: Line) -> None:
        if line.live or self._progress.has_live_line(line):
            self._progress.apply(line)
            if line.live or self._progress.retained_last:
                return
        self._retain(line)
        self._add_text(line)

    def _add_text(self, line: Line) -> None:
        self._add_raw_text(line.stream, rendering.render_line(line, self._ranks) + line.end)

    def _add_raw_text(self, stream: str, text: str) -> None:
        if stream != self._text_stream:
            self._publish_text()
            self._text_stream = stream
        self._text.append(text)

    def _publish_text(self) -> None:
        if self._text:
            self._publish("stream", {"name": self._text_stream, "text": "".join(self._text)})
            self._text.clear()

    # ---- displays

    def _show_item(self, shown: RankDisplay) -> None:
        item = shown.item
        match item:
            case Notice():
                self._retain(shown)
                self._add_notice(item)
            case ClearOutput(wait=wait):
                self._clearing.update(shown.ranks)
                if not wait:
                    self._clear(set(shown.ranks))
            case Display(update=True):
                self._update(shown, item)
            case Display():
                self._publish_text()
                self._display(shown, item)

    def _add_notice(self, notice: Notice) -> None:
        self._add_raw_text("stderr", f"[meshbook] {notice.text}\n")

    def _display(self, shown: RankDisplay, item: Display) -> None:
        """Show a display, joined with an equal one of other ranks at the same index of their frames."""
        packed = msgspec.msgpack.encode([item.data, item.metadata, item.display_id])
        digest = blake2b(packed, digest_size=16).digest()
        others = self._displays_by_index.setdefault(self._take_index(shown.ranks), [])
        published = next((other for other in others if other.digest == digest), None)
        if published is not None:  # arrived later from other ranks; a figure takes time to be drawn
            published.join(shown.ranks, item)
            self._publish("update_display_data", self._heading(published))
            self._updated[published] = None  # the others may have updated theirs
        elif len(others) < MAX_DISTINCT_DISPLAYS:
            name = item.display_id
            if name is not None and shown.ranks != self._ranks:  # ranks may show different displays under one id
                name = f"{name} {name_ranks(shown.ranks)}"
            published = PublishedDisplay(digest, f"meshbook-{secrets.token_hex(8)}", name)
            published.join(shown.ranks, item)
            others.append(published)
            self._publish_display(published)
        else:
            self._retain(shown)
            self._omitted_ranks.update(shown.ranks)
            self._omitted.add(self._cell, shown)
            return
        if item.display_id is not None:
            for rank in shown.ranks:
                self._displays[rank, item.display_id] = published

    def _take_index(self, ranks: Iterable[int]) -> int:
        """Return the index of the next display in the frames of these ranks."""
        index = max(self._num_displays.get(rank, 0) for rank in ranks)
        for rank in ranks:
            self._num_displays[rank] = index + 1
        return index

    def _publish_display(self, published: PublishedDisplay) -> None:
        """Publish a display, below a heading with its ranks unless all ranks share it."""
        self._retain(published)
        if published.ranks != self._ranks:
            self._publish("display_data", self._heading(published))
        self._publish("display_data", published.message(self._ranks))

    def _heading(self, published: PublishedDisplay) -> dict[str, Any]:
        label = name_ranks(published.ranks)
        data = {"text/plain": f"{label}:", "text/html": _HEADING_HTML.format(label)}
        return {"data": data, "metadata": {}, "transient": {"display_id": published.heading}}

    def _update(self, shown: RankDisplay, item: Display) -> None:
        for rank in shown.ranks:
            published = self._displays.get((rank, item.display_id or ""))
            if published is not None and rank in published.ranks:  # not cleared since
                published.contents[rank] = item
                self._updated[published] = None

    def _publish_updates(self) -> None:
        for published in self._updated:
            if published.name is not None:
                self._publish("update_display_data", published.message(self._ranks))
        self._updated.clear()

    # ---- clear_output

    def _clear(self, ranks: set[int], *, is_followed: bool = False) -> None:
        """Clear these ranks' frames, and publish again what those of other ranks have.

        Args:
            is_followed: output follows at once.
        """
        self._clearing -= ranks
        self._text.clear()  # in `_recent` too
        self._updated.clear()
        remaining = list(filter(None, (_without_ranks(item, ranks) for item in self._recent)))
        self._recent.clear()
        self._num_displays.clear()
        self._displays_by_index.clear()
        self._omitted_ranks.clear()
        self._omitted.discard(self._cell)
        self._progress.discard_ranks(ranks)
        # With `wait` the front end clears when something follows, which avoids flicker.
        self._publish("clear_output", {"wait": bool(remaining) or is_followed})
        for item in remaining:
            match item:
                case Line():
                    self._retain(item)
                    self._add_text(item)
                case RankDisplay(item=Notice() as notice):
                    self._retain(item)
                    self._add_notice(notice)
                case RankDisplay(item=Display() as display):  # omitted so far; there may be room now
                    self._publish_text()
                    self._display(item, display)
                case PublishedDisplay():
                    self._publish_text()
                    self._displays_by_index.setdefault(self._take_index(item.ranks), []).append(item)
                    self._publish_display(item)
        self._publish_text()
        self._progress.display_cleared()

    def _retain(self, item: Line | RankDisplay | PublishedDisplay) -> None:
        """Retain output for `_clear`, in place of the oldest."""
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent.popleft()
            if isinstance(oldest, PublishedDisplay):
                oldest.contents.clear()
        self._recent.append(item)

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
        self._publish_text()
        kind, name, text = self._progress.render(self._ranks)
        self._publish(kind, {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}})
        for line in self._progress.take_finished():
            self._retain(line)

    def _draw_deferred(self) -> None:
        with self._lock:
            self._timer = None
            self._draw_progress(now=True)


class PublishedDisplay:
    """A display on the page, of the ranks that made an equal one. Where they update it differently, it shows each.

    Attributes:
        digest: of the content that it was made with.
        heading: display id of the heading above it.
        name: its own display id on the page; None: it cannot be updated.
        ranks: the ranks that it is of.
        contents: what they show there now, by rank. It is released when the call has ended; what is here then is what
            ranks have updated since.
    """

    def __init__(self, digest: bytes, heading: str, name: str | None) -> None:
        self.digest, self.heading, self.name = digest, heading, name
        self.ranks: Ranks = ()
        self.contents: dict[int, Display] = {}

    def join(self, ranks: Ranks, item: Display) -> None:
        """Add ranks that made an equal display."""
        self.ranks = tuple(sorted({*self.ranks, *ranks}))
        self.contents.update(dict.fromkeys(ranks, item))

    def leave(self, ranks: set[int]) -> None:
        """Remove ranks that have cleared it."""
        self.ranks = tuple(rank for rank in self.ranks if rank not in ranks)
        for rank in ranks:
            self.contents.pop(rank, None)

    def message(self, call_ranks: Ranks) -> dict[str, Any]:
        """Return the content of `display_data` or `update_display_data`."""
        distinct = self._distinct_contents()
        if len(distinct) == 1:
            return display_content(distinct[0][1], self.name)
        parts = [(ranks, _preview_of(item)) for ranks, item in distinct]
        data = {"text/plain": rendering.render_previews(parts, call_ranks, colour=False)}
        if (shown := rendering.render_previews_html(parts, call_ranks)) is not None:
            data["text/html"] = shown
        return display_content(Display(data), self.name)

    def _distinct_contents(self) -> list[tuple[Ranks, Display]]:
        """Return what ranks show, with the ranks, in their order."""
        packed: dict[int, bytes] = {}  # by identity: ranks that showed it together share one
        ranks_by_content: dict[bytes, list[int]] = {}
        for rank, item in sorted(self.contents.items(), key=lambda one: one[0]):
            if id(item) not in packed:
                packed[id(item)] = msgspec.msgpack.encode([item.data, item.metadata])
            ranks_by_content.setdefault(packed[id(item)], []).append(rank)
        return [(tuple(ranks), self.contents[ranks[0]]) for ranks in ranks_by_content.values()]


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

    def discard(self, cell: int) -> None:
        """Remove those of a cell: it has cleared its output."""
        self._entries = deque(entry for entry in self._entries if entry[0] != cell)

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
        self._finished: list[Line] = []  # of a block that is complete
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
            if (remaining := without_ranks(other, updated_ranks)) is not None:
                lines.append(remaining)
        if line.live and line.text and not placed:
            lines.append(line)
            placed = True
        self.retained_last = placed and not line.live
        self.changed = self.changed or lines != self._lines
        self._lines = lines

    def discard_ranks(self, ranks: set[int]) -> None:
        self._lines = [remaining for line in self._lines if (remaining := without_ranks(line, ranks)) is not None]

    def take_finished(self) -> list[Line]:
        """Return the lines of a block that is complete."""
        finished, self._finished = self._finished, []
        return finished

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
            self._finished, self._lines, self._display_id = self._lines, [], None
        return kind, name, text


def display_content(item: Display, display_id: str | None = None) -> dict[str, Any]:
    """Return the content of `display_data` or `update_display_data`."""
    transient = {} if display_id is None else {"display_id": display_id}
    return {"data": dict(item.data), "metadata": dict(item.metadata), "transient": transient}


def _is_new_output(item: FoldedItem) -> bool:
    """Whether an item is what `clear_output(wait=True)` waits for."""
    if isinstance(item, Line):
        return True
    return not isinstance(item.item, ClearOutput) and not (isinstance(item.item, Display) and item.item.update)


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


def _without_ranks(
    item: Line | RankDisplay | PublishedDisplay, ranks: set[int]
) -> Line | RankDisplay | PublishedDisplay | None:
    if isinstance(item, Line):
        return without_ranks(item, ranks)
    if isinstance(item, PublishedDisplay):
        item.leave(ranks)
        return item if item.ranks else None
    remaining = tuple(rank for rank in item.ranks if rank not in ranks)
    return RankDisplay(remaining, item.item) if remaining else None


def _preview_of(item: Display) -> Preview:
    data = dict(item.data)
    return Preview("object", "", str(data.pop("text/plain", "")), html=data.pop("text/html", None), data=data)
