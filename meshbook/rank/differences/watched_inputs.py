"""What this rank gave to its collectives since the last update, and got: sums, read when something is wrong.

Of reductions of a CPU's tensors both are read at once, for sums that no rank gave bad numbers to (`overflows`).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from meshbook.rank.differences import numbers
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.overflows import GivenBad, Overflow
from meshbook.rank.process_groups.ring import Collective

_MAX_INPUTS = 1024
# Collectives whose input is the second argument; of the others it is the first.
_INPUT_IS_SECOND = ("all_gather", "all_to_all", "reduce_scatter", "gather")
_WITHOUT_INPUT = ("scatter", "barrier")
_REDUCTIONS = ("all_reduce", "reduce")
_FOR_OTHERS = ("reduce",)  # reductions of which a rank gets a part of the result, or nothing: reduce_scatter, reduce
_FSDP_REDUCES = inspect.unwrap(_fsdp_collectives.foreach_reduce).__code__
_UNKNOWN = torch.tensor(torch.nan)


class GivenAway(NamedTuple):
    """Numbers that are not finite, given to a reduction whose result other ranks have, and not this one."""

    collective: Collective
    is_of_backward: bool  # which has begun it
    totals: Sequence[torch.Tensor]  # on a GPU, where they show whether the numbers are finite
    parameter: Any = None  # of FSDP2: the first one with a bad gradient, where that is known


class CollectiveInputs:
    """Observes the collectives of all groups of a rank.

    Attributes:
        num_received: how often numbers have come that only other ranks gave: of a receive, a broadcast, a scatter.
        watches_results: whether what collectives give is summed too.
    """

    def __init__(
        self,
        rank: int,
        given_bad: GivenBad,
        note_line: Callable[[], Callable[[], str]],
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        """
        Args:
            note_line: returns what names the notebook's line that issued the operation on remote tensors that runs
                now; it gives an empty text if none runs.
            guarded: returns a function that does not raise.
        """
        self.begun, self.finished = guarded(self._begun), guarded(self._finished)
        self._rank, self.num_received = rank, 0
        self._given_bad, self._note_line = given_bad, note_line
        # Reductions to which this rank gave finite numbers, with what names the notebook's line.
        self._given_finite: dict[int, Callable[[], str]] = {}
        self._suspects: list[tuple[Collective, str, str]] = []  # whose results are not; with line and dtype
        self._given_away: list[GivenAway] = []
        self._totals: deque[tuple[Collective, torch.Tensor]] = deque(maxlen=_MAX_INPUTS)
        self.watches_results = False
        self._results: dict[int, list[torch.Tensor]] = {}  # sums of results, by the collective's number

    @property
    def has_any(self) -> bool:
        return bool(self._totals)

    def _begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        op = collective.op
        if op in _WITHOUT_INPUT or self._only_receives(collective, arguments):
            return
        at = 1 if op.startswith(_INPUT_IS_SECOND) else 0
        given = numbers.tensors_in(arguments[at] if len(arguments) > at else ())
        parts = [part for tensor in given if (part := numbers.part_here(tensor)) is not None]
        totals = list(map(numbers.total, parts))
        self._totals += [(collective, total) for total in totals]
        if parts and op.startswith(_REDUCTIONS) and parts[0].device.type == "cpu":
            if _are_bad(parts, totals):
                self._given_bad.note(collective)
                if op.startswith(_FOR_OTHERS):
                    self._given_away.append(GivenAway(collective, _is_in_backward(), (), fsdp_parameter_of(parts[0])))
            else:
                self._given_finite[collective.seq] = self._note_line()
        elif op.startswith(_FOR_OTHERS):
            self._given_away.append(GivenAway(collective, _is_in_backward(), totals))

    def _finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        # A receive may be begun long before its numbers come.
        self.num_received += self._only_receives(collective, arguments)
        if (name_line := self._given_finite.pop(collective.seq, None)) is not None:
            self._look_at_reduction(collective, arguments, name_line)
        if self.watches_results and len(self._results) < _MAX_INPUTS:
            parts = map(numbers.part_here, numbers.tensors_in(arguments[:1]))
            self._results[collective.seq] = [numbers.total(part) for part in parts if part is not None]

    def _look_at_reduction(
        self, collective: Collective, arguments: tuple[Any, ...], name_line: Callable[[], str]
    ) -> None:
        if collective.op == "reduce" and not self._is_source(collective, arguments):
            return
        parts = [part for got in numbers.tensors_in(arguments[:1]) if (part := numbers.part_here(got)) is not None]
        if _are_bad(parts, list(map(numbers.total, parts))):
            self._suspects.append((collective, name_line(), str(parts[0].dtype).removeprefix("torch.")))

    def first_overflow(self) -> Overflow | None:
        """Return the first sum over ranks since the last time that is too large, of numbers that were all finite."""
        suspects, self._suspects = self._suspects, []
        for collective, line, dtype in suspects:
            if self._given_bad.is_by_nobody(collective):
                return Overflow(collective, line, dtype, self._given_bad.is_first_to_report(collective))
        return None

    def failed(self, collective: Collective, error: BaseException) -> None:
        self._given_finite.pop(collective.seq, None)

    def first_bad(self, until: int | None = None) -> Collective | None:
        """Return the first collective that this rank gave numbers to that are not finite. Waits for a GPU.

        Args:
            until: only among its collectives up to this one.
        """
        considered = (pair for pair in self._totals if until is None or pair[0].seq <= until)
        return next((collective for collective, total in considered if not numbers.is_finite(total)), None)

    def first_given_away(self) -> GivenAway | None:
        """Return the first reduction whose result other ranks have, and to which this one gave bad numbers.

        Waits for a GPU, once.
        """
        totals = [total for given in self._given_away for total in given.totals]
        if totals and numbers.are_totals_finite(totals):
            return None
        bad = (given for given in self._given_away if not (given.totals and all(map(numbers.is_finite, given.totals))))
        return next(bad, None)

    def ops_since(self, seq: int) -> list[str]:
        """Return the collectives that were begun with numbers of this rank's after its collective `seq`."""
        return [collective.op for collective, _ in self._totals if collective.seq > seq]

    def carriers_since(self, seq: int) -> list[str]:
        """Return those of `ops_since` that gave numbers that are not finite, or of which that is not known."""
        return [
            collective.op
            for collective, _ in self._totals
            if collective.seq > seq and not all(map(numbers.is_finite, self._results.get(collective.seq, [_UNKNOWN])))
        ]

    def place_of_first_bad(self) -> Place | None:
        bad = self.first_bad()
        return None if bad is None or bad.line is None else (bad.line.file, bad.line.line, bad.line.function)

    def clear(self, until: int | None = None) -> None:
        """Forget all collectives, or those up to a number."""
        last = math.inf if until is None else until
        while self._totals and self._totals[0][0].seq <= last:
            self._totals.popleft()
        self._results = {seq: totals for seq, totals in self._results.items() if seq > last}
        self._suspects = [suspect for suspect in self._suspects if suspect[0].seq > last]
        self._given_away = [given for given in self._given_away if given.collective.seq > last]

    def _only_receives(self, collective: Collective, arguments: tuple[Any, ...]) -> bool:
        is_from_one = collective.op in ("broadcast", "scatter")
        return collective.op == "recv" or (is_from_one and not self._is_source(collective, arguments))

    def _is_source(self, collective: Collective, arguments: tuple[Any, ...]) -> bool:
        root = getattr(arguments[-1], "rootRank", None)
        ranks = collective.group_ranks
        return isinstance(root, int) and root < len(ranks) and ranks[root] == self._rank


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def fsdp_parameter_of(given: torch.Tensor) -> Any:
    """Return the first parameter with a bad gradient among those that FSDP2 is about to reduce; None: it is not FSDP2.

    Args:
        given: the gradients of some parameters as FSDP2 has packed them: for each rank its parts of all of them.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _FSDP_REDUCES:
        frame = frame.f_back
    if frame is None:
        return None
    has_bad = ~torch.isfinite(given.view(frame.f_locals["world_size"], -1)).all(0)
    at = int(has_bad.int().argmax())
    for parameter, size in zip(frame.f_locals["fsdp_params"], frame.f_locals["padded_unsharded_sizes"], strict=True):
        at -= size.numel() // frame.f_locals["world_size"]
        if at < 0:
            return parameter.sharded_param
    return None


def _are_bad(parts: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]) -> bool:
    return not all(map(numbers.is_finite, totals)) and bool(numbers.kinds(parts))
