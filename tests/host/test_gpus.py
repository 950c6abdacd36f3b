"""What NVML says, by a library that answers like it: there is no GPU here."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshbook.host.gpus import GpuSampler, GpuSeen, Nvml

UUID = "8f1c2f4e-0000-1111-2222-333344445555"


class FakeLibrary:
    """Two of the driver's habits: it knows devices by their UUIDs only, and may not know how busy one is."""

    def __init__(self, *, tells_utilization: bool = True) -> None:
        self.asked: list[bytes] = []
        self._tells_utilization = tells_utilization

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked.append(uuid)
        handle._obj.value = 7
        return 0 if uuid == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, 3 << 30
        return 0 if handle.value == 7 else 2

    def nvmlDeviceGetUtilizationRates(self, handle: Any, utilization: Any) -> int:
        utilization._obj.gpu = 93
        return 0 if self._tells_utilization else 3


def test_a_gpu_is_found_by_its_uuid_once_and_asked_each_time() -> None:
    library = FakeLibrary()
    nvml = Nvml(library)
    assert [nvml.look(UUID) for _ in range(2)] == [GpuSeen(3 << 30, 80 << 30, 93.0)] * 2
    assert library.asked == [f"GPU-{UUID}".encode()]


def test_what_the_driver_does_not_say_is_none() -> None:
    assert Nvml(FakeLibrary(tells_utilization=False)).look(UUID) == GpuSeen(3 << 30, 80 << 30, None)
    assert Nvml(FakeLibrary()).look("MIG-other") is None


def test_a_sampler_sees_what_is_wanted_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "load", lambda: Nvml(FakeLibrary()))
    sampler = GpuSampler()
    assert sampler.seen(UUID) is None
    sampler.want(UUID)
    deadline = time.monotonic() + 30
    while sampler.seen(UUID) is None and time.monotonic() < deadline:
        pass
    assert sampler.seen(UUID) == GpuSeen(3 << 30, 80 << 30, 93.0)
    sampler.close()
    assert sampler._thread is not None
    sampler._thread.join(30)
    assert not sampler._thread.is_alive()


def test_without_a_driver_there_is_nothing_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "load", lambda: None)
    sampler = GpuSampler()
    sampler.want(UUID)
    assert sampler._thread is not None
    sampler._thread.join(30)
    assert (sampler._thread.is_alive(), sampler.seen(UUID)) == (False, None)
    sampler.close()


@pytest.mark.gpu
def test_on_a_gpu_torch_and_the_driver_tell_of_the_same_device() -> None:
    import torch

    from meshbook.rank.probes import GpuProbe

    probe = GpuProbe()
    held = torch.ones(1 << 20, device="cuda:0")
    told = probe.measure("cuda:0", moves=lambda: True)
    assert told is not None
    assert (told.allocated_bytes or 0) >= held.nbytes
    nvml = Nvml.load()
    assert nvml is not None
    seen = nvml.look(told.uuid)
    assert seen is not None
    assert seen.used_bytes >= held.nbytes
