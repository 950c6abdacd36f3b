"""The table of kinds keeps its promises: its commands exist, and the documentation has all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshbook.diagnose.kinds import KINDS
from meshbook.diagnose.wait_sites import SYSCALL_SITES, WAIT_SITES
from meshbook.kernel.magics import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_says_what_it_means_and_what_to_type_next(kind):
    entry = KINDS[kind]
    assert entry.meaning.endswith(".")
    assert entry.next_step
    assert entry.next_step.format(ranks="0-1", first=0, name="ranks 0-1", pids="12 13")
    assert set(re.findall(r"%mesh (\w+)", entry.next_step)) <= set(COMMANDS)


def test_every_place_leads_to_a_kind_or_is_looked_into():
    words = {"collective", "forming", "sleep", "compute"}
    for place in [*(place for _, _, place in WAIT_SITES), *SYSCALL_SITES.values()]:
        assert place.kind in KINDS or place.kind in words
        assert re.match(r"(waits|forms|sleeps|compiles)\b", place.phrase)


def test_every_place_in_meshbooks_own_code_exists():
    for file, functions, _ in WAIT_SITES:
        if file.startswith("meshbook/"):
            source = (ROOT / file).read_text()
            assert [name for name in functions or () if f"def {name}(" not in source] == [], file


def test_the_documentation_has_every_kind_and_no_other():
    table = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "debugging.md").read_text(), re.MULTILINE)
    assert table == sorted(KINDS, key=lambda kind: -KINDS[kind].weight)
