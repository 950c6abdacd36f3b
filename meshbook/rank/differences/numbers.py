"""Numbers that are not finite: which tensors have them, and where a line of the user's is."""

from __future__ import annotations

import cmath
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from meshbook.diagnose.source_files import is_user_file, short_path

Place = tuple[str, int, str]  # file, line, function

_HALVES = (torch.float16, torch.bfloat16)
_SUMMED = (*_HALVES, torch.float32, torch.float64, torch.complex64, torch.complex128)  # not float8
_STEP_NAMES = ("step", "global_step", "iteration", "iter_num", "it", "i")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in arguments or results: in tuples, lists, dicts and dataclass-like mappings."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)


def part_here(tensor: torch.Tensor, *, wait: bool = False) -> torch.Tensor | None:
    """Return this rank's part, without autograd; None: it has none to look at.

    Args:
        wait: for a collective that it comes from; without, such a tensor is not looked at.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if wait and isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout is not torch.strided:
        return None
    return None if tensor.is_meta or tensor.dtype not in _SUMMED else tensor.detach()


def total(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of a part, which is not finite if one of its numbers is not. Does not wait for a GPU."""
    return part.sum(dtype=torch.float32) if part.dtype in _HALVES else part.sum()


def is_finite(value: torch.Tensor) -> bool:
    """Whether a tensor with one element is finite. Waits for a GPU."""
    number = value.item()
    return cmath.isfinite(number) if isinstance(number, complex) else math.isfinite(number)


def totals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of these tensors' parts. Does not wait for a GPU."""
    return [total(part) for tensor in tensors if (part := part_here(tensor)) is not None]


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the sums of these tensors' parts are finite. False also of sums that overflow. Waits for a GPU once."""
    return are_totals_finite(totals_of(tensors))


def are_totals_finite(totals: list[torch.Tensor]) -> bool:
    """Whether these sums are finite. Waits for a GPU once."""
    if len(totals) > 1 and totals[0].device.type != "cpu":
        totals = [torch.stack([each.abs().double() for each in totals]).sum()]
    return all(map(is_finite, totals))


def kinds(tensors: Iterable[torch.Tensor]) -> set[str]:
    """Return which of "nan", "inf" and "-inf" are among the numbers of these tensors. Exact; reads them all."""
    found: set[str] = set()
    for tensor in tensors:
        part = part_here(tensor, wait=True)
        if part is None or not part.numel() or is_finite(total(part)) or bool(torch.isfinite(part).all()):
            continue
        if part.is_complex():
            part = torch.view_as_real(part)
        if bool(part.isnan().any()):
            found.add("nan")
        if bool((part == math.inf).any()):
            found.add("inf")
        if bool((part == -math.inf).any()):
            found.add("-inf")
    return found


def largest(tensors: Iterable[torch.Tensor]) -> tuple[str, float | None]:
    """Return the dtype of the first of these tensors, and the largest magnitude of the finite numbers in all."""
    dtype, found = "", None
    for tensor in tensors:
        part = part_here(tensor, wait=True)
        if part is None:
            continue
        dtype = dtype or str(part.dtype).removeprefix("torch.")
        finite = part[torch.isfinite(part)]
        if finite.numel():
            size = float(finite.abs().max())
            found = size if found is None else max(found, size)
    return dtype, found


# ---------------------------------------------------------------------------------------------------------------------


def user_frame(frame: Any, until: Any = None) -> Any:
    """Return the innermost frame of the user's code, from `frame` outwards; None: there is none before `until`."""
    while frame is not None and frame is not until:
        if is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def place_of(frame: Any) -> Place | None:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def name_place(place: Place | None, cell_title: Callable[[str], str | None]) -> str:
    """Return a line for display: "cell 12, line 31 in forward"; empty: None.

    Args:
        cell_title: returns "cell 12" for the file of a cell.
    """
    if place is None:
        return ""
    file, line, function = place
    where = f"{cell_title(file) or short_path(file)}, line {line}"
    return where if function == "<module>" else f"{where} in {function}"


def user_namespaces() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of the user's functions that run, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame.f_locals
        frame = frame.f_back


def step_from_frames() -> int | None:
    """Return the value of the user's variable that counts steps, by its name, from the innermost function outwards."""
    for namespace in user_namespaces():
        for name in _STEP_NAMES:
            if type(namespace.get(name)) is int:
                return int(namespace[name])
    return None
