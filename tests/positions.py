"""What a rank says of its collectives that has ended call c1 with an error and is at rest."""

from __future__ import annotations

from typing import Any

from meshbook.wire.messages import RankPosition


def position(rank: int, **changes: Any) -> RankPosition:
    reported: dict[str, Any] = {
        "rank": rank, "status": "error", "cause": "", "is_held_or_idle": True, "is_idle": True,
        "has_other_collective_threads": False, "num_groups_created": 1, "groups": (), **changes,
    }  # fmt: skip
    return RankPosition(**reported)
