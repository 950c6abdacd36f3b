"""What a killed rank leaves in /dev/shm goes, and what is another's stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

from meshbook.host.shared_files import unlink_shared_files


def test_the_files_of_the_process_go_and_those_of_others_stay(tmp_path: Path) -> None:
    uid, pid = os.getuid(), 476
    own = {f"torch_{pid}_1547187069_0", f"cuda.shm.{uid:x}.{pid:x}.1"}
    others = {f"torch_{pid}7_1_0", f"cuda.shm.{uid:x}.{pid:x}0.1", f"cuda.shm.{uid + 1:x}.{pid:x}.1", "mine"}
    for name in own | others:
        (tmp_path / name).write_text("")
    unlink_shared_files(pid, time.time() + 1000, tmp_path)
    assert set(os.listdir(tmp_path)) == own | others  # they are older than the process
    unlink_shared_files(pid, time.time() - 1000, tmp_path)
    assert set(os.listdir(tmp_path)) == others
    unlink_shared_files(pid, 0.0, tmp_path / "none")
