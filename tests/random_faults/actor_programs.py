"""Random calls of actors on the ranks of a mesh, one with a fault, against plain objects.

Each call is one endpoint's, by one of Monarch's verbs, and changes a number that every actor has of its own. After the
fault each actor has taken the calls that the error does not name, in their order, and no other; after a death those
that are left have, and the error names the dead.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import psutil

import meshbook.actor
from meshbook.actor import Actor, ActorError, SupervisionError, endpoint, pull
from meshbook.controller.mesh import Mesh
from tests.actors.example_actors import send_sigint_when
from tests.random_faults.harness import CALL_TIMEOUT_S, WORLD_SIZE, SharedMeshPrograms, WrongResult, wait_until

PRIME = 997
RANKS = range(WORLD_SIZE)
# How often each comes: what kills a rank costs a new mesh.
FAULTS = {"raise": 4, "raise everywhere": 2, "stop": 3, "freeze": 2, "kill": 1}


def mix_number(number: int, by: int, place: int) -> int:
    return (number * by + place + 1) % PRIME


class Counter(Actor):
    """One message at a time."""

    def __init__(self, number: int) -> None:
        self.number, self.place = number, int(os.environ["RANK"])

    @endpoint
    def mix(self, by: int) -> int:
        self.number = mix_number(self.number, by, self.place)
        return self.number

    @endpoint
    def read(self) -> int:
        return self.number

    @endpoint
    def mix_with_fault(self, by: int, what: str, guilty: int, seed: int) -> int:
        """The fault comes before the number is changed."""
        if guilty in (-1, self.place):
            if what == "raise":
                raise ValueError(f"the seeded fault {seed}")
            if what == "stop":
                print(f"held {seed}", flush=True)
                pause = threading.Event()
                while True:
                    pause.wait(0.01)
            os.kill(os.getpid(), signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
        self.number = mix_number(self.number, by, self.place)
        return self.number


class Asker(Actor):
    """Asks the actors of another mesh, from its own process."""

    def __init__(self, asked: Any) -> None:
        self.asked = asked

    @endpoint
    async def total(self) -> int:
        return sum((await self.asked.read.call()).values())


class ActorPrograms(SharedMeshPrograms):
    """Calls without a fault, one with, and calls without a fault."""

    def run(self, seed: int) -> str:
        """See `Programs`."""
        return _Program(self.shared.get(), seed).run()


class _Program:
    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh, self.seed = mesh, seed
        self.rng = draw = random.Random(seed)
        (self.kind,) = draw.choices(list(FAULTS), list(FAULTS.values()))
        self.guilty = draw.randrange(WORLD_SIZE)
        start = draw.randrange(PRIME)
        self.expected = [start] * WORLD_SIZE
        self.counters = mesh.spawn(f"counters {seed}", Counter, start)
        self.askers = mesh.spawn(f"askers {seed}", Asker, self.counters)
        self.open: list[tuple[Any, list[int]]] = []  # futures that nobody has asked yet, and what they must give

    def run(self) -> str:
        try:
            self._run()
        except WrongResult as wrong:
            raise WrongResult(f"{self.kind} on rank {self.guilty}: {wrong}") from wrong
        return self.kind

    def _run(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            self._random_action()
        if self.kind == "kill":
            self._kill()
            return
        self._fault()
        for _ in range(self.rng.randint(1, 8)):
            self._random_action()
        self._check(self.counters.read.call().get(CALL_TIMEOUT_S), self.expected)
        self._check_open()
        for actors in (self.askers, self.counters):
            actors.stop().get(CALL_TIMEOUT_S)

    # ---- what a program is made of

    def _random_action(self) -> None:
        getattr(self, self.rng.choice(("_call", "_later", "_broadcast", "_one", "_stream", "_ask", "_look")))()

    def _mix(self, places: Any = RANKS) -> int:
        by = self.rng.randint(2, 9)
        for place in places:
            self.expected[place] = mix_number(self.expected[place], by, place)
        return by

    def _call(self) -> None:
        self._check(self.counters.mix.call(self._mix()).get(CALL_TIMEOUT_S), self.expected)

    def _later(self) -> None:
        self.open.append((self.counters.mix.call(self._mix()), list(self.expected)))

    def _broadcast(self) -> None:
        self.counters.mix.broadcast(self._mix())

    def _one(self) -> None:
        place = self.rng.choice(RANKS)
        got = self.counters.slice(dp=place).mix.call_one(self._mix([place])).get(CALL_TIMEOUT_S)
        if got != self.expected[place]:
            raise WrongResult(f"actor {place} answers {got}, and has {self.expected[place]}")

    def _stream(self) -> None:
        got = sorted(future.get(CALL_TIMEOUT_S) for future in self.counters.mix.stream(self._mix()))
        if got != sorted(self.expected):
            raise WrongResult(f"the actors answer {got}, and have {self.expected}")

    def _ask(self) -> None:
        self.counters.read.call().get(CALL_TIMEOUT_S)  # messages of two senders are in no order
        got = set(self.askers.total.call().get(CALL_TIMEOUT_S).values())
        if got != {sum(self.expected)}:
            raise WrongResult(f"actors that ask the others are told {got}, and those have {self.expected}")

    def _look(self) -> None:
        self.counters.read.call().get(CALL_TIMEOUT_S)
        self._check(pull(self.counters.state.number), self.expected)

    def _check(self, got: Any, wanted: list[int]) -> None:
        found = [int(value) for value in (got.values() if hasattr(got, "values") else got)]
        if found != wanted:
            raise WrongResult(f"the actors have {found}, and must have {wanted}")

    def _check_open(self) -> None:
        for future, wanted in self.open:
            self._check(future.get(CALL_TIMEOUT_S), wanted)

    # ---- the fault

    def _begin_fault(self) -> Any:
        what, guilty = ("raise", -1) if self.kind == "raise everywhere" else (self.kind, self.guilty)
        by = self.rng.randint(2, 9)
        future = self.counters.mix_with_fault.call(by, what, guilty, self.seed)
        spared = RANKS if guilty == -1 else () if self.kind == "freeze" else (guilty,)
        for place in RANKS:
            if place not in spared:
                self.expected[place] = mix_number(self.expected[place], by, place)
        return future

    def _fault(self) -> None:
        future, whole = self._begin_fault(), None
        if self.kind == "freeze":
            whole = list(self.expected)
            process = psutil.Process(self.mesh.status().ranks[self.guilty].pid)
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the rank stops itself")
        for _ in range(self.rng.randint(0, 3)):  # behind it, while it is under way
            self.rng.choice((self._later, self._broadcast))()
        if self.kind == "freeze":
            process.send_signal(signal.SIGCONT)
            self._check(future.get(CALL_TIMEOUT_S), whole or [])
        elif self.kind == "stop":
            self._stopped(future)
        else:
            self._raised(future)

    def _raised(self, future: Any) -> None:
        try:
            got = future.get(CALL_TIMEOUT_S)
        except ActorError as error:
            guilty = tuple(RANKS) if self.kind == "raise everywhere" else (self.guilty,)
            if f"the seeded fault {self.seed}" not in str(error) or tuple(error.ranks) != guilty:
                raise WrongResult(f"the error names ranks {error.ranks}: {error}") from error
            return
        raise WrongResult(f"the call has the answer {got}")

    def _stopped(self, future: Any) -> None:
        pressing = send_sigint_when(lambda: f"held {self.seed}" in self.mesh.logs(self.guilty))
        try:
            got = future.get(CALL_TIMEOUT_S)
        except KeyboardInterrupt:
            pass
        else:
            raise WrongResult(f"the call has the answer {got}")
        finally:
            pressing.join(CALL_TIMEOUT_S)
        try:
            got = future.get(CALL_TIMEOUT_S)
        except ActorError as error:
            if "KeyboardInterrupt" not in str(error):
                raise WrongResult(f"Stop is not named: {error}") from error
            return
        raise WrongResult(f"the call that was stopped has the answer {got}")

    def _kill(self) -> None:
        reported: list[Any] = []
        hook = meshbook.actor.unhandled_fault_hook
        meshbook.actor.unhandled_fault_hook = reported.append  # type: ignore[assignment]
        try:
            future = self._begin_fault()
            try:
                got = future.get(CALL_TIMEOUT_S)
            except SupervisionError as error:
                if "SIGKILL" not in str(error) or f"rank {self.guilty}" not in str(error):
                    raise WrongResult(f"the death is not named: {error}") from error
            else:
                raise WrongResult(f"the call has the answer {got}")
            for place in RANKS:
                if place != self.guilty:
                    left = self.counters.slice(dp=place)
                    if (number := left.read.call_one().get(CALL_TIMEOUT_S)) != self.expected[place]:
                        raise WrongResult(
                            f"actor {place}, which lives, has {number}, and must have {self.expected[place]}"
                        )
            wait_until(lambda: self.mesh.session.lost, "the mesh knows of the death")
        finally:
            meshbook.actor.unhandled_fault_hook = hook
