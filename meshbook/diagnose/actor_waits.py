"""Actors that wait for each other's replies: which endpoint called which, and where that forms a cycle.

An actor whose endpoints are all `def` processes one message at a time: while one of its endpoints waits, all other
calls of it are queued. So a call back to a waiting actor never gets a reply. An actor with an event loop processes the
next message while it awaits; for such an actor only the endpoint that was called counts.

Pure: snapshots in, waits out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshbook.diagnose import snapshot_reader
from meshbook.diagnose.snapshot_reader import SourceLocation
from meshbook.diagnose.source_files import sanitize_line
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, ActiveEndpoint, PendingEndpointCall, RankSnapshot


class ActorWait(NamedTuple):
    """A running endpoint that waits for a reply, and the call it waits for."""

    rank: int
    caller: ActiveEndpoint
    callee: PendingEndpointCall
    callee_rank: int | None  # None: its process is not part of this mesh
    location: SourceLocation | None  # the line of the user's code that waits

    @property
    def phrase(self) -> str:
        """`rank 0: asker, in ask at cell 3, line 5, waits for answerer.answer on rank 1`"""
        where = f" at {self.location}" if self.location is not None else ""
        on_rank = "" if self.callee_rank is None else f" on rank {self.callee_rank}"
        return (
            f"rank {self.rank}: {sanitize_line(self.caller.name, 60)}, "
            f"in {sanitize_line(self.caller.endpoint, 60)}{where}, "
            f"waits for {format_callee(self.callee)}{on_rank}"
        )


EndpointKey = tuple[int, int]  # a running endpoint: its rank and its index in `RankSnapshot.endpoints`


class ActorWaitGraph:
    """All running endpoints, and which of them waits for which."""

    def __init__(self, snapshots: Mapping[int, RankSnapshot]) -> None:
        self._snapshots = snapshots
        self._rank_of_node: dict[str, int] = {}
        self._running_endpoints: dict[tuple[str, str], list[EndpointKey]] = {}  # by actor: (node, id)
        for rank, snapshot in snapshots.items():
            for number, seen in enumerate(snapshot.endpoints):
                self._rank_of_node[seen.node] = rank
                self._running_endpoints.setdefault((seen.node, seen.actor), []).append((rank, number))
        self.waits: dict[EndpointKey, list[tuple[ActorWait, EndpointKey | None]]] = {
            (rank, number): [
                (self._make_wait(rank, seen, answer), self._find_blocker(seen.node, answer))
                for answer in seen.pending_calls
            ]
            for rank, snapshot in snapshots.items()
            for number, seen in enumerate(snapshot.endpoints)
        }

    def _make_wait(self, rank: int, seen: ActiveEndpoint, answer: PendingEndpointCall) -> ActorWait:
        return ActorWait(rank, seen, answer, self._rank_of_node.get(answer.node), self._locate(rank, seen))

    def _find_blocker(self, node: str, answer: PendingEndpointCall) -> EndpointKey | None:
        """Return the endpoint that must end before a call gets its reply: its own, or the one it is queued behind."""
        for key in self._running_endpoints.get((answer.node, answer.actor), ()):
            seen = self._snapshots[key[0]].endpoints[key[1]]
            if not seen.is_async or (seen.caller, seen.call) == (node, answer.call):
                return key
        return None

    def _locate(self, rank: int, seen: ActiveEndpoint) -> SourceLocation | None:
        snapshot, frames = self._snapshots[rank], seen.frames
        if not frames:
            name = ACTOR_THREAD_PREFIX + seen.name
            frames = next((stack.frames for stack in snapshot.stacks if stack.name == name), ())
        return snapshot_reader.locate(snapshot_reader.innermost_user_frame(frames), snapshot)

    def find_cycles(self) -> list[list[ActorWait]]:
        """Return the cycles of endpoints that wait for each other. Each endpoint is in at most one cycle."""
        found: list[list[ActorWait]] = []
        visited: set[EndpointKey] = set()
        for start in self.waits:
            path: list[EndpointKey] = []
            path_waits: list[ActorWait] = []
            pending = [iter(self.waits[start])] if start not in visited else []
            if pending:
                path.append(start)
            while pending:
                wait, target = next(pending[-1], (None, None))
                if wait is None:
                    pending.pop()
                    visited.add(path.pop())
                    if path_waits:
                        path_waits.pop()
                elif target is not None and target in path:
                    index = path.index(target)
                    found.append([*path_waits[index:], wait])
                    visited.update(path)
                    break
                elif target is not None and target not in visited:
                    path.append(target)
                    path_waits.append(wait)
                    pending.append(iter(self.waits[target]))
        return found

    def waits_leading_to(self, cycle: list[ActorWait]) -> list[ActorWait]:
        """Return the waits of endpoints outside a cycle that lead into it, directly or through others."""
        inside = {id(wait.caller) for wait in cycle}
        found: list[ActorWait] = []
        changed = True
        while changed:
            changed = False
            for key, waits in self.waits.items():
                seen = self._snapshots[key[0]].endpoints[key[1]]
                for wait, target in waits:
                    reaches = target is not None and id(self._snapshots[target[0]].endpoints[target[1]]) in inside
                    if reaches and id(seen) not in inside:
                        inside.add(id(seen))
                        found.append(wait)
                        changed = True
        return found

    def waits_of_rank(self, rank: int) -> list[ActorWait]:
        """Return what the endpoints of one rank wait for."""
        return [wait for key, waits in self.waits.items() if key[0] == rank for wait, _ in waits]

    def waits_only_for_other_ranks(self, rank: int) -> bool:
        """Whether this rank's endpoints wait, and only for endpoints that run on other ranks."""
        targets = [target for key, waits in self.waits.items() if key[0] == rank for _, target in waits]
        return bool(targets) and all(target is not None and target[0] != rank for target in targets)


def format_callee(answer: PendingEndpointCall) -> str:
    """`answerer.answer`"""
    return f"{sanitize_line(answer.name, 60)}.{sanitize_line(answer.endpoint, 60)}"
