"""The soak counts what it says, repeats a wrong number at once, and leaves its figures; a short one finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.soak.__main__ import only, take_turns
from tests.soak.tally import Case, Verdict, how_to_repeat, interval, report, table

RIGHT = Case("tensors", 3, Verdict("kill"), 2.0, 0.5)
FAILED = Case("hangs", 4, Verdict("left", "not explained"), 9.0, 2.5, before=(1, 2))
WRONG = Case("chains", 5, Verdict("7 lines", "3, and not 4", is_wrong=True), 1.0, 1.0, again=Verdict("7 lines"))


@pytest.mark.parametrize(
    ("failures", "cases", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 100, 0.0, 0.037), (5, 100, 0.0215, 0.1118), (100, 100, 0.963, 1.0)],
)
def test_the_rate_is_wilsons_interval(failures: int, cases: int, low: float, high: float) -> None:
    assert interval(failures, cases) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


def test_a_case_is_told_in_a_line_and_with_the_commands_that_repeat_it() -> None:
    assert str(RIGHT) == "tensors:3 kill: right, 2.0 s"
    assert str(WRONG) == "chains:5 7 lines: WRONG, 1.0 s"
    assert how_to_repeat(FAILED).splitlines() == [
        "again: python -m tests.soak --only hangs:4",
        "with all that its turn had run: python -m tests.soak --only hangs:1 hangs:2 hangs:4",
    ]
    assert how_to_repeat(WRONG).endswith("run again at once, it was not wrong")


def test_the_table_has_a_row_for_each_kind_and_one_for_all() -> None:
    rows = [line.split() for line in table([RIGHT, FAILED, WRONG, RIGHT]).splitlines()]
    assert [row[:4] for row in rows] == [
        ["kind", "cases", "failed", "wrong"],
        ["tensors", "2", "0", "0"],
        ["hangs", "1", "1", "0"],
        ["chains", "1", "1", "1"],
        ["all", "4", "2", "1"],
    ]


def test_the_report_has_the_seeds_the_failures_and_the_load() -> None:
    found = json.loads(json.dumps(report([RIGHT, FAILED, WRONG], minutes=5)))
    assert found["minutes"] == 5
    assert found["kinds"]["hangs"]["failures"] == [4]
    assert found["kinds"]["tensors"] == {"n": 1, "seeds": [3], "failures": [], "rate": list(interval(0, 1))}
    assert [failure["seed"] for failure in found["failures"]] == [4, 5]
    assert found["failures"][1]["again"]["is_wrong"] is False
    assert found["load"] == [0.5, 2.5, 1.0]


def test_kinds_take_turns_and_each_goes_on_where_it_stood() -> None:
    taken = [(name, list(islice(seeds, 2))) for name, seeds in islice(take_turns(["a", "b"], 7), 4)]
    assert taken == [("a", [7, 8]), ("b", [7, 8]), ("a", [9, 10]), ("b", [9, 10])]


def test_named_cases_of_one_kind_in_a_row_share_their_meshes() -> None:
    named = [("a", 1), ("a", 2), ("b", 1), ("a", 3)]
    assert [(kind, list(seeds)) for kind, seeds in only(named)] == [("a", [1, 2]), ("b", [1]), ("a", [3])]


@pytest.mark.usefixtures("runs_soak")
@pytest.mark.timeout(900)  # two cases of each kind, each with a deadline of its own that tells more
def test_some_cases_of_each_kind_are_right(tmp_path: Path) -> None:
    """In a process of its own, which may have file systems of its own."""
    kinds = (
        "training", "tensors", "modules", "faults", "supervisors", "supervisors of hosts", "saves", "chains", "hangs",
    )  # fmt: skip
    cases = [f"{kind}:{seed}" for kind in kinds for seed in (2, 5)]
    written = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak", "--only", *cases, "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert {kind: found["n"] for kind, found in json.loads(written.read_text())["kinds"].items()} == dict.fromkeys(
        kinds, 2
    )
