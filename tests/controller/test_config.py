"""Defaults from files and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshbook.controller.config import read_defaults
from meshbook.errors import UsageError


def test_whether_a_failed_rank_ends_the_cell_is_read_from_the_environment_before_the_file(tmp_path: Path) -> None:
    assert read_defaults(tmp_path, {}).end_on_error
    assert not read_defaults(tmp_path, {"MESHBOOK_END_ON_ERROR": "0"}).end_on_error
    (tmp_path / "meshbook.toml").write_text("end_on_error = false\n")
    assert not read_defaults(tmp_path, {}).end_on_error
    assert read_defaults(tmp_path, {"MESHBOOK_END_ON_ERROR": "1"}).end_on_error
    with pytest.raises(UsageError, match=r"MESHBOOK_END_ON_ERROR='no' is neither 0 \(off\) nor 1 \(on\)"):
        read_defaults(tmp_path, {"MESHBOOK_END_ON_ERROR": "no"})
    (tmp_path / "meshbook.toml").write_text("end_on_error = 0\n")
    with pytest.raises(UsageError, match="end_on_error"):
        read_defaults(tmp_path, {})


def test_a_folder_that_was_deleted_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match=r"has been deleted.*%cd ~"):
        read_defaults()
