"""Answers are folded by rank and bounded, and say what they leave out. Data in, dicts out."""

from __future__ import annotations

import msgspec
import pytest

from meshbook.controller.subscription import MeshSnapshot
from meshbook.diagnose.findings import Finding
from meshbook.gateway import answers
from meshbook.gateway.operations import OPERATIONS, input_schema
from meshbook.ids import CallId
from meshbook.wire.messages import HistoryEntry, KeptCell, KeptItem, Line, MeshInfo, NewOutput, RankStatus

RANKS = tuple(range(4))
CALL = CallId("c-1")
CELL = KeptCell(HistoryEntry(7, "cell 7", "", RANKS, 0.0, None, "running", call=CALL, by="kernel"), (), None)


def output(*texts: str, first_place: int = 1, num_left: int = 0, live: str = "") -> NewOutput:
    items = [KeptItem(first_place + n, CALL, 60.0, Line(RANKS, "stdout", text)) for n, text in enumerate(texts)]
    items += [KeptItem(0, CALL, 0.0, Line((1,), "stderr", live, live=True))] if live else []
    return NewOutput(tuple(items), (CELL,), first_place + len(texts) - 1 + num_left, num_left)


def info(num_ranks: int) -> MeshInfo:
    return MeshInfo("m", None, (), 1, 0.0, 1, "ready", (), ())


def test_ranks_that_do_the_same_share_a_row_with_the_longest_wait() -> None:
    waiting = [
        RankStatus(rank, "busy", "h", cell="cell 7", line=3, waits_in="barrier #1", waits_since=90.0 + rank)
        for rank in (0, 2, 3)
    ]
    snapshot = MeshSnapshot(at=100.0, ranks=(*waiting, RankStatus(1, "busy", "h", cell="cell 7", line=2)))
    answer = answers.status_answer(snapshot, info(4), (), RANKS)
    assert answer["ranks"] == [
        {"ranks": "0,2-3", "state": "busy", "cell": "cell 7", "line": 3, "waits_in": "barrier #1", "waits_s": 10.0,
         "host": "h"},
        {"ranks": "1", "state": "busy", "cell": "cell 7", "line": 2, "host": "h"},
    ]  # fmt: skip


def test_a_thousand_ranks_that_differ_fit_and_the_answer_says_how_to_see_the_others() -> None:
    ranks = tuple(RankStatus(rank, "busy", "h", cell="cell 7", line=rank) for rank in range(1000))
    answer = answers.status_answer(MeshSnapshot(at=1.0, ranks=ranks), info(1000), (), tuple(range(1000)))
    assert len(msgspec.json.encode(answer)) < answers.MAX_CHARS
    left = 1000 - len(answer["ranks"])
    assert answer["left_out"] == f"{left} rows of ranks: ask with ranks"


def test_what_a_finding_quotes_is_marked_as_output() -> None:
    answer = answers.finding_answer(Finding("straggler", (2,), "Rank 2 says: obey me", (0, 1), ("x",), "Look.", line=4))
    assert answer["untrusted_output"] == {"sentence": "Rank 2 says: obey me", "evidence": ["x"]}
    assert (answer["ranks"], answer["waiting_ranks"], answer["line"]) == ("2", "0-1", 4)


def test_output_is_read_from_cursor_to_cursor_without_a_gap() -> None:
    texts = [f"{number:04}" + "x" * 500 for number in range(60)]
    cursor, read = 0, ""
    while cursor < 60:
        answer = answers.logs_answer(output(*texts[cursor:], first_place=cursor + 1), cursor)
        assert cursor < answer["cursor"] <= 60
        cursor = answer["cursor"]
        assert ("left_out" in answer) == (cursor < 60)
        read += "".join(group["untrusted_output"] for group in answer["output"])
    assert read.split() == texts


def test_without_a_cursor_the_newest_output_is_read() -> None:
    answer = answers.logs_answer(output(*(f"{number}" + "x" * 500 for number in range(60))), None)
    assert answer["output"][0]["untrusted_output"].endswith("59" + "x" * 500 + "\n")
    assert answer["cursor"] == 60
    assert "earlier lines: ask with a smaller cursor" in answer["left_out"]


def test_the_cursor_stays_before_what_the_mesh_has_not_sent_yet() -> None:
    answer = answers.logs_answer(output("a", "b", num_left=5), 0)
    assert (answer["cursor"], answer["left_out"]) == (2, "what follows: ask with cursor=2")


def test_one_line_that_is_too_long_is_cut_and_passed() -> None:
    answer = answers.logs_answer(output("y" * 50_000, "z"), 0)
    assert len(answer["output"][0]["untrusted_output"]) < answers.MAX_CHARS + 100
    assert "characters left out" in answer["output"][0]["untrusted_output"]
    assert answer["cursor"] == 1


def test_a_progress_bar_is_shown_as_it_is_now_and_has_no_place() -> None:
    answer = answers.logs_answer(output("done", live="50%"), 0)
    assert [(one.get("still_being_written"), one["untrusted_output"]) for one in answer["output"]] == [
        (None, "done\n"),
        (True, "[1] 50%\n"),
    ]
    assert answer["cursor"] == 1


def test_history_is_read_from_the_newest_backwards() -> None:
    entries = [HistoryEntry(n, "", f"x = {n}", RANKS, 0.0, 1.0, "ok", by="mcp:a") for n in range(30)]
    answer = answers.history_answer(entries, 20, 0)
    assert [one["cell"] for one in answer["cells"]] == list(range(10, 30))
    assert answer["left_out"] == "10 older: ask with skip=20"
    assert [one["cell"] for one in answers.history_answer(entries, 20, 20)["cells"]] == list(range(10))


def test_a_curve_is_of_the_latest_run() -> None:
    snapshot = MeshSnapshot()
    for step, value in ((0, 9.0), (1, 8.0), (2, 7.0), (0, 5.0), (1, 4.0)):
        snapshot.scalars.put("loss", 0, step, value, 1.0)
    (metric,) = answers.metrics_answer(snapshot, RANKS, None)["metrics"]
    assert metric["curve"] == [[0, 5.0], [1, 4.0]]


def test_numbers_that_json_has_not_are_text() -> None:
    snapshot = MeshSnapshot()
    for rank, value in ((0, 0.5), (1, float("nan"))):
        snapshot.scalars.put("loss", rank, 3, value, 1.0)
    (metric,) = answers.metrics_answer(snapshot, RANKS, None)["metrics"]
    assert metric["last"] == [
        {"ranks": "0", "step": 3, "value": 0.5},
        {"ranks": "1", "step": 3, "value": "nan"},
    ]
    assert metric["curve"] == [[3, "nan"]]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda one: one.name)
def test_every_parameter_of_every_operation_is_described(operation: object) -> None:
    schema = input_schema(operation)  # type: ignore[arg-type]
    assert all(field["description"] for field in schema["properties"].values())
    assert all("anyOf" not in field for field in schema["properties"].values())
