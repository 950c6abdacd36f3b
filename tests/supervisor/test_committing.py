"""Commits of checkpoints, whichever process of a supervisor and its standbys carries them out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshbook.errors import CheckpointError
from meshbook.ids import CallId
from meshbook.supervisor.committing import CheckpointCommitter
from meshbook.supervisor.effects import CommitCheckpoint
from meshbook.wire import checkpoint_folders
from meshbook.wire.loop import Loop
from meshbook.wire.messages import CheckpointManifest, SaveCheckpoint
from tests.budget import WAIT_S
from tests.scripts import run_python

# A loop with a standby commits one save. It is killed under the folder's lock, when it has another standby, which ends
# when it has delivered the end of the commit, or after so many seconds.
PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from meshbook.supervisor.committing import CheckpointCommitter
from meshbook.supervisor.effects import CommitCheckpoint
from meshbook.wire import checkpoint_folders
from meshbook.wire.messages import CheckpointManifest, SaveCheckpoint
from meshbook.wire.replicated_loop import ReplicatedLoop

first, path = os.getpid(), Path(sys.argv[1])
save = SaveCheckpoint(call="a-1", ranks=(0,), path=str(path), names=("state",), step=800)
manifest = CheckpointManifest(
    format=checkpoint_folders.FORMAT, step=800, generation=1, world_size=1, axes={"rank": 1}, saved_at=1.0, torch="2",
    names=(), files=(),
)
loop = ReplicatedLoop()
wake = os.pipe()
sync_folder = checkpoint_folders._sync_folder

def sync_in_first(folder):
    if os.getpid() == first:  # under the folder's lock
        os.write(wake[1], b"x")
        threading.Event().wait()
    sync_folder(folder)

def fork_standby_and_end():
    os.read(wake[0], 1)
    loop.act(lambda: os.kill(first, signal.SIGKILL))  # when there is a standby that has been forked in the commit

def commit_ended(call, folder, manifest, error):
    print("ended", call, Path(folder).name, error, flush=True)
    end()

def end():
    if os.getpid() != first:
        loop.stop_replicating()
        os._exit(0)

checkpoint_folders._sync_folder = sync_in_first
checkpoint_folders.saving_folder(path, "a-1").mkdir()
committer = CheckpointCommitter(loop, commit_ended, lambda effects: None)
loop.on_takeover = lambda ended_at: committer.take_over()
loop.watch_fd(wake[0], fork_standby_and_end)
loop.call_later(0.01, lambda: committer.submit(CommitCheckpoint(save, manifest)))
loop.call_later(float(sys.argv[2]), end, logged=False)
loop.replicate()
loop.run()
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_standby_that_was_forked_while_the_folder_was_locked_commits_after_the_kill(tmp_path: Path) -> None:
    assert run_python(PROGRAM, str(tmp_path), str(WAIT_S)).stdout == "ended a-1 step-00000800 \n"
    assert os.listdir(tmp_path) == ["step-00000800"]


def test_a_save_that_is_submitted_as_the_supervisor_ends_is_committed_once_by_the_standby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has failed and was reported so must not become a checkpoint afterwards."""
    tried: list[Path] = []

    def fail(folder: Path, manifest: CheckpointManifest, *, overwrite: bool) -> Path:
        tried.append(folder)
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(checkpoint_folders, "commit", fail)
    save = SaveCheckpoint(call=CallId("a-1"), ranks=(0,), path=str(tmp_path), names=("state",), step=800)
    manifest = CheckpointManifest(
        format=checkpoint_folders.FORMAT, step=800, generation=1, world_size=1, axes={"rank": 1}, saved_at=1.0,
        torch="2", names=(), files=(),
    )  # fmt: skip
    loop, held, ended = Loop(), list[Callable[[], object]](), list[str]()
    monkeypatch.setattr(loop, "act", lambda action, **_: held.append(action))
    committer = CheckpointCommitter(loop, lambda call, *_: ended.append(call) or [], lambda effects: None)  # type: ignore[func-returns-value]
    committer.submit(CommitCheckpoint(save, manifest))
    committer.take_over()
    for action in held:
        action()
    committer.close()
    assert (len(tried), ended) == (1, ["a-1"])
