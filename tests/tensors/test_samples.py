"""torch's own operators, on torch's own samples: one in three of them, for the whole takes minutes (see `samples`)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.timeout(240)
def test_operators_give_what_plain_torch_gives_or_are_refused() -> None:
    command = [sys.executable, "-m", "tests.tensors.samples", "--part", "0/3", "--samples", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    right = re.search(r"(\d+) right", done.stdout)
    assert right is not None
    assert int(right[1]) > 200, done.stdout
