"""Coalesced all-gathers on gloo: one all-gather per tensor.

The two workers of a gloo group write the name of the collective that they have completed into one `std::string`,
without a lock (`ProcessGroupGloo::runLoop`, torch 2.13). A name of more than 15 characters is on the heap: two
collectives that complete at the same time free it twice, and malloc ends the process. "ALLGATHER_COALESCED", which
DTensor uses, is that long, so none is passed to gloo. One worker per group would also avoid the crash, but takes ten
times as long for small tensors. The other long name, of sparse all-reduces, is not replaced: each of them takes several
exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch


def gather_into_tensors(
    group: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
) -> Any:
    """Run `ProcessGroup.allgather_into_tensor_coalesced`; return the operation in flight."""
    _check(len(outputs), len(inputs))
    options = () if opts is None else (opts,)
    return _joined([group._allgather_base(whole, own, *options) for whole, own in zip(outputs, inputs, strict=True)])


def gather_into_lists(
    group: Any, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
) -> Any:
    """Run `ProcessGroup.allgather_coalesced`, with a list of outputs per rank; return the operation in flight."""
    for of_rank in outputs:
        _check(len(of_rank), len(inputs))
    options = () if opts is None else (opts,)
    return _joined(
        [
            group.allgather([[of_rank[index] for of_rank in outputs]], [own], *options)
            for index, own in enumerate(inputs)
        ]
    )


# By the ProcessGroup methods that they replace.
ON_GLOO: dict[str, Callable[..., Any]] = {
    "all_gather_single_coalesced": gather_into_tensors,
    "allgather_coalesced": gather_into_lists,
    "allgather_into_tensor_coalesced": gather_into_tensors,
}


def _check(num_outputs: int, num_inputs: int) -> None:
    if num_outputs != num_inputs or not num_inputs:
        raise ValueError(f"a coalesced all_gather takes as many outputs as inputs: {num_outputs} for {num_inputs}")


def _joined(works: list[Any]) -> Any:
    return works[0] if len(works) == 1 else _Works(works)


class _Works:
    """Several operations as one, with the methods of `torch.distributed.Work` that its users call."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all operations.

        Raises:
            RuntimeError: one of them failed or timed out; `wait` may then be called again.
        """
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(lambda all_: [tensor for future in all_.value() for tensor in future.value()])
