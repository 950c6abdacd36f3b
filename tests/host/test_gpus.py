"""What NVML says, by a library that answers like it: there is no GPU here."""

from __future__ import annotations

import os
import pwd
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.host import gpus
from meshbook.host.gpus import GpuSample, GpuSampler, Nvml, count_gpus, find_others_gpus, num_visible
from tests.budget import WAIT_S

UUID = "8f1c2f4e-0000-1111-2222-333344445555"


class FakeLibrary:
    """Two of the driver's habits: it knows devices by their UUIDs only, and may not know how busy one is."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, tells_utilization: bool = True) -> None:
        self.asked: list[str] = []
        self._tells_utilization = tells_utilization

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self.asked.append(uuid)
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("not found")
        return 7

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30, used=3 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if not self._tells_utilization:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=93)


def test_a_gpu_is_found_by_its_uuid_once_and_asked_each_time() -> None:
    library = FakeLibrary()
    nvml = Nvml(library)
    assert [nvml.sample(UUID) for _ in range(2)] == [GpuSample(3 << 30, 80 << 30, 93.0)] * 2
    assert library.asked == [f"GPU-{UUID}"]


def test_what_the_driver_does_not_say_is_none() -> None:
    assert Nvml(FakeLibrary(tells_utilization=False)).sample(UUID) == GpuSample(3 << 30, 80 << 30, None)
    assert Nvml(FakeLibrary()).sample("MIG-other") is None


class SharedMachine(FakeLibrary):
    """Four GPUs, and the pids of what computes on each."""

    def __init__(self, *pids: list[int]) -> None:
        super().__init__()
        self._pids = dict(zip("abcd", pids, strict=True))

    def nvmlDeviceGetCount(self) -> int:
        return len(self._pids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return "abcd"[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return uuid.removeprefix("GPU-")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if handle == "d":
            raise self.NVMLError("not supported")  # as of a device that is divided
        return [SimpleNamespace(pid=pid) for pid in self._pids[handle]]


def test_gpus_on_which_others_compute_are_told_from_those_of_ones_own_and_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    owners = {10: "", 11: "alice"}  # as `_owner` says
    monkeypatch.setattr(gpus, "_owner", owners.__getitem__)
    others = find_others_gpus(Nvml(SharedMachine([10], [10, 11], [], [11])))
    assert others is not None
    assert others.free == ("GPU-a", "GPU-c", "GPU-d")
    assert str(others) == "1 GPU busy (alice)"
    assert find_others_gpus(Nvml(SharedMachine([10], [], [], []))) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # somebody has chosen
    assert find_others_gpus(Nvml(SharedMachine([10], [11], [], []))) is None


def test_a_process_of_another_user_is_his_and_ones_own_or_an_unknown_one_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getuid()
    monkeypatch.setattr(gpus, "_FIRST_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    assert gpus._owner(os.getpid()) == ""
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert gpus._owner(os.getpid()) == pwd.getpwuid(own).pw_name
    gone = 2**22 + 1  # beyond any pid
    assert gpus._owner(gone) == ""
    monkeypatch.setattr(gpus, "_FIRST_PID_NAMESPACE", 0)
    assert gpus._owner(os.getpid()) == ""  # a container: the driver's numbers are those of other processes


def test_a_sampler_sees_what_is_wanted_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "load", lambda: Nvml(FakeLibrary()))
    sampler = GpuSampler()
    assert sampler.last_sample(UUID) is None
    sampler.add(UUID)
    for _ in range(3000):
        if sampler.last_sample(UUID) is not None:
            break
        threading.Event().wait(0.01)
    assert sampler.last_sample(UUID) == GpuSample(3 << 30, 80 << 30, 93.0)
    sampler.close()
    assert sampler._thread is not None
    sampler._thread.join(WAIT_S)
    assert not sampler._thread.is_alive()


def test_without_a_driver_there_is_nothing_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "load", lambda: None)
    sampler = GpuSampler()
    sampler.add(UUID)
    assert sampler._thread is not None
    sampler._thread.join(WAIT_S)
    assert (sampler._thread.is_alive(), sampler.last_sample(UUID)) == (False, None)
    sampler.close()


UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("0, 2", 2),
        ("-1", 0),
        ("1,-1,2", 1),
        ("0,9,1", 1),
        ("0,0", 0),
        ("all", 0),
        ("GPU-aa11", 1),
        ("GPU-bb,GPU-cc44", 2),
        ("GPU-aa", 0),
        ("GPU-bb33,GPU-zz", 1),
        ("GPU-bb33,GPU-bb", 0),
        ("MIG-aa,MIG-bb", 1),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(visible: str | None, seen: int) -> None:
    assert num_visible(4, lambda: UUIDS, visible) == seen


def test_uuids_that_nobody_knows_are_taken_at_their_word() -> None:
    assert num_visible(0, lambda: [], "GPU-aa11,GPU-bb33") == 2


def test_without_the_drivers_folder_there_is_no_gpu_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nvml, "load", lambda: 1 / 0)
    assert count_gpus(tmp_path / "none", tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": ""}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-17"}, 1),
    ],
)
def test_gpus_of_amd_are_counted_where_there_are_none_of_nvidia(
    environment: dict[str, str], seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for node, gpu_id in enumerate(("0", "0", "51032", "4711")):  # two CPUs and two GPUs
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(f"{gpu_id}\n")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "gpu_id").mkdir()  # one that cannot be read
    assert count_gpus(tmp_path / "none", tmp_path) == seen


def test_a_driver_that_cannot_be_asked_still_lists_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Nvml, "load", lambda: None)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert count_gpus(tmp_path) == 2


@pytest.mark.gpu
def test_on_a_gpu_torch_and_the_driver_tell_of_the_same_device() -> None:
    import torch

    from meshbook.rank.probes import GpuProbe

    probe = GpuProbe()
    held = torch.ones(1 << 20, device="cuda:0")
    reported = probe.measure("cuda:0", is_progressing=lambda: True)
    assert reported is not None
    assert (reported.allocated_bytes or 0) >= held.nbytes
    nvml = Nvml.load()
    assert nvml is not None
    seen = nvml.sample(reported.uuid)
    assert seen is not None
    assert seen.used_bytes >= held.nbytes
