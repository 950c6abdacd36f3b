"""Checkpoints' folders: what is listed, what a commit needs, what a crash may leave and the next save clears away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from meshbook.errors import CheckpointError
from meshbook.wire import checkpoint_folders as folders
from meshbook.wire.messages import CheckpointManifest, SavedFile, SavedName
from meshbook.wire.processes import ProcessIdentity, identify, is_on_other_host, is_running

DATA = b"weights of a model"


def save(path: Path, step: int | None = None, *, call: str = "a-1", at: float = 1.0, overwrite: bool = False) -> Path:
    """Save as the ranks and the supervisor do, with one small file."""
    folder = folders.begin(str(path), call, step, identify(os.getpid()), overwrite=overwrite)
    (folder / "__0_0.distcp").write_bytes(DATA)
    return folders.commit(folder, manifest(step, at), overwrite=overwrite)


def manifest(step: int | None = None, at: float = 1.0, **changes: object) -> CheckpointManifest:
    file = SavedFile("__0_0.distcp", len(DATA), f"{zlib.crc32(DATA):08x}")
    whole = CheckpointManifest(
        format=folders.FORMAT, step=step, generation=1, world_size=1, axes={"rank": 1}, saved_at=at, torch="2.13",
        names=(SavedName("model", "module"),), files=(file,),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def test_a_commit_names_the_folder_after_its_step(tmp_path: Path) -> None:
    assert save(tmp_path, 800).name == "step-00000800"
    assert sorted(os.listdir(tmp_path)) == ["step-00000800"]
    assert sorted(os.listdir(tmp_path / "step-00000800")) == ["__0_0.distcp", "meshbook.json"]


def test_saves_without_a_step_are_numbered(tmp_path: Path) -> None:
    assert [save(tmp_path, call=f"a-{number}").name for number in (1, 2)] == ["save-0001", "save-0002"]


def test_the_last_one_is_the_one_that_was_committed_last(tmp_path: Path) -> None:
    for at, step in enumerate((800, 900, 100)):
        save(tmp_path, step, at=at)
    assert [entry.manifest.step for entry in folders.list_checkpoints(tmp_path)] == [800, 900, 100]
    assert folders.find_checkpoint(tmp_path).manifest.step == 100
    assert folders.find_checkpoint(tmp_path, 800).folder.name == "step-00000800"
    assert folders.find_checkpoint(tmp_path / "step-00000900").manifest.step == 900


def test_the_last_one_is_the_one_that_was_committed_last_also_where_the_clock_went_back(tmp_path: Path) -> None:
    for step, at in ((800, 50.0), (900, 40.0), (100, 45.0)):
        save(tmp_path, step, at=at)
    save(tmp_path, 800, at=30.0, overwrite=True)
    assert [entry.manifest.step for entry in folders.list_checkpoints(tmp_path)] == [900, 100, 800]
    assert folders.find_checkpoint(tmp_path).manifest.saved_at == 30.0


def test_checkpoints_of_earlier_versions_come_first_by_their_clock(tmp_path: Path) -> None:
    for step, at in ((1, 60.0), (2, 70.0)):
        folder = save(tmp_path, step, at=at)
        (folder / folders.MANIFEST).write_bytes(msgspec.json.encode(manifest(step, at)))
    save(tmp_path, 3, at=50.0)
    assert [entry.manifest.step for entry in folders.list_checkpoints(tmp_path)] == [1, 2, 3]


def test_a_commit_that_is_done_again_comes_to_the_same(tmp_path: Path) -> None:
    folder = save(tmp_path, 800)
    again = folders.commit(folders.saving_folder(str(tmp_path), "a-1"), manifest(800), overwrite=False)
    assert again == folder


def test_a_commit_that_was_cut_off_after_the_rename_is_finished_when_it_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    def kill(folder: Path) -> None:
        if folder == tmp_path:
            raise Killed

    monkeypatch.setattr(folders, "_sync_folder", kill)
    with pytest.raises(Killed):
        save(tmp_path, 800)
    synced: list[Path] = []
    monkeypatch.setattr(folders, "_sync_folder", synced.append)
    folder = folders.commit(folders.saving_folder(str(tmp_path), "a-1"), manifest(800), overwrite=False)
    assert synced == [tmp_path]
    assert sorted(os.listdir(folder)) == ["__0_0.distcp", "meshbook.json"]


@pytest.mark.parametrize("name", ["best", "step-00000800 (copy)", ".replaced-step-00000800-7"])
def test_a_copy_of_a_checkpoint_is_read_under_any_name(tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(save(tmp_path, 800), tmp_path / name)
    assert folders.find_checkpoint(copy).folder == copy
    assert folders.find_checkpoint(copy, 800).manifest.step == 800


def test_a_save_that_was_cut_off_before_its_rename_is_no_checkpoint(tmp_path: Path) -> None:
    cut_off = shutil.copytree(save(tmp_path, 800), folders.saving_folder(str(tmp_path), "a-2"))
    with pytest.raises(CheckpointError, match="what is left of a save that was not committed"):
        folders.find_checkpoint(cut_off)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 800)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; it has steps 800"):
        folders.find_checkpoint(tmp_path, 7)


def test_what_is_being_saved_is_never_listed(tmp_path: Path) -> None:
    folders.begin(str(tmp_path), "a-1", 1, identify(os.getpid()), overwrite=False)
    assert folders.list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="has not been committed"):
        folders.find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "match"),
    [("nothing", "No such file"), ("file", "Not a directory"), ("empty", "no folder step-"), ("dcp", "one of torch's")],
)
def test_a_folder_that_is_none_is_an_error_that_says_what_it_is(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=match):
        folders.find_checkpoint(tmp_path / name)


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = save(tmp_path, 800)
    (folder / folders.MANIFEST).write_bytes(b'{"format": 7, "something": "else"}')
    with pytest.raises(CheckpointError, match="of format 7, and this Meshbook reads format 1"):
        folders.find_checkpoint(tmp_path)


def test_a_manifest_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 800)
    (folder / folders.MANIFEST).write_bytes(b'{"format": 1, "step"')
    with pytest.raises(CheckpointError, match="cannot be read"):
        folders.find_checkpoint(tmp_path)


def damage(folder: Path) -> None:
    (folder / folders.MANIFEST).write_bytes(b'{"format": 7}')


def test_a_checkpoint_that_cannot_be_read_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    damage(save(tmp_path, 700))
    good = save(tmp_path, 800, call="a-2", at=2.0)
    entries, problems = folders.scan(tmp_path)
    assert [entry.folder for entry in entries] == [good]
    assert [folder.name for folder in problems] == ["step-00000700"]
    assert folders.find_checkpoint(tmp_path).folder == folders.find_checkpoint(tmp_path, 800).folder == good
    with pytest.raises(CheckpointError, match="of format 7"):
        folders.find_checkpoint(tmp_path, 700)


def test_an_older_checkpoint_is_not_taken_for_the_last_one_which_cannot_be_read(tmp_path: Path) -> None:
    save(tmp_path, 700)
    damage(save(tmp_path, 800, call="a-2", at=2.0))
    with pytest.raises(CheckpointError, match=r"of format 7.*the last one that can be read is step-00000700"):
        folders.find_checkpoint(tmp_path)


def test_a_replacement_has_the_folder_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that finish one replacement would move the new checkpoint away as if it were the old one."""
    save(tmp_path, 800)
    rename, num_looks = os.rename, 0

    def look(source: Path, target: Path) -> None:
        nonlocal num_looks
        num_looks += 1
        with open_folder(tmp_path) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rename(source, target)

    monkeypatch.setattr(os, "rename", look)
    save(tmp_path, 800, call="a-2", at=2.0, overwrite=True)
    assert num_looks == 3
    rename(tmp_path / "step-00000800", tmp_path / "step-00000800.new")
    folders.remove_leftovers(str(tmp_path), ())
    assert num_looks > 3
    with open_folder(tmp_path) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_the_same_step_is_not_saved_twice_unless_asked(tmp_path: Path) -> None:
    save(tmp_path, 800)
    with pytest.raises(CheckpointError, match="is there already; save another step, or replace it with overwrite=True"):
        save(tmp_path, 800, call="a-2")
    save(tmp_path, 800, call="a-3", at=2.0, overwrite=True)
    (entry,) = folders.list_checkpoints(tmp_path)
    assert (entry.folder.name, entry.manifest.saved_at) == ("step-00000800", 2.0)
    assert os.listdir(tmp_path) == ["step-00000800"]


def test_a_second_save_of_a_step_that_was_committed_meanwhile_is_refused_at_its_commit(tmp_path: Path) -> None:
    late = folders.begin(str(tmp_path), "late", 800, identify(os.getpid()), overwrite=False)
    (late / "__0_0.distcp").write_bytes(DATA)
    save(tmp_path, 800)
    with pytest.raises(CheckpointError, match="is there already"):
        folders.commit(late, manifest(800, 9.0), overwrite=False)
    assert folders.find_checkpoint(tmp_path).manifest.saved_at == 1.0


@pytest.mark.parametrize("num_renames", range(4))
def test_a_replacement_that_is_cut_off_anywhere_leaves_a_checkpoint_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    save(tmp_path, 800)
    rename, left = os.rename, [num_renames]

    def cut_off(source: Path, target: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        rename(source, target)

    monkeypatch.setattr(os, "rename", cut_off)
    try:
        save(tmp_path, 800, call="a-2", at=2.0, overwrite=True)
    except KeyboardInterrupt:
        assert num_renames < 3
    monkeypatch.undo()
    expected = 1.0 if num_renames == 0 else 2.0
    entry = folders.find_checkpoint(tmp_path, 800)
    assert entry.manifest.saved_at == expected
    folders.check_sizes(entry)
    folders.remove_leftovers(str(tmp_path), ())
    assert os.listdir(tmp_path) == ["step-00000800"]
    assert folders.find_checkpoint(tmp_path, 800).manifest.saved_at == expected


def test_a_commit_looks_whether_the_files_are_as_reported(tmp_path: Path) -> None:
    folder = folders.begin(str(tmp_path), "a-1", 800, identify(os.getpid()), overwrite=False)
    (folder / "__0_0.distcp").write_bytes(DATA[:-1])
    with pytest.raises(CheckpointError, match="has 17 bytes and was committed with 18"):
        folders.commit(folder, manifest(800), overwrite=False)
    assert folders.list_checkpoints(tmp_path) == []


def test_a_commit_for_which_the_disk_has_no_space_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=f"No space left on device; free space in {tmp_path}, or save to another"):
        save(tmp_path, 800)


def test_a_file_that_was_changed_since_is_found_by_its_digest(tmp_path: Path) -> None:
    entry = folders.find_checkpoint(save(tmp_path, 800))
    folders.check_digests(entry, ["__0_0.distcp"])
    (entry.folder / "__0_0.distcp").write_bytes(DATA[::-1])
    folders.check_sizes(entry)
    with pytest.raises(CheckpointError, match="is damaged: its digest is"):
        folders.check_digests(entry, ["__0_0.distcp"])


def ended_process() -> ProcessIdentity:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    process.communicate(b"\n")
    return identity


@pytest.mark.usefixtures("starts_processes")
def test_left_overs_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path = str(tmp_path)
    dead = folders.begin(path, "dead-1", 1, ended_process(), overwrite=False)
    other = folders.begin(path, "other-1", 1, identify(os.getppid()), overwrite=False)
    own = folders.begin(path, "own-1", 1, identify(os.getpid()), overwrite=False)
    forgotten = folders.begin(path, "own-0", 1, identify(os.getpid()), overwrite=False)
    committed = save(tmp_path, 800)
    folders.remove_leftovers(path, ["own-1"])
    there = [folder.exists() for folder in (dead, other, own, forgotten, committed)]
    assert there == [False, True, True, False, True]


@pytest.mark.parametrize("prefix", [".discarded-", ".replaced-", folders.SAVING_PREFIX])
@pytest.mark.parametrize(("files", "is_removed"), [
    ((), True),
    (("notes.txt",), False),
    (("owner.json", "notes.txt"), True),
    (("meshbook.json", "notes.txt"), True),
])  # fmt: skip
def test_only_folders_that_a_save_has_made_are_removed(
    tmp_path: Path, prefix: str, files: tuple[str, ...], is_removed: bool
) -> None:
    folder = tmp_path / f"{prefix}x"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    os.utime(folder, (0, 0))
    folders.remove_leftovers(str(tmp_path), ())
    assert folder.exists() is not is_removed


def test_a_removal_that_was_cut_off_anywhere_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.begin(str(tmp_path), "a-1", 800, identify(os.getpid()), overwrite=False)
    for rank in range(3):
        (folder / f"__{rank}_0.distcp").write_bytes(DATA)
    unlink, left = os.unlink, 0

    def cut_off(*arguments: object, **options: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        unlink(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", cut_off)
    num_cut_off = 0
    for left in range(8):  # noqa: B007  # what may be removed before the next cut
        with contextlib.suppress(KeyboardInterrupt):
            folders.discard(folder) if folder.exists() else folders.remove_leftovers(str(tmp_path), ())
            break
        num_cut_off += 1
    assert num_cut_off > 1
    assert os.listdir(tmp_path) == []


def test_a_save_of_another_container_is_not_taken_for_a_left_over(tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(identify(os.getpid()), pid=1 << 22, pid_namespace=1)
    there = folders.begin(str(tmp_path), "other-1", 1, elsewhere, overwrite=False)
    folders.remove_leftovers(str(tmp_path), ())
    assert there.exists()
    assert is_on_other_host(elsewhere)
    assert not is_running(elsewhere)


def test_a_rank_that_still_writes_cannot_put_a_file_into_a_discarded_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.begin(str(tmp_path), "a-1", 1, identify(os.getpid()), overwrite=False)
    late = folder / "__1_0.distcp"
    unlink, errors = os.unlink, []

    def write_late(*arguments: object, **options: object) -> None:
        unlink(*arguments, **options)  # type: ignore[arg-type]
        try:
            late.touch()
        except FileNotFoundError as error:
            errors.append(error)

    monkeypatch.setattr(os, "unlink", write_late)
    folders.discard(folder)
    monkeypatch.undo()
    assert len(errors) == 1
    assert os.listdir(tmp_path) == []


def test_a_folder_that_another_machine_does_not_share_is_named_and_removed_there(tmp_path: Path) -> None:
    folder = folders.begin(str(tmp_path / "run"), "a-1", 1, identify(os.getpid()), overwrite=False)
    folders.check_shared(folder)
    elsewhere = folders.saving_folder(str(tmp_path / "n2" / "run"), "a-1")
    elsewhere.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is another folder than the one of rank 0; save to a path that all"):
        folders.check_shared(elsewhere)
    assert list((tmp_path / "n2").iterdir()) == []
    nowhere = folders.saving_folder(str(tmp_path / "nowhere"), "a-1")
    with pytest.raises(CheckpointError, match="where the supervisor runs; save to a path that all machines share"):
        folders.commit(nowhere, manifest(1), overwrite=False)
