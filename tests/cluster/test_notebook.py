"""A notebook whose cells run on two machines."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from meshbook.controller.starting import create_mesh
from tests.budget import WAIT_S
from tests.cluster.bed import Bed
from tests.cluster.ray_bed import RAY_TIMEOUT_S
from tests.kernel.frontend import kernel

QUICKSTART = Path(__file__).resolve().parent.parent.parent / "notebooks" / "quickstart.ipynb"

# status, result and printed numbers of each cell
Cells = list[tuple[str, str | None, list[str]]]

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]


def test_a_notebook_starts_its_mesh_on_machines_and_goes_on_as_on_one(bed: Bed) -> None:
    with kernel() as front:
        assert "on 2 machines" in front.run("%mesh start --nodes 2 --per-node 1 --on ssh://n1,n2").stdout
        cell = front.run(
            "t = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nprint(__import__('socket').gethostname())\nt.item()"
        )
        assert cell.status == "ok"
        assert cell.text == "n{1, 2}\n3.0\n"
        assert "torch" in front.run("%mesh hosts").text
        assert "n2" in front.run("%mesh status").text


def run_quickstart(start: str) -> Cells:
    """Run the quickstart's cells with another start of its mesh; return status, result and printed numbers of each."""
    cells = [cell for cell in json.loads(QUICKSTART.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    with kernel() as front:
        sources = [start if source.startswith("%mesh start") else source for source in sources]
        shown = [front.run(source, timeout_s=3 * WAIT_S) for source in sources]  # training beside Ray's daemons
    return [
        # sorted, for a rank that lags prints on a line of its own; a Stop comes to ranks at a step of its own
        (cell.status, cell.result, [] if "raise_signal" in source else sorted(re.findall(r"\d+\.\d+", cell.stdout)))
        for source, cell in zip(sources, shown, strict=True)
        if not source.startswith("%mesh ")  # names and pids are each mesh's own
    ]


@pytest.fixture(scope="module")
def on_one() -> Cells:
    """What the quickstart shows on one machine."""
    return run_quickstart("%mesh start -n 4")


@pytest.mark.timeout(600)
def test_the_quickstart_has_the_same_numbers_on_two_machines(bed: Bed, on_one: Cells) -> None:
    assert [status for status, *_ in on_one].count("error") == 2  # its mistake on one rank, and its Stop
    assert run_quickstart("%mesh start --nodes 2 --per-node 2 --on ssh://n1,n2") == on_one


@pytest.mark.parametrize(
    ("on", "cluster"),
    [
        ("slurm://", "slurm"),
        pytest.param("ray://auto", "ray_cluster", marks=[pytest.mark.ray, pytest.mark.timeout(RAY_TIMEOUT_S)]),
        pytest.param("monarch://process", None, marks=pytest.mark.monarch),
    ],
)
@pytest.mark.timeout(600)
def test_the_quickstart_has_the_same_numbers_where_a_scheduler_starts_its_mesh(
    request: pytest.FixtureRequest, on: str, cluster: str | None, on_one: Cells
) -> None:
    with request.getfixturevalue(cluster).here() if cluster is not None else nullcontext():
        mesh = create_mesh(nodes=2, gpus_per_node=2, on=on)  # in the cluster's network, where no kernel is
    with mesh:
        assert run_quickstart(f"%mesh attach {mesh.name}") == on_one
