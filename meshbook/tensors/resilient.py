"""`mesh.resilient(model, opt)`: a loop on remote tensors that loses no step.

Every `every` steps the ranks copy the loop's tensors into their memory, and this process what it holds of the state.
After a fault all goes back to the last snapshot that is complete, and the loop goes on from its step: at once where the
body is in `with run.step():`, else when the loop is run again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from meshbook.controller.mesh import Mesh
from meshbook.errors import CellInterrupted, HealError, MeshbookError, RankLost, UsageError
from meshbook.rank.elastic import loader as loaders
from meshbook.rank.elastic.agreement import describe_position
from meshbook.rank.state.random_states import random_states, set_random_states
from meshbook.tensors import loop_states, snapshot_ops
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.loop_states import LoopState

Batch = TypeVar("Batch")
Loader = Iterable[Batch] | Callable[[], Iterable[Batch]]

# Faults in a row from which a loop goes on by itself without having come to another snapshot.
MAX_FAULTS = 3

_run_numbers = itertools.count(1)


def resilient(mesh: Mesh, *things: Any, every: int = 50, restart: bool = False) -> Resilient:
    """See `Mesh.resilient`."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every is a number of steps, 1 or more, not {every!r:.80}")
    loop_states.check_things(things)
    engines = {id(tensor.engine): tensor.engine for tensor in loop_states.remote_tensors_of(things)}
    if not engines:
        raise UsageError(
            "mesh.resilient is for loops on remote tensors, and there is none among these; in cells that run on the "
            'ranks it is mesh.elastic(loader, state=("model", "opt"))'
        )
    engine = next(iter(engines.values()))
    if len(engines) > 1 or engine.session is not mesh.session or len(engine.ranks) != len(mesh.session.info.ranks):
        raise UsageError(
            "the tensors of a resilient loop lie on all ranks of the mesh whose resilient() is called; these lie on "
            f"{'several meshes or parts of meshes' if len(engines) > 1 else f'{len(engine.ranks)} ranks'}"
        )
    return Resilient(mesh, engine, things, every, restart=restart)


# ---------------------------------------------------------------------------------------------------------------------
# What is remembered of a run


@dataclass
class _Start:
    """What the order of the batches may depend on, as it was when the loop began."""

    random: dict[str, Any]
    generators: list[torch.Tensor]


@dataclass
class _Snapshot:
    """This process's part of a snapshot.

    Attributes:
        number: equal on the ranks.
        loop: which loop of the run, counted from 0.
        step: how many steps of it are done.
        is_end: of its loop.
        start: of its loop.
        random: states of this process's random generators.
        generators: states of `Resilient.generators`.
        taken: for `snapshot_ops.is_taken`.
    """

    number: int
    loop: int
    step: int
    is_end: bool
    start: _Start
    state: LoopState
    random: dict[str, Any]
    generators: list[torch.Tensor]
    taken: Future[Any] | None = None


@dataclass
class _Run:
    """What one `with` does: its loop, or its loops one after the other. It is kept until they have ended well.

    Attributes:
        number: on the ranks.
        structure: of its objects.
        loop: which one began last, counted from 0.
        reached: how many steps of it were done.
        is_active: its `with` runs.
        snapshots: those that may be the newest that is complete, oldest first.
    """

    structure: Any
    number: int = field(default_factory=_run_numbers.__next__)
    loop: int = -1
    reached: int = 0
    is_active: bool = False
    snapshots: list[_Snapshot] = field(default_factory=list)
    snapshot_numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def has_steps(self) -> bool:
        return self.loop > 0 or self.reached > 0

    def drop_replaced(self) -> None:
        """Drop snapshots that are older than one that all ranks are known to have."""
        for at in range(len(self.snapshots) - 1, 0, -1):
            one = self.snapshots[at]
            if one.taken is not None and snapshot_ops.is_taken(one.taken, one.number):
                del self.snapshots[:at]
                return


# ---------------------------------------------------------------------------------------------------------------------


class Resilient:
    """What `mesh.resilient` returns: `with` it around the loops."""

    def __init__(self, mesh: Mesh, engine: TensorEngine, things: Sequence[Any], every: int, *, restart: bool) -> None:
        self.every = every
        self._mesh, self._engine, self._things, self._restart = mesh, engine, tuple(things), restart
        self._runs: dict[Any, _Run] = engine.session.extras.setdefault("resilient", {})  # by the axes of the mesh
        self._run: _Run | None = None
        self._loop: ResilientLoop[Any] | None = None
        self._num_loops = 0
        self._num_faults, self._last_chosen = 0, -1  # in a row, and the snapshot that was gone back to
        self._stopped_before: str | None = None  # what the last Stop before the block has interrupted

    def __repr__(self) -> str:
        loop = "no loop yet" if self._loop is None else f"step {self._loop.step} of loop {self._num_loops - 1}"
        return f"<resilient run, every {self.every} steps: {loop}>"

    # ---- the block

    def __enter__(self) -> Resilient:
        structure = loop_states.structure_of(self._things)
        known = self._runs.get(self._engine.axes)
        if known is not None and known.is_active:
            raise UsageError("another mesh.resilient runs on this mesh; end its block before you begin this one")
        self._num_loops, self._loop = 0, None
        self._stopped_before = self._engine.session.foreground.interrupted_call
        # without a step there is nothing to go on with
        if known is not None and known.has_steps and not self._restart and known.structure == structure:
            self._go_back(known)
            self._run = known
        else:
            if known is not None and known.has_steps:
                print(f"resilient: begins anew; the run that was interrupted at step {known.reached} is dropped")
            self._run = self._runs[self._engine.axes] = _Run(structure)
        self._run.is_active = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        run, self._run = self._run, None
        assert run is not None  # entered
        run.is_active = False
        if error is None:
            self._engine.wait()  # a step that the ranks have not run is not done
            snapshot_ops.forget(self._engine)
            del self._runs[self._engine.axes]

    def steps(self, loader: Loader[Batch]) -> ResilientLoop[Batch]:
        """Return an iterator over the batches of a loader, with a snapshot after every so many.

        A step is the body of the loop for one batch. May be called several times in a block, for loops one after the
        other: those that had ended before a fault yield nothing when the block is run again.

        Args:
            loader: is iterated from its beginning again after a fault: a DataLoader, a list; or a function that returns
                an iterator, such as a generator function.

        Raises:
            UsageError: an iterator, which cannot give its batches again; or the block has not begun.
        """
        self._active()
        if loaders.is_one_pass(loader):  # type: ignore[arg-type]
            raise UsageError(
                "the loader is an iterator, which cannot give its batches again after a fault; give what it iterates "
                "over, or a function that makes it: run.steps(lambda: enumerate(loader))"
            )
        if not isinstance(loader, Iterable) and not callable(loader):
            raise UsageError(f"the loader is iterated over, and a {type(loader).__name__} cannot be")
        number, self._num_loops = self._num_loops, self._num_loops + 1
        self._loop = ResilientLoop(self, loader, number)
        return self._loop

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context for the whole body of a loop: when a rank is lost in it, the mesh is healed, and the loop goes back.

        The rest of the body is left out, and the next batch is the one after the last snapshot.

        Raises:
            RankLost: lost again and again, without a snapshot in between.
            HealError, UsageError: the mesh cannot be healed, or no snapshot can be put together.
        """
        self._active()
        loop = self._loop
        if loop is None:
            raise UsageError("run.step() is for the body of a loop: for batch in run.steps(loader): with run.step(): …")
        loop.heals = True
        try:
            yield
        except MeshbookError as error:
            if not self.is_loss(error):
                raise
            self.recover(error)

    def _active(self) -> _Run:
        if self._run is None:
            raise UsageError("use it as a block: with mesh.resilient(model, opt) as run: …")
        return self._run

    # ---- for its loops

    def begin(self, loop: ResilientLoop[Any], number: int) -> bool:
        """Begin a loop of the block, or go on with it; False: it had ended."""
        run = self._active()
        if number < run.loop:
            return False
        if number == run.loop:  # what code before the loop has changed is taken back
            snapshot = run.snapshots[-1]
            if snapshot.loop != number or snapshot.is_end:
                return False
            if number:
                self._go_back(run, quiet=True)
            return True
        generators = [generator.get_state() for generator in self.generators(loop.loader)]
        loop.start = _Start(random_states(), generators)
        run.loop, run.reached = number, 0
        self.take(loop)
        self._wait_until_taken()
        return True

    def take(self, loop: ResilientLoop[Any], *, is_end: bool = False) -> None:
        """Have a snapshot taken. Does not wait for it."""
        run = self._active()
        run.drop_replaced()
        assert loop.start is not None  # it has begun
        state, tensors = loop_states.capture(self._things)
        snapshot = _Snapshot(
            next(run.snapshot_numbers),
            run.loop,
            loop.step,
            is_end,
            loop.start,
            state,
            random_states(),
            [generator.get_state() for generator in self.generators(loop.loader)],
        )
        run.snapshots.append(snapshot)
        snapshot.taken = snapshot_ops.take(self._engine, tensors, run.number, snapshot.number, loop.step)

    def finish(self, loop: ResilientLoop[Any]) -> None:
        """Take the snapshot of a loop's end, and wait until the ranks have done all of it."""
        self.take(loop, is_end=True)
        self._wait_until_taken()
        self._active().drop_replaced()

    def _wait_until_taken(self) -> None:
        """Wait for the last snapshot.

        Raises:
            OperationFailed: a tensor of the state could not be computed.
            RankLost, CellInterrupted: as for a cell.
        """
        self._engine.wait()
        snapshot = self._active().snapshots[-1]
        if snapshot.taken is None or not snapshot_ops.is_taken(snapshot.taken, snapshot.number):
            _, tensors = loop_states.capture(self._things)
            self._engine.faults.check_ids([tensor._handle.id for tensor in tensors])
            raise UsageError(
                f"the ranks have not copied the state of step {snapshot.step}: an operation before failed, or was "
                "stopped. Run the block again"
            )

    def count_step(self, loop: ResilientLoop[Any]) -> None:
        self._active().reached = loop.step
        if loop.step % self.every == 0:
            self.take(loop)

    def generators(self, loader: Any) -> list[torch.Generator]:
        """Return the generators that the order of the batches may depend on."""
        given = [thing for thing in self._things if isinstance(thing, torch.Generator)]
        return [*loaders.generators_of(loader), *given]

    def batches(self, loop: ResilientLoop[Any]) -> Iterator[Any]:
        """Return the batches of a loop from the step of the last snapshot on."""
        snapshot = self._active().snapshots[-1]
        loop.start = start = snapshot.start
        # As at the beginning: loaders draw their order, and the seeds of workers, when they are iterated.
        _set_random(start.random, self.generators(loop.loader), start.generators)
        batches = iter(loop.loader if isinstance(loop.loader, Iterable) else loop.loader())
        loaders.skip(batches, snapshot.step)
        if snapshot.step:  # else what the loader has drawn when it was iterated comes after the snapshot
            _set_random(snapshot.random, self.generators(loop.loader), snapshot.generators)
        return batches

    @property
    def position(self) -> int:
        """The step of the snapshot that was gone back to."""
        return self._active().snapshots[-1].step

    # ---- after a fault

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error comes of the loss of a rank, and not of a Stop: a second press kills ranks."""
        was_stopped = self._engine.session.foreground.interrupted_call != self._stopped_before
        if was_stopped or isinstance(error, (CellInterrupted, HealError, UsageError)):
            return False
        return isinstance(error, RankLost) or (isinstance(error, MeshbookError) and bool(self._engine.session.lost))

    def recover(self, error: BaseException) -> None:
        """Heal the mesh, and go back to the last snapshot; if another rank is lost meanwhile, do it again."""
        while True:
            self._num_faults += 1
            if self._num_faults > MAX_FAULTS:
                self._num_faults = 0
                raise RankLost(
                    f"{error}\nThis was the fault number {MAX_FAULTS + 1} since the snapshot of step "
                    f"{self._active().snapshots[-1].step}, so the loop does not go on by itself: look why ranks are "
                    "lost (mesh.logs(rank)), heal the mesh, and run the loop again",
                    ranks=getattr(error, "ranks", ()),
                    survivors=getattr(error, "survivors", ()),
                ) from error
            try:
                healed = self._mesh.heal()
                if healed.ranks:
                    print(healed)
                self._go_back(self._active())
            except MeshbookError as again:
                if not (self.is_loss(again) or (isinstance(again, HealError) and self._engine.session.lost)):
                    raise
                error = again
            else:
                if self._loop is not None:
                    self._loop.go_back()
                return

    def _go_back(self, run: _Run, *, quiet: bool = False) -> None:
        """Load the newest snapshot that can be put together. Blocks."""
        engine = self._engine
        try:
            engine.sender.check_open()
        except RankLost as error:  # healed, with operations under way: they are undone now
            if engine.sender.is_closed_for_good:
                raise UsageError(
                    f"there is no snapshot to go back to: {error}. Then: mesh.resilient(..., restart=True)"
                ) from error
            if engine.session.lost or engine.sender.error is not None:
                raise
        engine.faults.check_ids(())  # undoes steps that the ranks have not taken
        found = snapshot_ops.collect(engine, run.number)
        if "problem" in found:
            raise UsageError(found["problem"])
        snapshot = next(one for one in run.snapshots if one.number == found["number"])
        snapshot_ops.load(engine, loop_states.targets_of(snapshot.state, self._things), snapshot.number)
        gradients = loop_states.gradients_of(snapshot.state, self._things)
        snapshot_ops.load(engine, gradients, snapshot.number)
        loop_states.restore(snapshot.state, self._things, gradients)
        set_random_states(snapshot.random)
        reached = max(run.reached, snapshot.step) if run.loop == snapshot.loop else snapshot.step
        run.snapshots, run.loop, run.reached = [snapshot], snapshot.loop, reached
        if snapshot.number != self._last_chosen:
            self._num_faults, self._last_chosen = min(self._num_faults, 1), snapshot.number
        if not quiet:
            print(f"resilient: {describe_position(reached, snapshot.step, found['lacking'])}")


def _set_random(
    random: dict[str, Any], generators: Sequence[torch.Generator], generator_states: Sequence[torch.Tensor]
) -> None:
    for generator, generator_state in zip(generators, generator_states, strict=False):
        generator.set_state(generator_state)
    set_random_states(random)


class ResilientLoop(Generic[Batch]):
    """What `Resilient.steps` returns.

    Attributes:
        step: how many steps of the loop are done, those before a fault included.
        loader: what it iterates over.
        heals: whether its body is in `run.step()`.
        start: None: it has not begun.
    """

    def __init__(self, run: Resilient, loader: Loader[Batch], number: int) -> None:
        self.loader, self.step, self.heals = loader, 0, False
        self.start: _Start | None = None
        self._run = run
        self._is_under_way = False
        self._batches: Iterator[Batch] | None = None  # None: to be made, from the last snapshot on
        self._is_over = not run.begin(self, number)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        """The number of all steps of the loop, those done before included."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Batch:
        while not self._is_over:
            try:
                return self._advance()
            except MeshbookError as error:
                if not self.heals or not self._run.is_loss(error):
                    raise
                self._run.recover(error)
        raise StopIteration

    def go_back(self) -> None:
        """Go on from the last snapshot with the next batch."""
        self._batches, self._is_under_way = None, False

    def _advance(self) -> Batch:
        if self._batches is None:
            self.step = self._run.position
            self._batches = self._run.batches(self)
        if self._is_under_way:
            self._is_under_way = False
            self.step += 1
            self._run.count_step(self)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._run.finish(self)
            self._is_over = True
            raise
        self._is_under_way = True
        return batch
