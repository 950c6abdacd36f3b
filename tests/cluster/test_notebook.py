"""A notebook whose cells run on two machines."""

from __future__ import annotations

import pytest

from tests.cluster.bed import Bed
from tests.kernel.frontend import kernel

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
