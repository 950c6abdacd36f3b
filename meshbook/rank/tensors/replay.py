"""Recorded steps on a rank: a tape of operations that came as one template, and is one operation from then on.

The first time a tape is run operation by operation, watched by a `Lowering`; after that as the function this made of
it. Where that function does not serve (a number that it took for constant has changed, or nothing could be made), the
operations are run again, one by one: slower, never different.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.rank.tensors import engine
from meshbook.rank.tensors.agreement import BEGIN, END
from meshbook.rank.tensors.calls import FUNCTIONS, Sent
from meshbook.rank.tensors.engine import Template
from meshbook.rank.tensors.lowering import FILE, CannotLower, Lowered, Lowering, is_same_number, settled
from meshbook.wire.messages import Frame

# Functions of ours that are islands: a module, what waits for its collective by other means than an operation, and what
# comes from elsewhere.
_AS_THEY_ARE = ("meshbook::module", "meshbook::slice_local", "meshbook::fed", "meshbook::set_modes", BEGIN, END)

# Lowering anew because other numbers turned out to vary; a step that still differs is replayed one by one.
_MAX_TRIES = 4


@dataclass(frozen=True)
class Step:
    """One operation of a tape."""

    template: int
    ins: tuple[int, ...]  # places among the tape's values: its inputs first, then what operations made, in order
    outs: tuple[int, ...]
    first_float: int
    num_floats: int


@dataclass(frozen=True)
class Tape:
    """A recorded step, as it travels.

    Attributes:
        key: its own, among all of its client's.
        bodies: the templates it uses, by number, pickled.
        results: places of what outlives the step.
        lines: where each operation was issued; None where that is not known.
        merge: several all-reduces may become one, which sums in another order.
    """

    key: str
    num_inputs: int
    steps: tuple[Step, ...]
    bodies: dict[int, bytes]
    results: tuple[int, ...]
    lines: tuple[Frame | None, ...] = ()
    merge: bool = True


@dataclass
class Player:
    """A tape on this rank."""

    tape: Tape
    mesh: Any
    device: torch.device
    templates: dict[int, Template] = field(default_factory=dict)
    lowered: Lowered | None = None
    why_not: str | None = None  # it could not be lowered
    floats: list[float] = field(default_factory=list)  # as they were when it was
    fixed: tuple[int, ...] = ()  # floats that must be as they were
    specs: list[Any] = field(default_factory=list)  # of the results; None for a plain tensor
    islands: set[int] = field(default_factory=set)  # operations that are called as they are
    num_tries: int = 0
    num_played: int = 0

    def __post_init__(self) -> None:
        for number, body in self.tape.bodies.items():
            sent: Sent = pickle.loads(body)
            self.templates[number] = Template(sent, self.mesh, self.device)
        for index, step in enumerate(self.tape.steps):
            template = self.templates[step.template]
            if template.seeded or template.default is not None or template.name.startswith(_AS_THEY_ARE):
                self.islands.add(index)

    def play(self, inputs: Sequence[torch.Tensor], floats: Sequence[float]) -> list[torch.Tensor]:
        """One step."""
        self.num_played += 1
        lowered = self.lowered
        if lowered is not None and self._differ(floats):
            lowered = self.lowered = None
        if lowered is None:
            if self.why_not is None and self.num_tries < _MAX_TRIES:
                return self._lower(inputs, floats)
            return self._one_by_one(inputs, floats)
        locals_ = [settled(tensor) for tensor in inputs]
        try:
            results = lowered.run(locals_, floats)
        except Exception as error:
            raise self._told(error, lowered.step_of(error)) from error
        return [
            result if spec is None else DTensor(result, spec, requires_grad=False)  # type: ignore[no-untyped-call]
            for result, spec in zip(results, self.specs, strict=True)
        ]

    def _differ(self, floats: Sequence[float]) -> bool:
        """Whether a number that was taken for constant is another; its operation is not looked into any more."""
        changed = [slot for slot in self.fixed if not is_same_number(floats[slot], self.floats[slot])]
        for index, step in enumerate(self.tape.steps if changed else ()):
            if any(step.first_float <= slot < step.first_float + step.num_floats for slot in changed):
                self.islands.add(index)
        return bool(changed)

    # ---- one operation after the other

    def _one_by_one(self, inputs: Sequence[torch.Tensor], floats: Sequence[float]) -> list[torch.Tensor]:
        values = dict(enumerate(inputs))
        for index, step in enumerate(self.tape.steps):
            try:
                self._run(step, values, floats)
            except Exception as error:
                raise self._told(error, index) from error
        return [values[place] for place in self.tape.results]

    def _run(self, step: Step, values: dict[int, Any], floats: Sequence[float]) -> None:
        self._do(step, [values[place] for place in step.ins], floats, values)

    def _do(self, step: Step, ins: list[Any], floats: Sequence[float], values: dict[int, Any]) -> None:
        template = self.templates[step.template]
        own = floats[step.first_float : step.first_float + step.num_floats]
        args, kwargs = template.build(ins, own)
        result = _seeded(template, args, kwargs, int(own[-1])) if template.seeded else template.call(*args, **kwargs)
        if template.num_new:
            if template.returns == "one":
                values[step.outs[0]] = result
            else:
                for place, index in zip(step.outs, template.new, strict=True):
                    values[place] = result[index]

    # ---- lowering

    def _lower(self, inputs: Sequence[torch.Tensor], floats: Sequence[float]) -> list[torch.Tensor]:
        """Run the step once, watched; what it gives is as good as any."""
        self.num_tries += 1
        inputs = _apart(inputs)
        values = dict(enumerate(inputs))
        lowering = Lowering([settled(tensor) for tensor in inputs])
        with lowering:
            for index, step in enumerate(self.tape.steps):
                own = floats[step.first_float : step.first_float + step.num_floats]
                try:
                    with lowering.operation(index, step.first_float, own):
                        if index in self.islands:
                            self._island(lowering, step, values, floats)
                        else:
                            self._run(step, values, floats)
                except Exception as error:
                    raise self._told(error, index) from error
            results = [values[place] for place in self.tape.results]
            pieces = [settled(result) for result in results]
        lowered = None
        try:
            lowered = lowering.compile(pieces, merge=self.tape.merge)
        except CannotLower as error:
            self.why_not = str(error)
        if not self._all_say(-1 if lowered is None else zlib.crc32(repr(lowered.order).encode())):
            lowered, self.why_not = None, self.why_not or "ranks would come to their collectives in different orders"
        if lowered is None:
            return results
        self.lowered, self.floats = lowered, list(floats)
        self.fixed = tuple(slot for slot in range(len(floats)) if slot not in lowered.free)
        self.specs = [result._spec if isinstance(result, DTensor) else None for result in results]
        return results

    def _all_say(self, mark: int) -> bool:
        """Whether all ranks have the same mark, which is one of success. They wait for each other."""
        if self.mesh is None:
            return mark >= 0
        ends = torch.tensor([mark, -mark], device=self.device)
        for axis in range(self.mesh.ndim):
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        greatest, least = ends.tolist()
        return mark >= 0 and greatest == -least

    def _island(self, lowering: Lowering, step: Step, values: dict[int, Any], floats: Sequence[float]) -> None:
        template = self.templates[step.template]
        ins = [values[place] for place in step.ins]
        specs = [tensor._spec if isinstance(tensor, DTensor) else None for tensor in ins]
        pieces = [settled(tensor) for tensor in ins]
        made: dict[int, Any] = {}
        with _disable_current_modes():
            self._do(step, ins, floats, made)
        values.update(made)

        def call(locals_: Sequence[torch.Tensor], own: Sequence[float]) -> list[torch.Tensor]:
            again: Any = (
                locals_
                if template.name == BEGIN
                else [
                    local if spec is None else DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
                    for local, spec in zip(locals_, specs, strict=True)
                ]
            )
            fresh: dict[int, Any] = {}
            moved = Step(step.template, step.ins, step.outs, 0, step.num_floats)
            self._do(moved, again, own, fresh)
            return [settled(fresh[place]) for place in step.outs]

        with _disable_current_modes():
            outs = [settled(values[place]) for place in step.outs]
        lowering.island(call, pieces, outs)

    def _told(self, error: Exception, index: int | None) -> Exception:
        if index is None:
            return error
        step = self.tape.steps[index]
        at = self.tape.lines[index] if index < len(self.tape.lines) else None
        line = f", issued at {os.path.basename(at.file)}:{at.line}" if at is not None else ""
        error.add_note(f"in operation {index} of the recorded step, {self.templates[step.template].name}{line}")
        return error

    def told(self) -> dict[str, Any]:
        """How it is played, as plain data."""
        lowered = self.lowered
        return {
            "played": self.num_played,
            "tries": self.num_tries,
            "lowered": lowered is not None,
            "why_not": self.why_not,
            "lines": lowered.num_ops if lowered else None,
            "merged": list(lowered.merged) if lowered else [],
            "islands": len(self.islands),
        }


def _apart(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, each with a local tensor object of its own, by which a `Lowering` knows it: the next call's may be
    different tensors where this one's are two views of one (`x` and `x.as_local()`)."""
    seen: set[int] = set()
    found = []
    for tensor in inputs:
        local = settled(tensor)
        if id(local) in seen:
            local = local.detach()
            tensor = DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local  # type: ignore[no-untyped-call]
        seen.add(id(local))
        found.append(tensor)
    return found


PLAYERS: dict[str, Player] = {}

# The one that plays now: a rank has one thread that runs operations.
_playing: Player | None = None


def replay(mesh: Any, device: torch.device, tape: bytes, key: str, *numbers: Any) -> Any:
    """A recorded step, as an operation.

    Args:
        numbers: the step's inputs, then its floats.
    """
    global _playing
    player = PLAYERS.get(key)
    if player is None:
        player = PLAYERS[key] = Player(pickle.loads(tape), mesh, device)
    _playing = player
    count = player.tape.num_inputs
    return player.play(numbers[:count], numbers[count:])


def _under_way(generated_line: int) -> tuple[str, Frame | None]:
    """See `engine.GENERATED`."""
    player = _playing
    index = player.lowered.steps.get(generated_line) if player is not None and player.lowered is not None else None
    if player is None or index is None or index >= len(player.tape.lines):
        return "a recorded step", None
    name = engine.plain_name(player.templates[player.tape.steps[index].template].name)
    return f"{name} of a recorded step", player.tape.lines[index]


def forget_replay(key: str) -> None:
    PLAYERS.pop(key, None)


def _drop(client: str) -> None:
    for key in [key for key in list(PLAYERS) if key.partition("|")[0] == client]:
        PLAYERS.pop(key, None)


engine.ON_DROP.append(_drop)


def players() -> dict[str, dict[str, Any]]:
    return {key: player.told() for key, player in PLAYERS.items()}


engine.GENERATED[FILE] = _under_way
FUNCTIONS["replay"] = replay
FUNCTIONS["forget_replay"] = forget_replay


def _seeded(template: Template, args: Any, kwargs: Any, seed: int) -> Any:
    call: Callable[..., Any] = engine._seeded
    return call(template, args, kwargs, seed, None)
