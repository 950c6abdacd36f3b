"""Process-wide modes of torch, such as `torch.use_deterministic_algorithms(True)`.

Set in the controller's process, they also apply to what it runs on the ranks. Only values other than torch's default
are transferred; for all others a rank's own cells decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshbook.rank.tensors.operators import FUNCTIONS

_C: Any = torch._C

# Name and value of each mode that differs from torch's default, in the order of `MODES`: hashable plain data.
Modes = tuple[tuple[str, Any], ...]


class TorchMode(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]
    default: Any  # torch's default


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


# Keys of torch's newer settings for float32 precision.
_FP32_PRECISION_KEYS = tuple((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn"))


def _get_precision() -> tuple[Any, ...]:
    """Return the precision by torch's older settings, or by the newer ones if in use; they exclude each other."""
    try:
        return _C._get_float32_matmul_precision(), _C._get_cudnn_allow_tf32()
    except RuntimeError:
        return tuple(_C._get_fp32_precision_getter(*key) for key in _FP32_PRECISION_KEYS)


def _set_precision(value: tuple[Any, ...]) -> None:
    if len(value) == 2:
        _C._set_float32_matmul_precision(value[0])
        _C._set_cudnn_allow_tf32(value[1])
        return
    for key, precision in zip(_FP32_PRECISION_KEYS, value, strict=True):
        _C._set_fp32_precision_setter(*key, precision)


def _set_default_dtype(name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))


MODES: dict[str, TorchMode] = {
    "use_deterministic_algorithms": TorchMode(
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        _set_deterministic,
        (False, False),
    ),
    "default_dtype": TorchMode(
        lambda: str(torch.get_default_dtype()).removeprefix("torch."), _set_default_dtype, "float32"
    ),
    "float32 precision": TorchMode(_get_precision, _set_precision, ("highest", True)),
    "anomaly": TorchMode(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    "backends.mkldnn.enabled": TorchMode(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, True),
    "backends.cudnn.enabled": TorchMode(_C._get_cudnn_enabled, _C._set_cudnn_enabled, True),
    "backends.cudnn.benchmark": TorchMode(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark, False),
    "backends.cudnn.deterministic": TorchMode(_C._get_cudnn_deterministic, _C._set_cudnn_deterministic, False),
    "sdp flash": TorchMode(_C._get_flash_sdp_enabled, _C._set_sdp_use_flash, True),
    "sdp memory efficient": TorchMode(_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient, True),
    "sdp math": TorchMode(_C._get_math_sdp_enabled, _C._set_sdp_use_math, True),
    "sdp cudnn": TorchMode(_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn, True),
}


def non_default_modes() -> Modes:
    """Return the modes of this process that differ from torch's default."""
    return tuple((name, value) for name, mode in MODES.items() if (value := mode.read()) != mode.default)


class AppliedModes:
    """A controller's modes, applied while a rank works for it. Main thread only."""

    def __init__(self) -> None:
        self._own_values: dict[str, Any] = {}  # the rank's own values of the modes that are set

    def set(self, modes: Modes) -> None:
        """Apply these modes and no others."""
        wanted = dict(modes)
        for name in [name for name in self._own_values if name not in wanted]:
            MODES[name].write(self._own_values.pop(name))
        for name, value in wanted.items():
            mode = MODES[name]
            self._own_values.setdefault(name, mode.read())
            mode.write(value)

    def restore(self) -> None:
        self.set(())


@contextlib.contextmanager
def apply_modes(modes: Modes) -> Iterator[None]:
    """Apply these modes in this context."""
    applied_modes = AppliedModes()
    try:
        applied_modes.set(modes)
        yield
    finally:
        applied_modes.restore()


class BatchModes:
    """Modes of an engine across batches: an operation sets them, and cells in between are not affected."""

    def __init__(self) -> None:
        self.modes: Modes = ()
        self._applied = AppliedModes()

    def begin(self) -> None:
        if self.modes:
            self._applied.set(self.modes)

    def set(self, modes: Modes) -> None:
        self.modes = modes
        self._applied.set(modes)

    def end(self) -> None:
        self._applied.restore()


# Modes of the engine whose operations run now: a rank has one thread that runs them.
current_batch_modes: BatchModes | None = None


def set_modes(modes: Modes) -> None:
    """Set the modes for subsequent operations."""
    if current_batch_modes is not None:
        current_batch_modes.set(modes)


FUNCTIONS["set_modes"] = set_modes
