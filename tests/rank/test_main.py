"""What a rank's process is made ready with before user code runs in it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context as context
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshbook.rank.main import fork_by_default
from tests.budget import WAIT_S


def _as_in_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    default = context.DefaultContext(context._concrete_contexts["spawn"])  # type: ignore[attr-defined]
    monkeypatch.setattr(context, "_default_context", default)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["forkserver", "spawn", "fork"])
    monkeypatch.setattr(multiprocessing, "get_start_method", default.get_start_method)
    monkeypatch.setattr(multiprocessing, "set_start_method", default.set_start_method)


def test_workers_are_forked_where_python_has_another_default(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_in_3_14(monkeypatch)
    fork_by_default()
    assert multiprocessing.get_start_method(allow_none=True) is None
    multiprocessing.set_start_method("spawn")  # the user's own choice is still to be made
    assert multiprocessing.get_start_method() == "spawn"


def test_without_the_private_seam_the_start_method_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_in_3_14(monkeypatch)
    monkeypatch.setattr(context, "_default_context", SimpleNamespace())
    fork_by_default()
    assert multiprocessing.get_start_method() == "fork"


def test_where_python_forks_by_default_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["fork", "spawn"])
    monkeypatch.setattr(context, "_default_context", None)
    fork_by_default()


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("hang", ["__import__('time').sleep(1000)", "__import__('ctypes').PyDLL(None).sleep(1000)"])
def test_what_hangs_as_a_rank_ends_does_not_keep_its_process(hang: str) -> None:
    """`__del__` of a global and exit functions run in one place; PyDLL keeps the GIL."""
    source = f"""
import atexit
from unittest.mock import Mock
from meshbook.rank.main import _shut_down
atexit.register(lambda: {hang})
class Loud:
    def __del__(self): raise ValueError("no")
namespace = {{"loud": Loud()}}
atexit.register(namespace.clear)
_shut_down(Mock(), Mock(), Mock(), 0, 0.2)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    assert "ValueError: no" in done.stderr
    assert "Timeout" not in done.stderr
