"""Identifiers used in messages: ranks, calls, hosts.

Standard library only. Rank sets are sorted tuples of ints in messages and `0-2,5` in text; this module has both
conversions, so that all of Meshbook uses the same format.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import NewType

Rank = NewType("Rank", int)  # global rank, 0 .. world_size - 1
HostId = NewType("HostId", int)  # index of a host in its mesh, 0 .. num_hosts - 1
CallId = NewType("CallId", str)  # one request and all its replies; unique across all clients of a mesh
Ranks = tuple[int, ...]  # sorted, without duplicates


class CallIds:
    """Generates call ids of one client: its own id, then a counter.

    Two clients of one mesh never collide, and a call's remains on a rank can be attributed to its client.
    """

    def __init__(self, client: str | None = None) -> None:
        self._prefix = client or secrets.token_hex(8)
        self._counter = itertools.count(1)

    def next(self) -> CallId:
        return CallId(f"{self._prefix}-{next(self._counter)}")

    def issued(self, call: str) -> bool:
        """Whether an id is one of this client's."""
        return call.startswith(f"{self._prefix}-")


def client_of_call(call: str) -> str:
    """Return the id of the client that made this call."""
    return call.rpartition("-")[0]


def format_ranks(ranks: Iterable[int]) -> str:
    """Format `(0, 1, 2, 5)` as `0-2,5`; no ranks as `none`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if not spans:
        return "none"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for a sentence: `rank 3` or `ranks 0-2,5`."""
    chosen = tuple(ranks)
    return f"{'rank' if len(set(chosen)) == 1 else 'ranks'} {format_ranks(chosen)}"


def parse_ranks(text: str) -> Ranks:
    """Parse `0,2-3` as `(0, 2, 3)`, without checking that such ranks exist.

    Raises:
        ValueError: the text is not a list of ranks; the message shows the format.
    """
    ranks: set[int] = set()
    for part in text.replace("[", "").replace("]", "").split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{text!r} is not a list of ranks; write it like 0 or 0,2-3")
        if dash and int(high) < int(low):
            raise ValueError(f"the rank range {part.strip()!r} runs backwards; write {high}-{low}")
        ranks.update(range(int(low), int(high if dash else low) + 1))
    return tuple(sorted(ranks))
