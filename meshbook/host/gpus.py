"""What the NVIDIA driver says of this host's GPUs, by NVML.

On a thread of its own: a GPU that has fallen off the bus can make it wait. Without a driver there is nothing to say,
and that is no error.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any, NamedTuple

_SAMPLE_S = 1.0


class GpuSeen(NamedTuple):
    """One device, all processes on it together."""

    used_bytes: int
    total_bytes: int
    utilisation: float | None  # 0..100


class GpuSampler:
    """Samples the GPUs that somebody wants to know about, once per second; the thread starts with the first of them."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        self._seen: dict[str, GpuSeen] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def want(self, uuid: str) -> None:
        """From now on sample this GPU. Does not wait."""
        if uuid not in self._wanted:
            self._wanted = {*self._wanted, uuid}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshbook-gpus", daemon=True)
            self._thread.start()

    def seen(self, uuid: str) -> GpuSeen | None:
        """What was seen last; None while nothing is known."""
        return self._seen.get(uuid)

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        nvml = Nvml.load()
        if nvml is None:
            return
        while not self._stop.wait(_SAMPLE_S if self._seen else 0.0):
            self._seen = {uuid: seen for uuid in self._wanted if (seen := nvml.look(uuid)) is not None}
            if not self._seen and self._stop.wait(_SAMPLE_S):  # the driver does not know them; it may yet
                return


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The four functions of libnvidia-ml that are needed here."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, ctypes.c_void_p] = {}

    @classmethod
    def load(cls) -> Nvml | None:
        """None: this machine has no NVIDIA driver."""
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                return cls(library)
        return None

    def look(self, uuid: str) -> GpuSeen | None:
        handle = self._handles.get(uuid)
        if handle is None:
            handle = ctypes.c_void_p()
            named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            if self._library.nvmlDeviceGetHandleByUUID(named.encode(), ctypes.byref(handle)) != 0:
                return None
            self._handles[uuid] = handle
        memory, utilization = _Memory(), _Utilization()
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        told = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0
        return GpuSeen(int(memory.used), int(memory.total), float(utilization.gpu) if told else None)
