"""What ranks say to each other while they plan a save or a restore: collectives of the mesh, on main threads, in order.

An error of one rank is passed on like an answer, so that all ranks raise it together and none waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from meshbook.errors import CheckpointError, MeshbookError, message_of
from meshbook.ids import name_ranks

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one rank has come to: a value, or the text of an error."""

    value: T | None = None
    error: str = ""


def attempt(function: Callable[[], T]) -> Answer[T]:
    """Call a function, and return its value or its error. KeyboardInterrupt is raised."""
    try:
        return Answer(function())
    except MeshbookError as error:
        return Answer(error=str(error))
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {message_of(error)}")


class Exchange:
    """The exchanges of all ranks. Every rank calls the same methods in the same order; each waits for the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        """
        Raises:
            CheckpointError: there are several ranks, and no process group.
        """
        self.rank, self.world_size = rank, world_size
        if world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"{world_size} ranks plan a checkpoint over the mesh's process group, and this mesh has none; start it "
                "without process_group=False"
            )

    def all_gather(self, answer: Answer[T]) -> list[T]:
        """Return every rank's value, by rank.

        Raises:
            CheckpointError: ranks have come to an error; all raise it.
        """
        answers: list[Any] = [answer]
        if self.world_size > 1:
            answers = [None] * self.world_size
            dist.all_gather_object(answers, answer)
        raise_errors(answers)
        return [each.value for each in answers]

    def reduce_scatter(self, value: T, reduce: Callable[[list[T]], Sequence[R]]) -> R:
        """Return this rank's item of what rank 0 makes of all ranks' values.

        Raises:
            CheckpointError: `reduce` has raised on rank 0; all ranks raise it.
        """
        if self.world_size == 1:
            return reduce([value])[0]
        is_first = self.rank == 0
        values: list[Any] | None = [None] * self.world_size if is_first else None
        dist.gather_object(value, values, dst=0)
        answers: list[Any] = [None] * self.world_size
        if values is not None:
            reduced = attempt(lambda: reduce(values))
            items = reduced.value if reduced.value is not None else [None] * self.world_size
            answers = [Answer(item, reduced.error) for item in items]
        received: list[Any] = [None]
        dist.scatter_object_list(received, answers if is_first else None, src=0)
        if received[0].error:
            raise CheckpointError(f"rank 0: {received[0].error}")
        found: R = received[0].value
        return found


def raise_errors(answers: Sequence[Answer[Any]]) -> None:
    """Raise one CheckpointError for what the ranks that failed say; equal errors once."""
    ranks_by_error: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer.error:
            ranks_by_error.setdefault(answer.error, []).append(rank)
    if not ranks_by_error:
        return
    if len(ranks_by_error) == 1 and len(next(iter(ranks_by_error.values()))) == len(answers):
        raise CheckpointError(next(iter(ranks_by_error)))
    raise CheckpointError("\n".join(f"{name_ranks(ranks)}: {error}" for error, ranks in ranks_by_error.items()))
