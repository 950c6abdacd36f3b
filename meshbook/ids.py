"""Names for the things that messages speak of: ranks, calls, hosts.

Standard library only. Rank sets travel as sorted tuples of ints and are read by people as `0-2,5`; both directions of
that spelling live here, so that every part of Meshbook writes and reads it alike.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import NewType

Rank = NewType("Rank", int)  # global rank, 0 .. world_size - 1
HostId = NewType("HostId", int)  # index of a host in its mesh, 0 .. num_hosts - 1
CallId = NewType("CallId", str)  # one request and everything that answers it; unique over all clients of a mesh
Ranks = tuple[int, ...]  # sorted, without repeats


class CallIds:
    """Call ids of one client: its own id, then a counter.

    So two clients of one mesh never collide, and what a call left on a rank is known as its client's.
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
    """The id of the client whose call it is."""
    return call.rpartition("-")[0]


def format_ranks(ranks: Iterable[int]) -> str:
    """`(0, 1, 2, 5)` as `0-2,5`; no ranks as `none`."""
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
    """`rank 3` or `ranks 0-2,5`: how a sentence names them."""
    chosen = tuple(ranks)
    return f"{'rank' if len(set(chosen)) == 1 else 'ranks'} {format_ranks(chosen)}"


def parse_ranks(text: str) -> Ranks:
    """`0,2-3` as `(0, 2, 3)`. Whether such ranks exist is the mesh's to say.

    Raises:
        ValueError: the text is not a list of ranks; the message says what one looks like.
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
