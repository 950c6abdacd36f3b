"""Which files of a project travel, and which paths are refused."""

from __future__ import annotations

import pytest

from meshbook.wire.messages import FilePart, ProjectFile
from meshbook.wire.project_files import batches, difference, problem_among, problem_of
from meshbook.wire.transfers import CHUNK_BYTES

A, B = ProjectFile("a.py", 3, b"1"), ProjectFile("pkg/b.py", 5, b"2")


def test_only_files_whose_contents_or_mode_differ_come_and_those_that_are_gone_go() -> None:
    have = {"a.py": A, "pkg/b.py": B, "old.py": ProjectFile("old.py", 1, b"3")}
    assert difference(have, (A, B)) == ([], [have["old.py"]])
    newer, runnable = ProjectFile("a.py", 3, b"9"), ProjectFile("pkg/b.py", 5, b"2", is_executable=True)
    assert difference(have, (newer, runnable, have["old.py"])) == ([newer, runnable], [])
    assert difference({}, (A, B)) == ([A, B], [])


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../a", "a/../../b", "a/..", "./a", "a//b", "a/", "a\0b"])
def test_a_path_outside_of_the_project_is_refused(path: str) -> None:
    assert problem_of(ProjectFile(path)) == "is no path within the project"


@pytest.mark.parametrize(
    ("path", "target"),
    [("l", "/etc"), ("l", ".."), ("a/l", "../.."), ("a/b/l", "../../../x"), ("l", "a/../.."), ("a/l", "../b/../../x")],
)
def test_a_link_that_may_lead_out_of_the_project_is_refused(path: str, target: str) -> None:
    assert problem_of(ProjectFile(path, link=target)).startswith(f"is a link to {target}, which ")


@pytest.mark.parametrize(
    ("path", "target"), [("l", "a"), ("l", "a/b"), ("a/l", "../b"), ("a/b/l", "../../c"), ("a/l", "..")]
)
def test_a_link_within_the_project_travels(path: str, target: str) -> None:
    assert problem_of(ProjectFile(path, link=target)) == ""


def test_a_path_below_a_link_is_refused_and_so_is_one_that_is_there_twice() -> None:
    assert problem_among((ProjectFile("l", link="a"), ProjectFile("l/passwd"))) == (
        "'l' is a file or a link, and is to be a folder too"
    )
    assert problem_among((A, A)) == "'a.py' is there twice"
    assert problem_among((A, ProjectFile("../b"))) == "'../b' is no path within the project"
    assert problem_among((A, B)) == ""


def test_small_files_share_a_request_and_a_large_one_takes_several_in_order() -> None:
    large = CHUNK_BYTES + 7
    assert list(batches({"a": 3, "empty": 0, "large": large})) == [
        (FilePart("a", 0, 3), FilePart("empty", 0, 0), FilePart("large", 0, CHUNK_BYTES - 3)),
        (FilePart("large", CHUNK_BYTES - 3, 10),),
    ]
    assert list(batches({})) == []
