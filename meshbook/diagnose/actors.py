"""Actors that wait for each other's answers: who has called whom, and where that goes round in a circle.

An actor whose endpoints are all `def` takes one message at a time: as long as one of its endpoints waits, all other
calls of it wait behind that. So a call back to an actor that waits is never answered. An actor with an event loop takes
the next message while it awaits; of it only the endpoint that was called counts.

Pure: snapshots in, steps out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshbook.diagnose import looks
from meshbook.diagnose.code import plain
from meshbook.diagnose.looks import At
from meshbook.wire.messages import ACTOR_THREAD, AnswerAwaited, EndpointSeen, RankSnapshot


class Step(NamedTuple):
    """An endpoint that waits for an answer, and what it has called."""

    rank: int
    caller: EndpointSeen
    called: AnswerAwaited
    to_rank: int | None  # None: its process is none of this mesh's
    at: At | None  # the line of the user's code that waits

    @property
    def words(self) -> str:
        """`rank 0: asker, in ask at cell 3, line 5, waits for answerer.answer on rank 1`"""
        where = f" at {self.at}" if self.at is not None else ""
        there = "" if self.to_rank is None else f" on rank {self.to_rank}"
        return (
            f"rank {self.rank}: {plain(self.caller.name, 60)}, in {plain(self.caller.endpoint, 60)}{where}, "
            f"waits for {called(self.called)}{there}"
        )


Key = tuple[int, int]  # of an endpoint that runs: its rank, its place in `RankSnapshot.endpoints`


class Calls:
    """All endpoints that run, and who of them waits for whom."""

    def __init__(self, snapshots: Mapping[int, RankSnapshot]) -> None:
        self._snapshots = snapshots
        self._rank_of: dict[str, int] = {}
        self._running: dict[tuple[str, str], list[Key]] = {}  # of an actor: (node, id)
        for rank, snapshot in snapshots.items():
            for number, seen in enumerate(snapshot.endpoints):
                self._rank_of[seen.node] = rank
                self._running.setdefault((seen.node, seen.actor), []).append((rank, number))
        self.steps: dict[Key, list[tuple[Step, Key | None]]] = {
            (rank, number): [
                (self._step(rank, seen, answer), self._holds_up(seen.node, answer)) for answer in seen.awaits
            ]
            for rank, snapshot in snapshots.items()
            for number, seen in enumerate(snapshot.endpoints)
        }

    def _step(self, rank: int, seen: EndpointSeen, answer: AnswerAwaited) -> Step:
        return Step(rank, seen, answer, self._rank_of.get(answer.node), self._at(rank, seen))

    def _holds_up(self, node: str, answer: AnswerAwaited) -> Key | None:
        """What has to end before a call is answered: the endpoint that was called, or the one that it waits behind."""
        for key in self._running.get((answer.node, answer.actor), ()):
            seen = self._snapshots[key[0]].endpoints[key[1]]
            if not seen.interleaves or (seen.caller, seen.call) == (node, answer.call):
                return key
        return None

    def _at(self, rank: int, seen: EndpointSeen) -> At | None:
        snapshot, frames = self._snapshots[rank], seen.frames
        if not frames:
            name = ACTOR_THREAD + seen.name
            frames = next((stack.frames for stack in snapshot.stacks if stack.name == name), ())
        return looks.at(looks.user_frame(frames), snapshot)

    def circles(self) -> list[list[Step]]:
        """Endpoints each of which waits for the next, and the last for the first. Every endpoint is in one at most."""
        found: list[list[Step]] = []
        done: set[Key] = set()
        for start in self.steps:
            path: list[Key] = []
            taken: list[Step] = []
            ahead = [iter(self.steps[start])] if start not in done else []
            if ahead:
                path.append(start)
            while ahead:
                step, target = next(ahead[-1], (None, None))
                if step is None:
                    ahead.pop()
                    done.add(path.pop())
                    if taken:
                        taken.pop()
                elif target is not None and target in path:
                    place = path.index(target)
                    found.append([*taken[place:], step])
                    done.update(path)
                    break
                elif target is not None and target not in done:
                    path.append(target)
                    taken.append(step)
                    ahead.append(iter(self.steps[target]))
        return found

    def leading_to(self, circle: list[Step]) -> list[Step]:
        """Steps of endpoints outside a circle that wait for one in it, directly or through others."""
        inside = {id(step.caller) for step in circle}
        found: list[Step] = []
        grows = True
        while grows:
            grows = False
            for key, steps in self.steps.items():
                seen = self._snapshots[key[0]].endpoints[key[1]]
                for step, target in steps:
                    reaches = target is not None and id(self._snapshots[target[0]].endpoints[target[1]]) in inside
                    if reaches and id(seen) not in inside:
                        inside.add(id(seen))
                        found.append(step)
                        grows = True
        return found

    def of(self, rank: int) -> list[Step]:
        """What the endpoints of one rank wait for."""
        return [step for key, steps in self.steps.items() if key[0] == rank for step, _ in steps]

    def ends_elsewhere(self, rank: int) -> bool:
        """Whether all that this rank's endpoints wait for are endpoints that run on other ranks."""
        targets = [target for key, steps in self.steps.items() if key[0] == rank for _, target in steps]
        return bool(targets) and all(target is not None and target[0] != rank for target in targets)


def called(answer: AnswerAwaited) -> str:
    """`answerer.answer`"""
    return f"{plain(answer.name, 60)}.{plain(answer.endpoint, 60)}"
