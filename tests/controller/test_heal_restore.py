"""A heal that knows the last checkpoint: it says what is in it, and brings all ranks back to it where it is asked to.

FSDP2 over all ranks: no other rank holds what the lost one held.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.errors import HealError
from tests.controller.test_checkpoints import FSDP, MODEL, are_equal, same
from tests.controller.test_heal import kill

pytestmark = pytest.mark.usefixtures("starts_meshes")

BUILD = MODEL + FSDP.format(seed=1, lr=0.05)


def saved(mesh: Mesh, path: Path, *, setup: bool = True) -> Any:
    """Train two steps, save, and train another: the whole state as it was saved."""
    mesh.run(BUILD, setup=setup)
    mesh.run("train(2)\nfor b in model.buffers(): dist.broadcast(b, 0)")
    state = same(mesh, "state()")
    mesh.checkpoint(path, "model", "opt", step=800, asynchronous=False)
    mesh.run("train(1)")
    return state


def test_a_heal_names_the_checkpoint_and_a_restore_of_it_brings_all_ranks_back(pair: Mesh, tmp_path: Path) -> None:
    state = saved(pair, tmp_path / "run1")
    kill(pair, 1)
    healed = pair.heal()
    folder = tmp_path / "run1" / "step-00000800"
    assert (healed.checkpoint, healed.restored_from) == (str(folder), None)
    line = str(healed).splitlines()[-1]
    assert re.fullmatch(
        rf"model, opt: in the checkpoint run1, step 800 \(.* ago\): %mesh restore {folder} brings all ranks back to it",
        line,
    )
    pair.restore(line.partition("%mesh restore ")[2].split()[0])
    assert are_equal(same(pair, "state()"), state)


def test_heal_and_restore_in_one_are_told_as_one(pair: Mesh, tmp_path: Path) -> None:
    state = saved(pair, tmp_path / "run1")
    kill(pair, 1)
    healed = pair.heal(restore=True)
    folder = tmp_path / "run1" / "step-00000800"
    assert healed.restored_from == str(folder)
    assert f"restored on all ranks from {folder}: model, opt" in str(healed)
    assert "model" not in healed.missing_names
    assert are_equal(same(pair, "state()"), state)
    pair.run("train(1)")  # on all ranks, as before
    kill(pair, 0)
    assert pair.heal(restore=tmp_path / "run1").restored_from == str(folder)
    assert are_equal(same(pair, "state()"), state)


def test_where_nothing_is_missing_nothing_is_restored(pair: Mesh, tmp_path: Path) -> None:
    pair.run("x = 1")
    pair.checkpoint(tmp_path / "run1", "x", asynchronous=False)
    pair.run("x = 2")
    assert "nothing to restore" in str(pair.heal(restore=True))
    kill(pair, 1)
    healed = pair.heal(restore=True)
    assert healed.restored_from is None
    assert pair.run("x", ranks=[0]).values[0] == 2


def test_without_a_setup_cell_it_says_which_name_the_new_rank_lacks(pair: Mesh, tmp_path: Path) -> None:
    saved(pair, tmp_path / "run1", setup=False)
    kill(pair, 1)
    with pytest.raises(HealError) as raised:
        pair.heal(restore=True)
    text = str(raised.value)
    assert text.startswith("rank 1 is back")
    assert "The ranks are healed, and nothing was restored: " in text
    assert "model" in text.partition("nothing was restored: ")[2]
    assert pair.run("rank").values[1] == 1


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_checkpoint_that_is_gone_or_damaged_is_an_error_and_the_ranks_are_healed(
    pair: Mesh, tmp_path: Path, damage: str
) -> None:
    saved(pair, tmp_path / "run1")
    folder = tmp_path / "run1" / "step-00000800"
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        (folder / "__0_0.distcp").write_bytes(b"")
    kill(pair, 1)
    with pytest.raises(
        HealError, match=r"(?s)rank 1 is back.*The ranks are healed, and nothing was restored"
    ) as raised:
        pair.heal(restore=True)
    assert str(folder) in str(raised.value)
    assert pair.run("rank").values[1] == 1


def test_without_a_checkpoint_it_says_that_one_must_be_named(pair: Mesh) -> None:
    pair.run(BUILD, setup=True)
    pair.run("train(1)")
    kill(pair, 1)
    with pytest.raises(HealError, match=r"this mesh has saved no checkpoint of .*model.*%mesh heal --restore PATH"):
        pair.heal(restore=True)
