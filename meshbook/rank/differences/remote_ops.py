"""Watches a batch of operations on remote tensors, each one, for the first number that is not finite; names lines.

The notebook's lines issued them, so that a finding names one of these. Within the forward of a module that is spread
over the mesh the sentinel's own hooks look, which name the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.diagnose.source_files import is_cell_file, short_path
from meshbook.rank import scalars
from meshbook.rank.differences import numbers
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.rerun import BadOperation, check_operation
from meshbook.rank.tensors.engine import CurrentOp
from meshbook.wire.messages import Frame


class RemoteOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls back at the first operation of each batch that makes numbers that are not finite."""

    def __init__(
        self,
        current_op: Callable[[], CurrentOp | None],
        is_watched: Callable[[], bool],
        count_collectives: Callable[[], int],
        found: Callable[[BadOperation, str, bool], None],
    ) -> None:
        """
        Args:
            current_op: returns the operation of the batch that runs, with the notebook's line.
            is_watched: whether to look at the operation that comes now.
            count_collectives: returns how many this rank has begun.
            found: takes the operation, the notebook's line, and whether it had collectives.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._current_op, self._is_watched, self._found = current_op, is_watched, found
        self._count_collectives = count_collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_watched():
            return func(*args, **kwargs)
        before = self._count_collectives()
        result, bad = check_operation(func, args, kwargs)
        if bad is not None:
            current = self._current_op()
            line = "" if current is None else _name_line(current)
            op, dtype, size = bad
            operation = BadOperation("", op, "remote", None, dtype, size)
            self._found(operation, line, self._count_collectives() != before)
        return result


def _name_line(current: CurrentOp) -> str:
    """Return the notebook's line that issued an operation: "cell 12, line 31 in loss_of"; empty: it is not known."""
    line: Frame | None = current.line
    frame: Any = sys._getframe(1)
    while frame is not None:  # of a recorded step, whose generated code has a line for each operation
        if (inner := current.generated_code.get(frame.f_code.co_filename)) is not None:
            line = inner(frame.f_lineno)[1] or line
            break
        frame = frame.f_back
    if line is None:
        return ""
    where = f"{current.cells.get(line.file) or short_path(line.file)}, line {line.line}"
    return where if line.function.startswith("<") else f"{where} in {line.function}"


class PlaceNames:
    """Names lines and steps for findings.

    Attributes:
        remote_op: returns the running operation, while a batch of operations on remote tensors runs; else None.
    """

    def __init__(self, cell_title: Callable[[str], str | None]) -> None:
        """
        Args:
            cell_title: returns "cell 12" for the file of a cell of this rank's.
        """
        self._cell_title = cell_title
        self.remote_op: Callable[[], CurrentOp | None] | None = None

    @property
    def are_remote(self) -> bool:
        return self.remote_op is not None

    def name(self, place: Place | None) -> str:
        """Return "cell 12, line 31 in forward"; empty: no place is known."""
        current = None if self.remote_op is None else self.remote_op()
        if current is None or place is None:
            return numbers.name_place(place, self._cell_title)
        if is_cell_file(place[0]) and place[0] not in current.cells:  # of a cell that is not this rank's
            return _name_line(current)
        return numbers.name_place(place, current.cells.get)

    def step(self) -> int | None:
        """Return the step by the user's variable, or that of `meshbook.log`; None: neither is known."""
        step = numbers.step_from_frames()
        if step is not None or self.are_remote:  # the notebook has the loop
            return step
        log = scalars.installed()
        return log.step if log is not None and log.num_steps else None
