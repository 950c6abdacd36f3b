"""Which classes of actors get processes with torch, where the import would have to be waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from meshbook.actor import Actor, endpoint
from meshbook.actors import proc_backends
from meshbook.actors.procs import this_host
from meshbook.actors.torch_detection import needs_torch

WAIT_S = 20

CELL = """
def helper(): return torch.ones(1)
def harmless(): return 1
class Model(torch.nn.Module): pass

class Idle(Actor):
    @endpoint
    def nothing(self): return harmless()

class Late(Actor):
    @endpoint
    def late(self):
        import torch as mine
        return mine

class Names(Actor):
    @endpoint
    def step(self): return [torch.ones(n) for n in range(3)]

class Calls(Actor):
    @endpoint
    async def step(self): return helper()

class Makes(Actor):
    def __init__(self): self.model = Model()

class Imports(Actor):
    def __init__(self):
        import torch.nn as nn

class Takes(Actor):
    @endpoint
    def score(self, answers: list[torch.Tensor]): return answers[0].sum()

class Child(Names): pass
"""


def test_a_class_that_names_torch_itself_or_through_what_it_calls_needs_it() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "Actor": Actor, "endpoint": endpoint, "torch": torch}
    exec(CELL, names)
    needs = {name for name in names if isinstance(names[name], type) and needs_torch(names[name], (), {})}
    assert needs >= {"Names", "Calls", "Makes", "Imports", "Takes", "Child"}
    assert not needs & {"Idle", "Late"}
    assert needs_torch(names["Idle"], (torch.ones(1),), {})
    assert needs_torch(names["Idle"], (), {"options": {"dtype": torch.float32}})
    assert not needs_torch(names["Idle"], (1, "x"), {"options": {"lr": 0.1}})


def test_a_class_of_a_module_counts_as_one_that_does() -> None:
    assert needs_torch(Actor, (), {})


def test_what_is_spawned_decides_also_when_it_is_said_late(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "Actor": Actor, "endpoint": endpoint}
    exec("class Idle(Actor):\n @endpoint\n def loaded(self):\n  import sys\n  return 'torch' in sys.modules", names)
    imports, stopped, go = threading.Event(), threading.Event(), threading.Event()

    class Session:
        stop = stopped.set

    def warm(self: Any, torch: bool) -> Any:
        if not torch:
            return really(self, torch)
        imports.set()  # torch, for seconds; nobody has said yet what for
        go.wait(WAIT_S)
        return Session()

    really = proc_backends.SpawnedProcBackend._get_warm_session
    monkeypatch.setattr(proc_backends.SpawnedProcBackend, "_get_warm_session", warm)
    monkeypatch.setattr(proc_backends, "_FIRST_SPAWN_WAIT_S", 0.0)
    monkeypatch.setattr(proc_backends, "find_warm_mesh", lambda *, torch: None)
    procs = this_host().spawn_procs()
    try:
        assert imports.wait(WAIT_S)
        assert procs.spawn("idle", names["Idle"]).loaded.call_one().get(WAIT_S) is False
    finally:
        go.set()
        procs.stop().get(30)
    assert stopped.wait(WAIT_S)
