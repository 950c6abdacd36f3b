"""`mesh.elastic(loader, state=...)`: a loop that goes on after a fault where it was, on all ranks alike.

Every `every` steps all ranks copy the state of the loop into memory: what the names of `state` have, the states of the
random generators, and the position. After a fault the cell ends as it always does. When it is run again, the loop loads
the last snapshot on all ranks, drops the batches before it, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import Preempted, UsageError, message_of
from meshbook.rank.elastic import contents, resized, transfer
from meshbook.rank.elastic import loader as loaders
from meshbook.rank.elastic.agreement import (
    Begin,
    GoBack,
    HeldSnapshot,
    Request,
    decide,
    describe_going_back,
    describe_resized,
    ended_everywhere,
    fold_problems,
)
from meshbook.rank.elastic.contents import Part
from meshbook.rank.elastic.objects import give_objects
from meshbook.rank.elastic.runs import ElasticRuns, Run
from meshbook.rank.elastic.snapshots import Snapshot
from meshbook.rank.preemption import preempted
from meshbook.rank.process_groups import gradient_buckets
from meshbook.rank.process_groups.interrupted_steps import has_unreduced_gradients
from meshbook.rank.state.kinds import has_identity
from meshbook.rank.state.random_states import random_states, set_random_states

Batch = TypeVar("Batch")

_packer = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)

# Parts of a snapshot that are no names: what every loop has now, and what it began with.
NOW, _START = " now", " start"


def elastic(
    loader: Iterable[Batch], state: str | Sequence[str], every: int = 50, *, name: str = "", restart: bool = False
) -> ElasticLoop[Batch]:
    """Iterate over a loader, on all ranks, so that a fault loses nothing but the step under way.

        for batch in mesh.elastic(loader, state=("model", "opt"), every=50):
            ...

    A step is the body of the loop for one batch. All ranks call this together, and do equally many steps. After a fault
    (a rank that is lost, Stop, an exception in the cell) run the cell again, after `%mesh heal` where a rank was lost:
    all ranks load the last snapshot and go on from its step. A loop whose cell has ended well begins anew.

    Args:
        loader: gives the same batches each time that it is iterated with the same random states; wrap it rather than
            the loop: `mesh.elastic(enumerate(loader), ...)`. One that is among `state` knows by that where it is.
        state: names of what the steps change, as cells see them: models (DDP and FSDP2 too), optimizers, whatever has
            `state_dict` and `load_state_dict`, tensors, generators, and values that can be pickled, which are replaced.
            The random states of torch, CUDA, NumPy and Python are always part of it.
        every: steps between two snapshots. One takes about as long as copying the state twice.
        name: what is gone on with is found by this; by default by the names of `state`.
        restart: begin anew, whatever was interrupted.

    Returns:
        an iterator; `.step` is the number of steps that are done.

    Raises:
        Preempted: at the end of a step, because a process of the mesh received SIGTERM; a snapshot of it was taken.
        UsageError: a name does not exist or cannot be copied; the ranks disagree; a snapshot cannot be loaded.
    """
    if _installed is None:
        raise UsageError(
            "meshbook.elastic runs on ranks, and this code runs on the controller; call it in a cell that runs on the "
            "mesh"
        )
    return ElasticLoop(_installed, loader, state, every, name=name, restart=restart)


# Global, because a process is one rank for its lifetime, and `meshbook.elastic` is a function of the process.
_installed: ElasticRuns | None = None


def install(runs: ElasticRuns) -> None:
    """Have `meshbook.elastic` and `mesh.elastic` use the runs of this rank.

    `mesh` is torch's DeviceMesh, whose class is given the function: what an instance is, how it compares, and how it is
    pickled stays as it was, and the DeviceMesh of a later generation has it too.
    """
    global _installed
    _installed = runs
    DeviceMesh.elastic = staticmethod(elastic)  # type: ignore[attr-defined]
    DeviceMesh.preempted = staticmethod(preempted)  # type: ignore[attr-defined]


class ElasticLoop(Generic[Batch]):
    """What `elastic` returns.

    Attributes:
        step: how many steps of the loop are done, those of interrupted runs included.
    """

    def __init__(
        self,
        runs: ElasticRuns,
        loader: Iterable[Batch],
        state: str | Sequence[str],
        every: int,
        *,
        name: str,
        restart: bool,
    ) -> None:
        self._names = _check_arguments(loader, state, every, name)
        self._runs, self._loader, self._every = runs, loader, every
        self._key = name or ", ".join(self._names)
        if runs.groups.solo.is_active:
            raise UsageError(
                "an elastic loop in a setup cell is not run again on a new rank, which would train alone; put it into "
                "a cell of its own"
            )
        self._rank = torch.distributed.get_rank()
        self._is_under_way = self._is_over = self._is_due = False
        self._batches: Iterator[Batch] = iter(())
        self._start: Part | None = None
        self._from = 0, 0  # row of the epoch and step at which this iteration over the loader began
        self.step = 0
        number = runs.count_loop(self._key)
        requests = self._exchange_requests(number, restart)
        decision = decide(requests)
        if isinstance(decision, Begin):
            self._begin(decision, number)
            runs.forget(ended_everywhere(requests))
        else:
            self._go_back(decision)

    # ---- the iterator

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        """The number of all steps of the loop, those done before included."""
        row, step = self._from
        return step + loaders.num_batches_from(self._loader, row)

    def __next__(self) -> Batch:
        if self._is_over:
            raise StopIteration
        if self._is_under_way:
            self._is_under_way = False
            self._step_done()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            if not self._are_gradients_pending():
                self._take_snapshot(is_end=True)
            raise
        self._is_under_way = True
        return batch

    def _step_done(self) -> None:
        self.step += 1
        self._run.reached = self.step
        self._is_due = self._is_due or self.step % self._every == 0
        is_preempted = self._runs.preemption.ask()
        if (self._is_due or is_preempted) and not self._are_gradients_pending():
            self._take_snapshot()
            if is_preempted:
                raise Preempted(
                    f"{self._runs.preemption.reason}; the loop was ended after step {self.step}, of which it has a "
                    "snapshot: run the cell again when the ranks are whole (%mesh heal)"
                )

    # ---- beginning, and going back

    def _exchange_requests(self, number: int, restart: bool) -> list[Request]:
        runs = self._runs
        run = runs.runs.get(self._key)
        if run is not None:
            run.last_call = runs.call
        request = Request(
            key=self._key,
            every=self._every,
            restart=restart,
            call=runs.call,
            source=runs.source_digest(),
            loop=number,
            problem=_find_problem(self._names, runs.namespace, self._device_mesh()),
            record=None if run is None else run.describe(),
            ended=tuple(key for key, other in runs.runs.items() if not other.is_open and key != self._key),
        )
        return [_requests.decode(text) for text in transfer.gather(_packer.encode(request))]

    def _begin(self, decision: Begin, number: int) -> None:
        runs, present = self._runs, self._runs.runs.get(self._key)
        if present is not None and present.number == decision.run:  # the next loop of the same cell
            run = present
            run.loop, run.reached = number, 0
        else:
            run = Run(decision.run, runs.call, runs.source_digest(), runs.call, loop=number)
            if present is not None:
                run.spare = present.spare or next(iter(present.complete), None)
                if run.spare is not None:
                    run.spare.held = None
                present.say_that_it_is_dropped()
            runs.runs[self._key] = run
        self._use(run)
        self._start = self._capture_start()
        self._take_snapshot()
        self._batches = iter(self._loader)

    def _go_back(self, options: Sequence[GoBack]) -> None:
        runs = self._runs
        run = runs.runs.get(self._key)
        if run is None or run.number != options[0].run:
            run = runs.runs[self._key] = Run(options[0].run, "", "", runs.call)
        if options[0].is_resized:
            self._go_on_resized(run, options[0])
            return
        if run.one_pass is not None and run.one_pass is self._loader:
            raise UsageError(
                "the loader is an iterator, and what the interrupted run has taken from it is gone; give one that can "
                "be iterated again, or make it in this cell"
            )
        decision, snapshot = run.collect(self._rank, options)
        run.complete_copies(self._rank, snapshot, decision)
        if decision.lacking:
            give_objects(self._names, decision.lacking, self._rank, runs.namespace, runs.groups)
        if decision.is_own_loop:
            run.call, run.source = runs.call, runs.source_digest()
        run.is_open, run.loop, run.reached = True, decision.snapshot.loop, decision.reached
        self._use(run)
        self._is_over = decision.is_over
        self._load(snapshot, decision)
        print(describe_going_back(decision))

    def _use(self, run: Run) -> None:
        run.current, self._run = self, run
        run.one_pass = self._loader if loaders.is_one_pass(self._loader) else None

    def _load(self, snapshot: Snapshot, decision: GoBack) -> None:
        """Load the state of a snapshot, and bring the loader to its step. All ranks fail if one does."""

        def load() -> None:
            parts = snapshot.parts([*self._names, NOW, _START])
            self._check_names(parts)
            self._load_parts(parts, decision)

        _load_together(load, decision)

    def _load_parts(self, parts: dict[str, Part], decision: GoBack) -> None:
        mesh = self._device_mesh()
        meshes = contents.meshes_by_key(self._runs.namespace, self._names, mesh)
        self._start = _own_part(parts[_START])
        start = contents.unpickle_part(parts[_START], meshes)
        self._from, self.step = start["from"], decision.snapshot.step
        own: list[str] = []  # names of the loader itself, which is loaded before it is iterated
        if not decision.is_over:
            # As at the beginning: loaders draw their order, and the seeds of workers, when they are iterated.
            self._set_start(start)
            own = [name for name in self._names if self._runs.namespace.get(name) is self._loader]
            for name in own:
                contents.restore(name, parts[name], self._runs.namespace, meshes)
            row, first_step = self._from
            self._batches = loaders.batches_from(self._loader, row)
            if not own:
                loaders.skip(self._batches, self.step - first_step)
        for name in self._names:
            if name not in own:
                contents.restore(name, parts[name], self._runs.namespace, meshes)
        if self.step or decision.is_over:
            # Else what the loader has drawn when it was iterated comes after the snapshot.
            self._set_now(contents.unpickle_part(parts[NOW], meshes))

    def _go_on_resized(self, run: Run, decision: GoBack) -> None:
        """Go on, on another number of ranks than before, from a snapshot whose state those held alike."""
        snapshot = run.find(decision.snapshot.number)
        names, parts = resized.share_parts(self._rank, decision, run, [*self._names, NOW], self._runs.namespace)
        own = [name for name in self._names if name not in names]
        if decision.is_own_loop:
            run.call, run.source = self._runs.call, self._runs.source_digest()
        run.is_open, run.loop, run.reached = True, decision.snapshot.loop, decision.reached
        self._use(run)
        self._is_over = decision.is_over
        _load_together(lambda: self._load_resized(parts, own, decision, is_new=snapshot is None), decision)
        print(describe_resized(decision, own))
        self._take_snapshot(is_end=self._is_over, number=decision.snapshot.number + 1)

    def _load_resized(self, parts: dict[str, Part], own: list[str], decision: GoBack, *, is_new: bool) -> None:
        """Load what the ranks of before held alike, and deal the rows of the epoch that are left."""
        namespace, mesh = self._runs.namespace, self._device_mesh()
        meshes = contents.meshes_by_key(namespace, self._names, mesh)
        now = contents.unpickle_part(parts[NOW], meshes)
        sampler = loaders.sampler_of(self._loader)
        resized.check(decision, own, namespace, has_rows=sampler is not None and now["rows"] is not None)
        for name in self._names:
            if name in parts:
                contents.restore(name, parts[name], namespace, meshes)
                if isinstance(namespace[name], DistributedDataParallel):  # not every rank has those of the snapshot
                    gradient_buckets.begin_anew(namespace[name])
        if not is_new:
            self._set_now(now)
        self.step = decision.snapshot.step
        if sampler is not None and now["rows"] is not None:
            row, sampler.epoch = now["rows"]
            self._from = row, self.step
        self._start = self._capture_start()
        if not self._is_over:
            self._batches = loaders.batches_from(self._loader, self._from[0])

    def _check_names(self, parts: dict[str, Part]) -> None:
        if missing := [name for name in self._names if name not in parts]:
            raise UsageError(
                f"the interrupted run had no {', '.join(f'`{name}`' for name in missing)} in its state; give the same "
                "names as before"
            )

    # ---- the state

    def _are_gradients_pending(self) -> bool:
        """Whether a model holds gradients that FSDP2 has yet to reduce: they are no part of a snapshot."""
        values = (self._runs.namespace.get(name) for name in self._names)
        return any(has_unreduced_gradients(value) for value in values if isinstance(value, torch.nn.Module))

    def _take_snapshot(self, *, is_end: bool = False, number: int | None = None) -> None:
        """Take a snapshot of this step, on all ranks. Blocks until all have it.

        Args:
            number: equal on all ranks; None: the next one.
        """
        if self._run.current is not self:
            raise UsageError(
                f"another elastic loop with the same state ({self._key}) began within this one; give each a name=..."
            )
        self._is_due = False
        run, world_size = self._run, torch.distributed.get_world_size()
        number = run.next_number if number is None else number
        held = HeldSnapshot(number, run.loop, self.step, is_end, has_copies=True, world_size=world_size)
        run.take(self._rank, held, self._capture())

    def _capture(self) -> dict[str, Part]:
        namespace = self._runs.namespace
        meshes = contents.name_meshes(namespace, self._names, self._device_mesh())
        if missing := [name for name in self._names if name not in namespace]:
            raise UsageError(f"the loop has deleted {', '.join(missing)}, which is in its state")
        parts = {name: contents.capture(namespace[name], name, meshes) for name in self._names}
        now = {
            "random": random_states(),
            "loader": self._loader_states(),
            "rows": loaders.rows_done(self._loader, self._from, self.step),
        }
        parts[NOW] = contents.pickle_part(now, {})
        assert self._start is not None  # captured or loaded before
        parts[_START] = self._start
        return parts

    def _loader_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in loaders.generators_of(self._loader)]

    def _capture_start(self) -> Part:
        """Return what the order of the batches may depend on, as it is at the beginning of the loop."""
        namespace = self._runs.namespace
        named = {name: namespace[name] for name in self._names}
        generators = {name: value.get_state() for name, value in named.items() if isinstance(value, torch.Generator)}
        values = {name: value for name, value in named.items() if not has_identity(value)}
        start = {
            "random": random_states(),
            "loader": self._loader_states(),
            "generators": generators,
            "values": values,
            "from": self._from,
        }
        meshes = contents.name_meshes(namespace, self._names, self._device_mesh())
        return _own_part(contents.pickle_part(start, meshes))

    def _set_start(self, start: dict[str, Any]) -> None:
        namespace = self._runs.namespace
        namespace.update(start["values"])
        for name, generator_state in start["generators"].items():
            if name in namespace:
                namespace[name].set_state(generator_state)
        self._set_now(start)

    def _set_now(self, now: dict[str, Any]) -> None:
        for generator, generator_state in zip(loaders.generators_of(self._loader), now["loader"], strict=False):
            generator.set_state(generator_state)
        set_random_states(now["random"])

    def _device_mesh(self) -> DeviceMesh:
        mesh = self._runs.groups.mesh
        assert mesh is not None  # formed before any cell runs
        return mesh


def _load_together(load: Callable[[], None], decision: GoBack) -> None:
    """Call `load` on all ranks; all fail if one does."""
    problem, cause = "", None
    try:
        load()
    except Exception as error:
        problem, cause = (
            str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {message_of(error)}",
            error,
        )
    if texts := fold_problems([text.decode() for text in transfer.gather(problem.encode())]):
        again = "run the cell again, or begin anew (restart=True)"
        raise UsageError(f"{texts}. The snapshot of step {decision.snapshot.step} is kept: {again}") from cause


def _own_part(part: Part) -> Part:
    """Return a part with tensors of its own, on this machine's memory."""
    return Part(part.pickled, [tensor.detach().cpu().contiguous().clone() for tensor in part.tensors])


def _find_problem(names: Sequence[str], namespace: Mapping[str, Any], mesh: DeviceMesh) -> str:
    """Return why no run can begin on this rank; "" if one can."""
    if missing := [name for name in names if name not in namespace]:
        there = [
            name
            for name, value in namespace.items()
            if name[:1] != "_" and not isinstance(value, type) and has_identity(value)
        ]
        what = f"names with a state are {', '.join(there[:12])}" if there else "no name here has a state"
        return f"there is no {' and no '.join(f'`{name}`' for name in missing)}; {what}"
    meshes = contents.name_meshes(namespace, names, mesh)
    try:
        for name in names:
            if not isinstance(namespace[name], torch.nn.Module):  # reading DDP's buckets may be a collective
                contents.capture(namespace[name], name, meshes)
    except UsageError as error:
        return str(error)
    return ""


def _check_arguments(loader: Any, state: Any, every: Any, name: Any) -> tuple[str, ...]:
    """Return the names of `state`, each once. Raises UsageError."""
    names = (state,) if isinstance(state, str) else tuple(state)
    if not names or not all(isinstance(one, str) for one in names):
        raise UsageError(f'state is the names of what the steps change, such as ("model", "opt"), not {state!r:.80}')
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every is a number of steps, 1 or more, not {every!r:.80}")
    if not isinstance(name, str):
        raise UsageError(f"name is a string, not {name!r:.80}")
    if not isinstance(loader, Iterable):
        raise UsageError(f"the loader is iterated over, and a {type(loader).__name__} cannot be")
    return tuple(dict.fromkeys(names))
