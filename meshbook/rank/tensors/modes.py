"""What torch is told once for a whole process, such as `torch.use_deterministic_algorithms(True)`: told here, it holds
for what this process has the ranks do.

Only what is not as torch begins is carried over: of everything else a rank's own cells decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshbook.rank.tensors.calls import FUNCTIONS

_C: Any = torch._C

# Name and value of each that is not as torch begins, in the table's order: hashable, and plain data.
Modes = tuple[tuple[str, Any], ...]


class Mode(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]
    usual: Any  # as torch begins


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


# Where torch's newer names for the precision of float32 lie.
_PRECISIONS = tuple((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn"))


def _precision() -> tuple[Any, ...]:
    """By torch's older names; or, where somebody has used the newer ones, which exclude each other, by those."""
    try:
        return _C._get_float32_matmul_precision(), _C._get_cudnn_allow_tf32()
    except RuntimeError:
        return tuple(_C._get_fp32_precision_getter(*place) for place in _PRECISIONS)


def _set_precision(value: tuple[Any, ...]) -> None:
    if len(value) == 2:
        _C._set_float32_matmul_precision(value[0])
        _C._set_cudnn_allow_tf32(value[1])
        return
    for place, precision in zip(_PRECISIONS, value, strict=True):
        _C._set_fp32_precision_setter(*place, precision)


def _set_default_dtype(name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))


MODES: dict[str, Mode] = {
    "use_deterministic_algorithms": Mode(
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        _set_deterministic,
        (False, False),
    ),
    "default_dtype": Mode(lambda: str(torch.get_default_dtype()).removeprefix("torch."), _set_default_dtype, "float32"),
    "float32 precision": Mode(_precision, _set_precision, ("highest", True)),
    "anomaly": Mode(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    "backends.mkldnn.enabled": Mode(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, True),
    "backends.cudnn.enabled": Mode(_C._get_cudnn_enabled, _C._set_cudnn_enabled, True),
    "backends.cudnn.benchmark": Mode(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark, False),
    "backends.cudnn.deterministic": Mode(_C._get_cudnn_deterministic, _C._set_cudnn_deterministic, False),
    "sdp flash": Mode(_C._get_flash_sdp_enabled, _C._set_sdp_use_flash, True),
    "sdp memory efficient": Mode(_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient, True),
    "sdp math": Mode(_C._get_math_sdp_enabled, _C._set_sdp_use_math, True),
    "sdp cudnn": Mode(_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn, True),
}


def now() -> Modes:
    """Those of this process that are not as torch begins."""
    return tuple((name, value) for name, mode in MODES.items() if (value := mode.read()) != mode.usual)


class Applied:
    """Modes of a controller, for as long as a rank works for it. Main thread."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}  # the rank's own, of those that are set

    def set(self, modes: Modes) -> None:
        """These and no others."""
        wanted = dict(modes)
        for name in [name for name in self._before if name not in wanted]:
            MODES[name].write(self._before.pop(name))
        for name, value in wanted.items():
            mode = MODES[name]
            self._before.setdefault(name, mode.read())
            mode.write(value)

    def put_back(self) -> None:
        self.set(())


@contextlib.contextmanager
def applied(modes: Modes) -> Iterator[None]:
    """These, for what is done inside."""
    applied = Applied()
    try:
        applied.set(modes)
        yield
    finally:
        applied.put_back()


class Batches:
    """Modes of an engine, from batch to batch: an operation sets them, and cells in between do not see them."""

    def __init__(self) -> None:
        self.modes: Modes = ()
        self._applied = Applied()

    def begin(self) -> None:
        if self.modes:
            self._applied.set(self.modes)

    def set(self, modes: Modes) -> None:
        self.modes = modes
        self._applied.set(modes)

    def end(self) -> None:
        self._applied.put_back()


# Of the engine whose operations run now: a rank has one thread that runs them.
current: Batches | None = None


def set_modes(modes: Modes) -> None:
    """For the operations after this one."""
    if current is not None:
        current.set(modes)


FUNCTIONS["set_modes"] = set_modes
