"""Displays of ranks under a cell: those on the page, and those that are left out."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from meshbook.errors import UsageError
from meshbook.fold import rendering
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import Display, Preview, RankDisplay


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
        distinct = self.distinct_contents()
        if len(distinct) == 1:
            return _display_content(distinct[0][1], self.name)
        parts = [(ranks, _preview_of(item)) for ranks, item in distinct]
        data = {"text/plain": rendering.render_previews(parts, call_ranks, colour=False)}
        if (shown := rendering.render_previews_html(parts, call_ranks)) is not None:
            data["text/html"] = shown
        return _display_content(Display(data), self.name)

    def distinct_contents(self) -> list[tuple[Ranks, Display]]:
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


def _display_content(item: Display, display_id: str | None = None) -> dict[str, Any]:
    """Return the content of `display_data` or `update_display_data`."""
    transient = {} if display_id is None else {"display_id": display_id}
    return {"data": dict(item.data), "metadata": dict(item.metadata), "transient": transient}


def _preview_of(item: Display) -> Preview:
    data = dict(item.data)
    return Preview("object", "", str(data.pop("text/plain", "")), html=data.pop("text/html", None), data=data)
