"""The mesh's log stays short, and those who write to it go on."""

from __future__ import annotations

import os
from pathlib import Path

from meshbook.supervisor import logfile


def test_a_log_that_has_grown_too_large_begins_anew_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    with path.open("ab") as writer:
        writer.write(b"x" * 1000 + b"the end\n")
        writer.flush()
        assert logfile.truncate_log(path, max_bytes=500, retained_bytes=8)
        writer.write(b"what came later\n")
    assert path.read_bytes() == b"what came later\n"
    assert (tmp_path / "supervisor.log.1").read_bytes() == b"the end\n"


def test_the_log_of_a_host_is_that_of_all_its_starts_the_latest_last(tmp_path: Path) -> None:
    (tmp_path / "supervisor.log").write_text("of the mesh\n")
    assert logfile.read_host_log(tmp_path, 1, 100) == "of the mesh\n"
    for number, (name, text) in enumerate({"h1.zz.log": "first\n", "h1.aa.log": "second\n", "h11.aa.log": "x"}.items()):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (number, number))
    assert logfile.read_host_log(tmp_path, 1, 100) == "first\nsecond\n"
    assert logfile.read_host_log(tmp_path, 1, 8) == "\nsecond\n"


def test_a_short_log_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    path.write_text("a line\n")
    assert not logfile.truncate_log(path)
    assert path.read_text() == "a line\n"


def test_a_log_is_shortened_also_where_its_end_cannot_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    path.write_bytes(b"x" * 1000)
    (tmp_path / "supervisor.log.1").mkdir()  # cannot be written, as on a full disk
    assert logfile.truncate_log(path, max_bytes=500, retained_bytes=8)
    assert path.read_bytes() == b""
