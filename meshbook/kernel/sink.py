"""Output of a cell on the ranks, as Jupyter messages under that cell.

`CellSink` converts folded lines, displays and notices to messages; its creator provides the function that publishes a
message. The parent message never changes: output of a background cell continues under it while other cells run.
"""

from __future__ import annotations

import html
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from meshbook.fold import rendering
from meshbook.fold.entries import without_ranks
from meshbook.ids import Ranks, name_ranks
from meshbook.kernel.displays import OmittedDisplays, PublishedDisplay
from meshbook.kernel.progress_block import ProgressBlock
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, Notice, RankDisplay

# Maximum number of different displays shown among those that ranks make at the same position of a cell.
MAX_DISTINCT_DISPLAYS = 4
# Seconds between two states of a progress bar; faster updates are not readable.
LIVE_INTERVAL_S = 0.1
# Number of recent lines and displays that are published again when other ranks clear their output.
_MAX_REPLAYED_ITEMS = 200

_HEADING_HTML = '<div class="meshbook-ranks" style="opacity:.6;font-size:smaller">{}</div>'
# JupyterLab indents text by this padding, and HTML not at all; a note stands below text.
_NOTE_HTML = (
    '<div class="meshbook-note" style="opacity:.6;font-size:smaller;padding-left:var(--jp-code-padding,0)">{}</div>'
)
# What happens on the ranks while a cell runs: to be seen, and no error.
_NOTICE_HTML = (
    '<div class="meshbook-notice" style="white-space:pre-wrap;border-left:3px solid #d29922;padding:2px 10px">{}</div>'
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
        self._progress = ProgressBlock()
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
        self._publish_text()
        text = f"[meshbook] {notice.text}"
        data = {"text/plain": text, "text/html": _NOTICE_HTML.format(html.escape(text))}
        self._publish("display_data", {"data": data, "metadata": {}, "transient": {}})

    def _display(self, shown: RankDisplay, item: Display) -> None:
        """Show a display, joined with an equal one of other ranks at the same index of their frames."""
        packed = msgspec.msgpack.encode([item.data, item.metadata, item.display_id])
        digest = blake2b(packed, digest_size=16).digest()
        others = self._displays_by_index.setdefault(self._take_index(shown.ranks), [])
        published = next((other for other in others if other.digest == digest), None)
        if published is not None:  # arrived later from other ranks; a figure takes time to be drawn
            published.join(shown.ranks, item)
            self._publish("update_display_data", self._heading(published))
            if item.display_id is not None:
                self._updated[published] = None  # the others may have updated theirs
            self._put_in_order(others)
        elif len(others) < MAX_DISTINCT_DISPLAYS:
            # Of some ranks: other ranks may show another one under their id, and it may change its place.
            name = item.display_id if shown.ranks == self._ranks else f"meshbook-{secrets.token_hex(8)}"
            published = PublishedDisplay(digest, f"meshbook-{secrets.token_hex(8)}", name)
            published.join(shown.ranks, item)
            others.append(published)
            self._publish_display(published)
            self._put_in_order(others)
        elif shown.ranks < others[-1].ranks and (left_out := others[-1]).contents:
            published = PublishedDisplay(digest, left_out.heading, left_out.name)
            left_out.name = None  # it is updated no more
            published.join(shown.ranks, item)
            others[-1] = self._recent[self._recent.index(left_out)] = published
            for ranks, content in left_out.distinct_contents():
                self._omit(RankDisplay(ranks, content))
            self._publish_in_place(published)
            self._put_in_order(others)
        else:
            self._omit(shown)
            return
        if item.display_id is not None:
            for rank in shown.ranks:
                self._displays[rank, item.display_id] = published

    def _omit(self, shown: RankDisplay) -> None:
        self._retain(shown)
        self._omitted_ranks.update(shown.ranks)
        self._omitted.add(self._cell, shown)

    def _put_in_order(self, displays: list[PublishedDisplay]) -> None:
        """Give displays at one index of the frames, listed as they stand on the page, places in the order of ranks."""
        in_order = sorted(displays, key=lambda one: one.ranks)
        if in_order == displays or not all(one.contents for one in displays):
            return
        places = [(one.heading, one.name) for one in displays]
        displays[:] = in_order
        for one, place in zip(displays, places, strict=True):
            if (one.heading, one.name) != place:
                one.heading, one.name = place
                self._publish_in_place(one)

    def _publish_in_place(self, published: PublishedDisplay) -> None:
        self._publish("update_display_data", self._heading(published))
        self._publish("update_display_data", published.message(self._ranks))

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
                    others = self._displays_by_index.setdefault(self._take_index(item.ranks), [])
                    others.append(item)
                    self._publish_display(item)
                    self._put_in_order(others)
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
