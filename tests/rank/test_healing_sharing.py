"""What a new rank makes of what the others name."""

from __future__ import annotations

from typing import Any, cast

import pytest

from meshbook.errors import TransferError
from meshbook.rank.healing.sharing import _OfGroups
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.groups import ProcessGroups


class NoGroups:
    """A rank that has no group of a user's."""

    table = GroupTable()


@pytest.mark.parametrize("mesh", [None, ("cpu", [[0, 1]], ("dp", "tp"))])
def test_a_name_whose_process_group_the_others_have_destroyed_is_said_in_words(mesh: Any) -> None:
    with pytest.raises(TransferError, match=r"^the other ranks have destroyed this process group"):
        _OfGroups(("1",), mesh).make(cast(ProcessGroups, NoGroups()))
