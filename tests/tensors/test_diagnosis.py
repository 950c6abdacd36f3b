"""Operations on remote tensors that hang: who is to blame is told with the line here that issued them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.tensors.creation import distribute
from tests.budget import WAIT_S, when
from tests.standstill import stopped

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHBOOK_STALL_S", "2")
        with create_mesh({"dp": 3}) as mesh:
            yield mesh


@contextmanager
def hanging(mesh: Mesh, act: Callable[[], Any], result: float) -> Iterator[None]:
    """Another thread waits for `act` while rank 2 is stopped; once the block has ended, it gives `result`."""
    pid = dict(mesh.run("__import__('os').getpid()").values)[2]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    with stopped(pid):
        thread.start()
        yield
    thread.join(WAIT_S)
    assert found == [result]


def multiply(x: torch.Tensor) -> torch.Tensor:
    y = x @ x.t()
    return y.sum()


def waited(mesh: Mesh) -> tuple[Any, str]:
    """The finding and the tree, once ranks wait for rank 2, and are seen from inside."""
    seen: list[Any] = []

    def is_told() -> bool:
        why, stacks = mesh.why(), mesh.stacks()
        seen[:] = [why.findings[0], stacks.text]
        looks = [[one for one in look.snapshots if one.rank != 2] for look in (why, stacks)]
        return seen[0].others == (0, 1) and all(one.source == "inside" for look in looks for one in look)

    when(is_told)
    return seen[0], seen[1]


def line_of(function: Any, offset: int) -> int:
    return int(function.__code__.co_firstlineno) + offset


def test_an_operation_that_hangs_is_told_with_the_line_that_issued_it_asked_and_unasked(
    mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    x = distribute(torch.ones(6, 6), mesh, sharding_spec=["dp"])
    assert multiply(x).item() == 216.0
    here, said = f"tensors/test_diagnosis.py, line {line_of(multiply, 1)} in multiply", ""
    with hanging(mesh, lambda: multiply(x).item(), 216.0):
        finding, stacks = waited(mesh)
        assert (finding.kind, finding.ranks) == ("stopped", (2,))
        assert f"where ranks 0-1 wait ({here})" in finding.title
        assert f"[0-1] > {here}: y = x @ x.t()" in stacks
        assert "aten.mm" in stacks.splitlines()[1]
        assert "shell" not in stacks

        def unasked() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return here in said

        when(unasked)
    assert said.count("this cell stands still\nRank 2 is stopped") == 1


def test_what_a_value_that_is_asked_for_takes_is_told_with_the_line_that_asks(mesh: Mesh) -> None:
    total = multiply(distribute(torch.ones(6, 6), mesh, sharding_spec=["dp"]))
    total.engine.wait()  # type: ignore[attr-defined]

    def ask() -> float:
        return total.item()

    with hanging(mesh, ask, 216.0):
        finding, _ = waited(mesh)
        assert f"line {line_of(ask, 1)} in ask" in finding.title


def test_of_a_recorded_step_the_operation_is_told_in_which_the_ranks_are(mesh: Mesh) -> None:
    x = distribute(torch.ones(6, 6), mesh, sharding_spec=["dp"])

    @meshbook.record
    def step() -> torch.Tensor:
        total = (x @ x.t()).sum()
        return (total * 2 + x).sum()

    for _ in range(4):
        result = step().item()
    assert step.stats().replayed
    with hanging(mesh, lambda: step().item(), result):
        finding, stacks = waited(mesh)
        here = f"tensors/test_diagnosis.py, line {line_of(step.__wrapped__, 2)} in step"  # type: ignore[attr-defined]
        assert f"where ranks 0-1 wait ({here})" in finding.title
        assert "of a recorded step" in stacks
        assert "<recorded step>" not in stacks


def test_lines_of_a_notebooks_cells_bear_the_cells_numbers(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    names = SimpleNamespace(_filename_map={"/tmp/ipykernel_7/123.py": 12})
    shell = SimpleNamespace(compile=names, displayhook=SimpleNamespace(prompt_count=12))
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    space = {"x": distribute(torch.ones(6, 6), mesh, sharding_spec=["dp"])}
    code = compile("\ny = (x @ x.t()).sum()", "/tmp/ipykernel_7/123.py", "exec")
    with hanging(mesh, lambda: exec(code, space) or space["y"].item(), 216.0):
        finding, _ = waited(mesh)
        assert "where ranks 0-1 wait (cell 12, line 2)" in finding.title
