"""What front ends are told: little where little changes, everything to who knows nothing, and only what is there."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
import pytest

from meshbook.controller.reports import Stacks
from meshbook.controller.subscription import MeshSnapshot
from meshbook.dashboard import view
from meshbook.dashboard.view import UpdateEncoder
from meshbook.diagnose.findings import Finding, dated
from meshbook.ids import parse_ranks
from meshbook.wire.messages import Frame, RankSnapshot, RankStatus, ThreadStack
from tests.dashboard.pictures import Training


def by_kind(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {message["kind"]: message for message in messages}


def columns_after(messages: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """What a front end has in its columns, which it fills as widgets/picture.js does."""
    known: dict[str, dict[int, Any]] = {}
    for message in messages:
        if message["kind"] == "update":
            known = {} if message["full"] else known
            for name, values in message["columns"].items():
                for value, ranks in values:
                    known.setdefault(name, {}).update(dict.fromkeys(parse_ranks(ranks), value))
    return known


def test_who_was_told_every_change_knows_what_who_is_told_everything_knows() -> None:
    training, reported = Training({"dp": 4, "tp": 2}, stuck=5, stuck_after=3), UpdateEncoder()
    messages = reported.full_update(training.picture)
    for _ in range(8):
        messages += reported.updates(training.step())
    late = columns_after(UpdateEncoder().full_update(training.picture))
    followed = columns_after(messages)
    for name, column in late.items():
        assert {rank: followed[name][rank] for rank in column} == column
    assert followed["doing"] == {rank: "all_reduce #63" for rank in range(8) if rank != 5}


def test_nothing_is_said_of_a_mesh_that_does_not_change() -> None:
    training, reported = Training({"rank": 4}), UpdateEncoder()
    reported.full_update(training.picture)
    reported.updates(training.picture)
    assert reported.updates(training.picture) == []


def test_a_thousand_ranks_in_training_cost_fifteen_kibibytes_an_update_at_most() -> None:
    training, reported = Training({"dp": 32, "tp": 32}), UpdateEncoder()
    reported.full_update(training.picture)
    sizes = [len(json.dumps(reported.updates(training.step()), separators=(",", ":"))) for _ in range(6)]
    assert sorted(sizes)[3] <= 15 << 10
    assert len(json.dumps(UpdateEncoder().full_update(training.picture))) <= 128 << 10


def test_a_hang_is_told_with_its_finding_and_with_who_waits_for_whom() -> None:
    training = Training({"dp": 2, "tp": 2}, stuck=2, stuck_after=1)
    training.step()
    training.step()
    reported = by_kind(UpdateEncoder().full_update(training.picture))
    (finding,) = reported["findings"]["findings"]
    assert (finding["severity"], finding["ranks"], finding["involved"]) == ("bad", "2", "0-3")
    assert "Next:" in finding["copy"]
    (wait,) = reported["collectives"]["waits"]
    assert (wait["op"], wait["group"], wait["inside"], wait["missing"]) == ("all_reduce", "all ranks", "0-1,3", "2")
    training.picture.collectives.pop(2)  # it has come to none yet
    reported = by_kind(UpdateEncoder().full_update(training.picture))
    assert [rank for rank, _ in reported["collectives"]["rows"]] == [0, 1, 2, 3]


def test_a_collective_that_was_not_completed_says_why() -> None:
    training = Training({"dp": 2})
    training.step()
    (*_, last) = training.picture.collectives[1]
    training.picture.collectives[1] = (msgspec.structs.replace(last, failure="rank 0 was killed"),)
    rows = dict(by_kind(UpdateEncoder().full_update(training.picture))["collectives"]["rows"])
    assert [bar[-1] for bar in rows[1]] == ["rank 0 was killed"]
    assert {bar[-1] for bar in rows[0]} == {None}


def test_a_finding_that_stays_says_when_its_durations_were_true() -> None:
    found = Finding(kind="straggler", ranks=(1,), title="Rank 1 is late", evidence=("rank 0 waits, since 11 s",))
    assert view.finding_message(found)["evidence"] == ["rank 0 waits, since 11 s"]
    at = datetime(2026, 1, 2, 15, 3, 12).timestamp()
    (kept,) = dated([found], at)
    assert view.finding_message(kept)["evidence"] == ["looked at 15:03:12", "rank 0 waits, since 11 s"]
    assert "looked at 15:03:12" in view.finding_message(kept)["copy"]


def test_an_answer_to_why_stands_until_something_else_runs() -> None:
    training, reported = Training({"rank": 2}), UpdateEncoder()
    reported.full_update(training.picture)
    found = Finding(kind="straggler", ranks=(1,), title="Rank 1 is late")
    answer = reported.record_why(training.picture, (found,))
    assert "findings" not in by_kind(reported.updates(training.step()))
    assert by_kind(reported.full_update(training.step()))["findings"] == answer
    assert by_kind(reported.updates(replace(training.step(), calls=())))["findings"]["findings"] == []


def test_an_answer_to_why_stands_beside_a_finding_that_was_known_and_yields_to_a_new_one() -> None:
    stuck = Training({"dp": 2, "tp": 2}, stuck=2, stuck_after=1)
    stuck.step()
    stuck.step()
    reported = UpdateEncoder()
    assert by_kind(reported.full_update(stuck.picture))["findings"]["findings"]
    answer = reported.record_why(stuck.picture, (Finding(kind="straggler", ranks=(1,), title="Rank 1 is late"),))
    assert by_kind(reported.full_update(stuck.picture))["findings"] == answer
    news = replace(stuck.picture, findings=(Finding(kind="dead", ranks=(3,), title="Rank 3 is dead"),))
    assert by_kind(reported.full_update(news))["findings"]["findings"][0]["ranks"] == "3"


def test_few_ranks_have_a_line_each_and_of_many_those_that_are_followed() -> None:
    few, many = Training({"rank": 4}), Training({"rank": 64})

    def lines(reported: UpdateEncoder, picture: MeshSnapshot) -> dict[str, set[str]]:
        charts = by_kind(reported.full_update(picture))["charts"]["charts"]
        return {chart["name"]: set(chart["lines"]) for chart in charts}

    assert lines(UpdateEncoder(), few.picture)["loss"] == {"0", "1", "2", "3"}
    reported = UpdateEncoder()
    assert lines(reported, many.picture)["loss"] == set()
    reported.follow((7, 9))
    assert lines(reported, many.picture)["loss"] == lines(reported, many.picture)[".gpu"] == {"7", "9"}
    charts = by_kind(UpdateEncoder().full_update(many.picture))["charts"]["charts"]
    (loss,) = (chart for chart in charts if chart["name"] == "loss")
    assert all(low <= middle <= high for _, low, middle, high in loss["band"])
    assert len(loss["band"]) == many.tick


def test_curves_told_bit_by_bit_are_those_told_at_once() -> None:
    training, reported = Training({"rank": 16}), UpdateEncoder()
    known = {
        chart["name"]: chart["band"] for chart in by_kind(reported.full_update(training.picture))["charts"]["charts"]
    }
    for _ in range(5):
        for chart in by_kind(reported.updates(training.step())).get("charts", {"charts": []})["charts"]:
            known[chart["name"]] = chart["band"] if chart["full"] else known[chart["name"]] + chart["band"]
    at_once = by_kind(UpdateEncoder().full_update(training.picture))["charts"]["charts"]
    assert known["loss"] == next(chart["band"] for chart in at_once if chart["name"] == "loss")


def test_a_part_of_a_mesh_shows_its_own_ranks_only() -> None:
    reported = by_kind(UpdateEncoder((1, 3), {"dp": 2}).full_update(Training({"dp": 2, "tp": 2}).picture))
    assert (reported["layout"]["ranks"], reported["layout"]["axes"]) == ("1,3", [["dp", 2]])
    assert {ranks for _, ranks in reported["update"]["columns"]["state"]} == {"1,3"}


def test_memory_is_of_the_gpu_where_there_is_one_and_of_the_highest_peak_where_there_is_none() -> None:
    gpu = RankStatus(rank=0, rss_bytes=5, gpu_reserved_bytes=30, gpu_total_bytes=40)
    assert view.memory_usage(gpu, memory_scale=10) == (30, 40)
    assert view.memory_usage(RankStatus(rank=0, rss_bytes=5), memory_scale=10) == (5, 10)


def test_actors_are_one_row_each_of_the_ranks_that_are_shown() -> None:
    row = {
        "id": "a-1", "class": "A", "state": "living", "mailbox": 3, "running": "=apply", "seconds": 2.04, "messages": 5,
        "last_error": "step: ValueError: " + "x" * 1000,
    }  # fmt: skip
    rows = [{**row, "actor": "b", "rank": 0}, {**row, "actor": "a", "rank": 1}, {**row, "actor": "a", "rank": 0}]
    reported = view.actors_message(rows, (0,))["rows"]
    assert [(one["actor"], one["rank"]) for one in reported] == [("a", 0), ("b", 0)]
    assert (reported[0]["running"], reported[0]["seconds"], reported[0]["mailbox"]) == ("apply", 2.0, 3)
    assert reported[0]["error"].startswith("step: ValueError: xx")
    assert len(reported[0]["error"]) < 400
    light = {**row, "actor": "light", "rank": 2, "home": "procs-1a2b"}
    assert [one["rank"] for one in view.actors_message([*rows, light], (0,))["rows"]] == [0, 0, "procs-1a2b: 2"]
    quiet, busy = UpdateEncoder(), UpdateEncoder()
    busy.has_actors = True
    layouts = [by_kind(one.full_update(Training({"rank": 2}).picture))["layout"] for one in (quiet, busy)]
    assert [layout["actors"] for layout in layouts] == [False, True]


def test_the_layout_has_the_command_that_replays_the_last_failure() -> None:
    encoder = UpdateEncoder()
    assert by_kind(encoder.full_update(Training({"rank": 2}).picture))["layout"]["replay"] == ""
    encoder.replay_command = "meshbook replay failures/f3 --rank 1"
    changed = by_kind(encoder.updates(Training({"rank": 2}).picture))["layout"]
    assert changed["replay"] == "meshbook replay failures/f3 --rank 1"


def test_logs_are_text_without_a_terminals_orders() -> None:
    reported = view.logs_message(3, "\x1b[1;31mred\x1b[0m\r\n 10%\r 90%\r100%\n<b>\x1b]0;title\x07\x00", 1 << 16)
    assert reported["text"] == "red\n100%\n<b>"
    assert not reported["cut"]
    assert view.logs_message(3, "x" * 100, 100)["cut"]
    # A reset, a change of the character set, an eight-bit order, and a title that is never ended.
    assert view.logs_message(3, "a\x1bcb\x1b(0c\x9bd\n\x1b]title\nseen", 1 << 16)["text"] == "abcd\n\nseen"


def test_a_loss_that_is_no_number_any_more_is_told_as_json_can_say_it() -> None:
    training = Training({"rank": 4})
    picture = training.step()
    for rank in range(4):
        picture.scalars.put("loss", rank, 10_000, math.nan if rank else math.inf, picture.at)
    for reported in (UpdateEncoder(), UpdateEncoder(ranks=(0,)), UpdateEncoder(ranks=tuple(range(4)))):
        json.dumps(reported.full_update(picture), allow_nan=False)
    (loss,) = (
        one for one in by_kind(UpdateEncoder().full_update(picture))["charts"]["charts"] if one["name"] == "loss"
    )
    assert [loss["lines"][rank][-1] for rank in ("0", "1")] == [[10_000, "inf"], [10_000, "nan"]]


def test_stacks_are_a_tree_that_says_cells_and_marks_what_is_the_users() -> None:
    def snapshot(rank: int, line: int) -> RankSnapshot:
        frames = (Frame("<ipython-input-7-ab>", 9, "<module>"), Frame("<ipython-input-7-ab>", line, "train"))
        return RankSnapshot(
            rank=rank, file="<ipython-input-7-ab>", cell="cell 7", stacks=(ThreadStack("main", frames, is_main=True),)
        )

    reported = view.stacks_message(
        Stacks(tuple(snapshot(rank, 4 if rank == 2 else 5) for rank in range(4))), (0, 1, 2, 3)
    )
    (root,) = reported["tree"]
    assert (root["where"], root["ranks"], root["user"]) == ("cell 7, line 9", "0-3", True)
    assert [(node["where"], node["ranks"]) for node in root["children"]] == [
        ("cell 7, line 5", "0-1,3"),
        ("cell 7, line 4", "2"),
    ]
    assert "cell 7" in reported["text"]


@pytest.mark.parametrize("text", [None, 7, "all", "1-", "<b>"])
def test_ranks_that_are_no_ranks_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="list of ranks"):
        view.parse_ranks_in_mesh(text, (0, 1))


def test_ranks_that_there_are_not_are_left_out() -> None:
    assert view.parse_ranks_in_mesh("0-9", (0, 1)) == (0, 1)
    assert view.parse_ranks_in_mesh("", (0, 1)) == ()
