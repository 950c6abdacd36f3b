"""What a rank has run out of, in words."""

from __future__ import annotations

import errno
import os
import tempfile
from types import SimpleNamespace

import pytest

from meshbook.rank.cells.tracebacks import to_rank_error
from meshbook.rank.limits import explain_fd_shortage, explain_full_folder

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
RENDERER = SimpleNamespace(render=lambda error: [str(error)])


def fill(monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    free = {True: 1, False: 50}
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=free[path == full], f_blocks=64, f_frsize=1 << 20)
    )


def test_an_error_for_want_of_space_names_the_shared_memory_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, "/dev/shm")
    (note,) = to_rank_error(NO_SPACE, RENDERER).notes
    assert note.startswith("/dev/shm is full (1 of 64 MiB are free)")
    assert "DataLoader workers" in note


def test_an_error_for_want_of_space_names_the_temporary_folder_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tempfile.gettempdir())
    assert f"{tempfile.gettempdir()} is full" in (explain_full_folder(str(NO_SPACE)) or "")


def test_other_errors_and_folders_with_space_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, "nowhere")
    assert explain_full_folder(str(NO_SPACE)) is None
    fill(monkeypatch, "/dev/shm")
    assert explain_full_folder("out of memory") is None
    assert explain_fd_shortage(NO_SPACE) is None


def test_a_lack_of_descriptors_is_told_with_the_limit_whatever_library_says_it() -> None:
    reported = explain_fd_shortage(RuntimeError("[enforce fail] pipe: Too many open files"))
    assert reported is not None
    assert reported.errno == errno.EMFILE
    assert "no file descriptors left (its limit is" in str(reported)
