"""Which files of the notebook's folder travel: those that git would take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from meshbook.controller import project_folder
from meshbook.controller.project_folder import MAX_BYTES, ProjectFolder, check_size, find_project, largest
from meshbook.controller.starting import choose_project, make_spec
from meshbook.errors import SyncError, UsageError
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import ProjectSpec

pytestmark = pytest.mark.usefixtures("starts_processes")


def git(folder: Path, *words: str) -> None:
    options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *options, "-C", folder, *words], check=True, capture_output=True)


def write(place: Path, text: str = "x") -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def paths(root: Path, *named: str) -> list[str]:
    return [file.path for file in ProjectFolder(ProjectSpec(str(root), named)).files()]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository whose folder `notebooks` is the current one."""
    root = tmp_path / "proj"
    for path in ("tracked.py", "notebooks/untracked.py", "data/huge.bin", "data/inner/vocab.json", ".hidden"):
        write(root / path)
    write(root / ".gitignore", "data/\n")
    git(root, "init", "-q")
    git(root, "add", "tracked.py")
    git(root, "commit", "-qm", "x")
    monkeypatch.chdir(root / "notebooks")
    return root


def test_tracked_files_and_untracked_ones_that_are_not_ignored_travel(repository: Path) -> None:
    assert find_project() == ProjectSpec(str(repository))
    assert paths(repository) == [".gitignore", ".hidden", "notebooks/untracked.py", "tracked.py"]
    (repository / "tracked.py").unlink()
    assert paths(repository) == [".gitignore", ".hidden", "notebooks/untracked.py"]


def test_what_is_named_travels_although_git_ignores_it(repository: Path) -> None:
    spec = find_project(("../data/huge.bin", "../data/inner"))
    assert spec.named == ("data/huge.bin", "data/inner")
    assert [path for path in paths(repository, *spec.named) if path.startswith("data")] == [
        "data/huge.bin",
        "data/inner/vocab.json",
    ]


@pytest.mark.parametrize(
    ("name", "words"), [("../nowhere", "there is no"), ("/etc/hostname", "is not in the project, which is")]
)
def test_what_is_named_and_not_in_the_project_is_refused(repository: Path, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_project((name,))


def test_without_a_repository_all_but_hidden_files_and_bytecode_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("a.py", "sub/b.py", ".env", ".venv/lib/c.py", "__pycache__/a.pyc"):
        write(tmp_path / path)
    (tmp_path / "linked").symlink_to("sub")
    monkeypatch.chdir(tmp_path)
    assert find_project() == ProjectSpec(str(tmp_path))
    assert paths(tmp_path) == ["a.py", "linked", "sub/b.py"]


def test_files_of_submodules_and_of_repositories_within_travel(repository: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    write(library / "lib.py")
    git(tmp_path, "init", "-q", "library")
    git(library, "add", ".")
    git(library, "commit", "-qm", "x")
    git(repository, "submodule", "add", "-q", str(library), "vendor")
    write(repository / "own" / "inner.py")
    git(repository, "init", "-q", "own")
    assert {"vendor/lib.py", "own/inner.py"} <= set(paths(repository))


def test_a_link_that_leads_out_and_a_name_that_is_no_text_do_not_travel_and_are_named(repository: Path) -> None:
    (repository / "out").symlink_to("/etc/passwd")
    (repository / "within").symlink_to("notebooks")
    os.close(os.open(os.fsencode(repository) + b"/\xff", os.O_CREAT))
    os.mkfifo(repository / "pipe")
    folder = ProjectFolder(ProjectSpec(str(repository)))
    links = {file.path: file.link for file in folder.files() if file.link}
    assert links == {"within": "notebooks"}
    assert folder.left_out == {
        "out": "is a link to /etc/passwd, which may be outside of the project",
        "\udcff": "has a name that is not UTF-8",
    }


def test_a_file_is_read_once_until_it_changes(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in repository.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    folder = ProjectFolder(ProjectSpec(str(repository)))
    read: list[str] = []
    digest = project_folder._digest
    monkeypatch.setattr(project_folder, "_digest", lambda path: read.append(Path(path).name) or digest(path))
    before = folder.files()
    assert len(read) == 4
    read.clear()
    assert folder.files() == before
    assert read == []
    write(repository / "tracked.py", "y")
    changed = set(folder.files()) - set(before)
    assert ([file.path for file in changed], read) == (["tracked.py"], ["tracked.py"])
    read.clear()
    folder.files()
    assert read == ["tracked.py"]  # it is so new that it may have changed again without another time


def test_a_mode_that_makes_a_file_a_program_is_a_change(repository: Path) -> None:
    folder = ProjectFolder(ProjectSpec(str(repository)))
    before = folder.files()
    (repository / "tracked.py").chmod(0o755)
    assert [file.path for file in folder.files() if file not in before] == ["tracked.py"]


def test_too_much_is_an_error_with_the_sum_the_largest_folders_and_how_to_leave_them_out() -> None:
    sizes = {f"src/data/train/{number}.bin": 200 << 20 for number in range(10)}
    sizes |= {"model.pt": 300 << 20, "src/a.py": 1000, "docs/a.png": 10 << 20, "b.py": 100}
    assert largest(sizes) == [("src/data/train", 2000 << 20), ("model.pt", 300 << 20), ("docs", 10 << 20)]
    with pytest.raises(SyncError) as raised:
        check_size("/p", sizes)
    assert str(raised.value).startswith(
        "/p has 2.3 GiB in 14 files, and at most 500 MiB travel. Largest: src/data/train 2.0 GiB, model.pt 300 MiB, "
        "docs 10 MiB. Leave folders out: `git init /p`, then a line such as `data/` in /p/.gitignore."
    )
    check_size("/p", {"a": MAX_BYTES})


def test_too_many_files_are_an_error(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_folder, "MAX_FILES", 3)
    with pytest.raises(SyncError, match=r"has more than 3 files.*a line such as `data/` in"):
        paths(repository)


def test_uv_takes_the_next_lock_above_and_is_refused_without_one_or_without_a_copy(repository: Path) -> None:
    with pytest.raises(UsageError, match=r"needs a uv.lock in .*notebooks or above it, up to .*proj; `uv lock` makes"):
        find_project(uv=True)
    write(repository / "uv.lock")
    assert find_project(uv=True).uv == "."
    with pytest.raises(UsageError, match="--env uv goes with --sync"):
        choose_project(False, uv=True)


def test_a_mesh_on_this_machine_has_nothing_to_sync_to(repository: Path) -> None:
    assert choose_project(False, uv=False) is None
    with pytest.raises(UsageError, match="this mesh is on this one, whose ranks have it"):
        make_spec(MeshAxes.of(2), torch=False, project=choose_project(True, uv=False))


def test_what_git_says_is_an_error_of_the_sync(repository: Path) -> None:
    (repository / ".git" / "index").write_text("no index")
    with pytest.raises(SyncError, match=r"git ls-files failed in .*proj: .*index"):
        paths(repository)
