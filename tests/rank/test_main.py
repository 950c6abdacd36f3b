"""What a rank's process is made ready with before user code runs in it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context as context
from types import SimpleNamespace

import pytest

from meshbook.rank.main import fork_by_default


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
