"""Names of groups that only their members make: `new_group(..., use_local_synchronization=True)`, splits of groups.

Members must give a group one name without a word to each other. torch's is made of the members and of how many groups
there are on the rank, which differs once a rank has made one more; then the members wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


class HashedNames:
    """Names made of the members and of how many groups of the same members were named before.

    Attributes:
        counts: how many names were given, by members, "0,1".
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def next(self, ranks: Sequence[int]) -> str:
        """Return the name of the next group of these ranks."""
        members = ",".join(map(str, ranks))
        count = self.counts[members] = self.counts.get(members, 0) + 1
        return hashlib.sha1(f"{members} #{count}".encode(), usedforsecurity=False).hexdigest()

    def catch_up(self, reported: Sequence[Mapping[str, int]]) -> None:
        """Count on from the highest counts of all ranks: a rank is new, or was stopped between two groups."""
        for counts in reported:
            for members, count in counts.items():
                self.counts[members] = max(count, self.counts.get(members, 0))
