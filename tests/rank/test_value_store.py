"""What a rank holds for clients goes with them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from meshbook.rank.value_store import ValueStore
from meshbook.wire.buffers import SegmentPool
from meshbook.wire.messages import SharedBuffer

LARGE = np.zeros(1 << 20)


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    with SegmentPool() as pool:
        yield pool


def test_what_was_kept_for_a_client_that_is_gone_is_let_go_of_and_others_keep_theirs(pool: SegmentPool) -> None:
    kept = ValueStore(pool)
    for call in ("a-1", "a-2", "b-1"):
        kept.store(call, LARGE)
        kept.dump(call, LARGE)
    held = pool.used_bytes
    kept.drop_client("a")
    assert list(kept) == ["b-1"]
    assert pool.used_bytes == held // 3
    kept.drop_client("b")
    assert (list(kept), pool.used_bytes) == ([], 0)


def test_what_a_call_gives_after_its_client_has_gone_is_not_kept(pool: SegmentPool) -> None:
    kept = ValueStore(pool)
    kept.drop_client("a")
    kept.store("a-1", LARGE)
    kept.dump("a-1", LARGE)
    assert (list(kept), pool.used_bytes) == ([], 0)


def test_what_a_client_releases_is_let_go_of(pool: SegmentPool) -> None:
    kept = ValueStore(pool)
    kept.store("a-1", LARGE)
    payload = kept.dump("a-1", LARGE)
    segments = tuple({buffer.segment for buffer in payload.buffers if isinstance(buffer, SharedBuffer)})
    kept.release(("a-1", "unknown-1"), (*segments, "of another rank"))
    assert (list(kept), pool.used_bytes) == ([], 0)
    kept.drop_client("a")
