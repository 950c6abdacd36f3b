"""Saves and restores of one rank without a mesh: what is said when they cannot be."""

from __future__ import annotations

import errno
import os
import pickle
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshbook.errors import CheckpointError
from meshbook.rank.checkpoints import writing
from meshbook.rank.checkpoints.rank_checkpoints import RankCheckpoints
from meshbook.wire import checkpoint_folders, messages
from meshbook.wire.messages import CheckpointManifest, CheckpointWritten
from tests.budget import WAIT_S


class OneRank:
    """A rank that saves and restores by itself.

    Attributes:
        names: what cells have bound.
        reports: what the rank says of its saves.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.names = path, dict[str, Any]()
        self.reports: queue.Queue[CheckpointWritten] = queue.Queue()
        self.checkpoints = RankCheckpoints(0, 1, "cpu", self.names, generation=lambda: 1, report=self.reports.put)

    def begin(self, call: str = "a-1", step: int = 1) -> None:
        """Copy what is bound."""
        command = messages.SaveCheckpoint(call, (0,), str(self.path), tuple(self.names), step)
        self.checkpoints.save(command)

    def save(self) -> Path:
        """Save what is bound, and return the folder."""
        self.begin()
        self.checkpoints.write_files("a-1")
        written = self.reports.get(timeout=WAIT_S)
        self.checkpoints.write_metadata("a-1")
        metadata = self.reports.get(timeout=WAIT_S)
        assert written.error == metadata.error == ""
        manifest = CheckpointManifest(
            format=checkpoint_folders.FORMAT, step=1, generation=1, world_size=1, axes={"rank": 1}, saved_at=1.0,
            torch=written.torch, names=written.names, files=(*written.files, *metadata.files),
        )  # fmt: skip
        folder = checkpoint_folders.saving_folder(str(self.path), "a-1")
        return checkpoint_folders.commit(folder, manifest, overwrite=False)

    def restore(self, folder: Path) -> None:
        self.checkpoints.restore(messages.RestoreCheckpoint("a-2", (0,), str(folder)))


@pytest.fixture
def rank(tmp_path: Path) -> OneRank:
    return OneRank(tmp_path)


def with_buffer(buffer: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("scale", buffer)
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(1, 4).expand(3, 4), r"x is expanded .*; put x.clone\(\) in its place"),
        (lambda: with_buffer(torch.zeros(1, 4).expand(3, 4)), r"x.scale is expanded"),
    ],
)
def test_an_expanded_tensor_is_said_before_anything_is_changed(
    rank: OneRank, make: Callable[[], Any], message: str
) -> None:
    rank.names |= {"first": torch.ones(3), "x": make(), "last": 1}
    folder = rank.save()
    rank.names |= {"first": torch.zeros(3), "last": 2}
    with pytest.raises(CheckpointError, match=rf"nothing was changed.\n  not to be restored: {message}"):
        rank.restore(folder)
    assert torch.equal(rank.names["first"], torch.zeros(3))
    assert rank.names["last"] == 2


def test_a_save_for_which_the_disk_has_no_space_says_what_to_do(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "write_part", fail)
    rank.names["x"] = torch.ones(3)
    rank.begin()
    rank.checkpoints.write_files("a-1")
    error = rank.reports.get(timeout=WAIT_S).error
    assert error == f"[Errno 28] No space left on device; free space in {rank.path}, or save to another path"


def test_what_ranks_leave_in_the_folder_for_rank_0_is_not_unpickled(rank: OneRank) -> None:
    rank.names["x"] = torch.ones(3)
    rank.begin()
    rank.checkpoints.write_files("a-1")
    assert rank.reports.get(timeout=WAIT_S).error == ""
    folder = checkpoint_folders.saving_folder(str(rank.path), "a-1")
    (folder / ".results-0").write_bytes(pickle.dumps([]))
    rank.checkpoints.write_metadata("a-1")
    assert "JSON" in rank.reports.get(timeout=WAIT_S).error


def test_a_rank_restores_what_it_has_saved(rank: OneRank) -> None:
    wanted = {"x": torch.arange(6.0).reshape(2, 3), "steps": 7, "model": torch.nn.Linear(2, 2)}
    rank.names |= wanted
    weight = wanted["model"].weight.detach().clone()
    folder = rank.save()
    rank.names |= {"x": torch.zeros(2, 3), "steps": 0, "model": torch.nn.Linear(2, 2)}
    rank.restore(folder)
    assert torch.equal(rank.names["x"], torch.arange(6.0).reshape(2, 3))
    assert rank.names["steps"] == 7
    assert torch.equal(rank.names["model"].weight, weight)


def test_a_save_does_not_wait_for_one_that_was_given_up_and_whose_disk_hangs(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, write, can_write = threading.Event(), writing.write_part, threading.Event()

    def hang(*arguments: Any) -> None:
        if not hanging.is_set():
            hanging.set()
            assert can_write.wait(WAIT_S)
        write(*arguments)

    monkeypatch.setattr(writing, "write_part", hang)
    rank.names["x"] = torch.ones(3)
    rank.begin()
    rank.checkpoints.write_files("a-1")
    assert hanging.wait(WAIT_S)
    rank.checkpoints.drop("a-1")
    second = threading.Thread(target=lambda: rank.begin("a-2", 2), daemon=True)
    second.start()
    second.join(WAIT_S)
    assert not second.is_alive()
    rank.checkpoints.write_files("a-2")
    assert rank.reports.get(timeout=WAIT_S).save == "a-2"
    can_write.set()
