"""What the NVIDIA driver reports of this host's GPUs, by NVML.

Runs on a thread of its own, because a GPU that has fallen off the bus can block it. Without a driver there is no data,
which is not an error. NVML is accessed by NVIDIA's own bindings, nvidia-ml-py.
"""

from __future__ import annotations

import itertools
import os
import pwd
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_SAMPLE_S = 1.0
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # its number: that of a process in no container (Linux, PROC_PID_INIT_INO)


class GpuSample(NamedTuple):
    """One device, all its processes together."""

    used_bytes: int
    total_bytes: int
    utilisation: float | None  # 0..100


class GpuSampler:
    """Samples the requested GPUs once per second; the first request starts the thread."""

    def __init__(self) -> None:
        self._uuids: set[str] = set()
        self._samples: dict[str, GpuSample] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, uuid: str) -> None:
        """Start to sample this GPU. Does not block."""
        if uuid not in self._uuids:
            self._uuids = {*self._uuids, uuid}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshbook-gpus", daemon=True)
            self._thread.start()

    def last_sample(self, uuid: str) -> GpuSample | None:
        """Return the last sample; None if there is none yet."""
        return self._samples.get(uuid)

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        nvml = Nvml.load()
        if nvml is None:
            return
        while not self._stop.wait(_SAMPLE_S if self._samples else 0.0):
            try:
                self._samples = {uuid: sample for uuid in self._uuids if (sample := nvml.sample(uuid)) is not None}
            except Exception:  # any error of a failing driver: then no GPU is known
                self._samples = {}
            if not self._samples and self._stop.wait(_SAMPLE_S):  # the driver does not know them yet; try again later
                return


class Nvml:
    """The part of NVIDIA's own bindings, `pynvml`, that is needed here."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}

    @classmethod
    def load(cls) -> Nvml | None:
        """Return the bindings; None if this machine has no NVIDIA driver."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # not installed, or no library, or a driver of another version
            return None
        return cls(pynvml)

    def sample(self, uuid: str) -> GpuSample | None:
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
                handle = self._handles[uuid] = self._library.nvmlDeviceGetHandleByUUID(named)
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        except self._library.NVMLError:
            return None
        try:
            utilization = float(self._library.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._library.NVMLError:  # a MIG device has none
            utilization = None
        return GpuSample(int(memory.used), int(memory.total), utilization)

    def name(self, uuid: str) -> str:
        return str(self._library.nvmlDeviceGetName(self._library.nvmlDeviceGetHandleByUUID(uuid)))

    def other_user(self, uuid: str) -> str:
        """Return who else computes on a device; "": nobody, or it is not known."""
        try:
            handle = self._library.nvmlDeviceGetHandleByUUID(uuid)
            pids = [process.pid for process in self._library.nvmlDeviceGetComputeRunningProcesses(handle)]
        except self._library.NVMLError:  # a device that is divided (MIG) does not say
            return ""
        return next((owner for pid in pids if (owner := _owner(pid))), "")

    def driver_version(self) -> str:
        return str(self._library.nvmlSystemGetDriverVersion())

    def count(self) -> int:
        """Return the number of devices that this process may use.

        It does not wake them, which takes seconds without the persistence daemon.
        """
        return int(self._library.nvmlDeviceGetCount())

    def uuids(self) -> list[str]:
        """Return the UUIDs of all devices, in the driver's order."""
        handles = [self._library.nvmlDeviceGetHandleByIndex(index) for index in range(self.count())]
        return [str(self._library.nvmlDeviceGetUUID(handle)) for handle in handles]


@dataclass(frozen=True)
class OthersGpus:
    """GPUs that somebody else computes on, which ranks leave alone.

    Attributes:
        free: UUIDs of the rest, as CUDA_VISIBLE_DEVICES takes them.
        users: who is on each of theirs: "alice", "another user".
    """

    free: tuple[str, ...]
    users: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(sorted(set(self.users)))
        return f"{len(self.users)} GPU{'s' if len(self.users) != 1 else ''} busy ({names})"


def find_others_gpus(nvml: Nvml | None = None) -> OthersGpus | None:
    """Return which GPUs of this machine somebody else uses; None: none, or nobody can tell. Blocks for a moment.

    What CUDA_VISIBLE_DEVICES says is taken at its word: whoever sets it, a person or Slurm, has chosen.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ or (not os.path.exists("/dev/nvidiactl") and nvml is None):
        return None
    nvml = nvml or Nvml.load()
    if nvml is None:
        return None
    try:
        users = {uuid: nvml.other_user(uuid) for uuid in nvml.uuids()}
    except Exception:  # a GPU that has fallen off the bus
        return None
    busy = tuple(user for user in users.values() if user)
    return OthersGpus(tuple(uuid for uuid, user in users.items() if not user), busy) if busy else None


def count_free_gpus() -> int:
    """Return the number of GPUs that ranks of this process would see and nobody else uses. Blocks for a moment."""
    others = find_others_gpus()
    return count_gpus() if others is None else len(others.free)


def _owner(pid: int) -> str:
    """Return who else runs a process that computes on a GPU; "": this user, or it is not known.

    Within a container the driver's numbers of processes are another namespace's and say nothing.
    """
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        return ""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended; or the system hides it (hidepid) because it is another user's
        return "another user" if _is_alive(pid) else ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    uid = int(fields["Uid"].split()[0])
    # The MPS server is there to have GPUs shared.
    if uid == os.getuid() or fields["Name"].strip().startswith("nvidia-cuda-mps"):
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# What hides GPUs from ROCm, in the order in which it is applied: the first that is set decides here.
_AMD_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def count_gpus(
    proc: Path = Path("/proc/driver/nvidia/gpus"), kfd: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> int:
    """Return the number of GPUs that ranks of this process would see, NVIDIA's or else AMD's; 0 without a driver.

    CUDA_VISIBLE_DEVICES is applied as CUDA applies it, or ROCm, for which "cuda" is torch's name too. Takes
    milliseconds, and does not initialise CUDA.

    Args:
        proc: NVIDIA's folder with one folder per GPU.
        kfd: AMD's folder with one folder per processor, of which CPUs have the GPU number 0.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        num_listed = len(os.listdir(proc))
    except OSError:
        num_listed = 0
    if not num_listed and not os.path.exists("/dev/dxg"):  # in WSL the driver is Windows' own
        visible = next((os.environ[name] for name in _AMD_VISIBLE if name in os.environ), None)
        return num_visible(_count_amd(kfd), lambda: [], visible)
    nvml = Nvml.load()
    if nvml is None:
        return num_visible(num_listed, lambda: [], visible)
    try:
        return num_visible(nvml.count(), nvml.uuids, visible)
    except Exception:  # a GPU that has fallen off the bus
        return num_visible(num_listed, lambda: [], visible)


def _count_amd(kfd: Path) -> int:
    """Return the number of AMD GPUs that this process may use."""
    count = 0
    for path in kfd.glob("*/gpu_id"):
        try:
            count += path.read_text().strip() not in ("", "0")
        except OSError:  # a container without this device
            continue
    return count


def num_visible(num_gpus: int, uuids: Callable[[], list[str]], visible: str | None) -> int:
    """Return how many of a machine's GPUs CUDA shows a process.

    Args:
        uuids: returns those of all GPUs; called only if needed. An empty list: they are not known.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set. Indices or prefixes of UUIDs; entries after the first that
            names no GPU are ignored, and no GPU is visible if one is named twice.
    """
    if visible is None:
        return num_gpus
    names = [name.strip() for name in visible.split(",")]
    if names[0].startswith("MIG-"):
        return 1  # CUDA shows a process one MIG device, whatever else is listed
    if names[0].startswith("GPU-"):
        known = uuids()
        if not known:
            return len([name for name in names if name.startswith("GPU-")])
        found = [[index for index, uuid in enumerate(known) if uuid.startswith(name)] for name in names]
        chosen = [matching[0] for matching in _valid_prefix(found, lambda matching: len(matching) == 1)]
    else:
        chosen = [int(name) for name in _valid_prefix(names, lambda name: name.isdecimal() and int(name) < num_gpus)]
    return len(chosen) if len(set(chosen)) == len(chosen) else 0


def _valid_prefix(items: list[T], is_valid: Callable[[T], bool]) -> list[T]:
    return list(itertools.takewhile(is_valid, items))
