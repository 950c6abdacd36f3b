"""A user's program is type-checked by mypy with the annotations that Meshbook ships."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each `type: ignore` is an error that mypy must find: in strict mode one that is not needed is an error itself.
PROGRAM = """\
import meshbook
from meshbook.actor import Actor, endpoint, this_host
from meshbook.distributed import Mesh
from meshbook.errors import CellError, RankLost


def losses(mesh: Mesh, count: int) -> list[float]:
    @mesh.remote
    def loss(step: int, *, scale: float = 1.0) -> float:
        return step * scale

    loss("1")  # type: ignore[arg-type]
    loss.on(mesh.slice(dp=0)).within(30)(1, scaled=2.0)  # type: ignore[call-arg]
    return [float(loss(step).same()) for step in range(count)]


class Counter(Actor):
    def __init__(self) -> None:
        self.n = 0

    @endpoint
    def add(self, k: int) -> int:
        self.n += k
        return self.n


with meshbook.create_mesh({"dp": 2, "tp": 2}) as mesh:
    try:
        mesh.run("x = torch.ones(2)")
        print(mesh.execute(len, [1, 2])[0], mesh.pull("x").same(), mesh["x"].shape, losses(mesh, 3))
    except (CellError, RankLost) as error:
        print(error.ranks if isinstance(error, RankLost) else error.failures[0].ranks)
    mesh.slice(dp=0).push(lr=0.1)
    mesh.resize("3")  # type: ignore[arg-type]
    mesh.rum("1")  # type: ignore[attr-defined]
    for x, y in mesh.feed([(1, 2)], axis="dp"):
        print(x, y)

counters = this_host().spawn_procs({"gpus": 2}).spawn("counters", Counter)
print(counters.add.call(2).get())
"""

# Of other packages only stubs are read: torch takes a minute, and imports transformers if it is there.
CONFIG = """\
[mypy]
strict = true
follow_imports = skip
[mypy-meshbook.*]
follow_imports = silent
"""


@pytest.mark.usefixtures("starts_processes")
def test_mypy_accepts_a_users_program_and_finds_its_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "program.py"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr
