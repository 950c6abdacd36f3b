"""How meshes, ranks and cells read as tables."""

from __future__ import annotations

import time
from typing import get_args, get_type_hints

import pytest

from meshbook.controller.tables import (
    STATES,
    MeshStatus,
    Table,
    first_line,
    format_age,
    format_bytes,
    format_seconds,
    history_table,
    status_table,
)
from meshbook.wire.messages import HistoryEntry, MeshInfo, MeshSpec, RankInfo

NOW = 1_000_000.0


def rank(number: int, **known: object) -> RankInfo:
    reported: dict[str, object] = {"rank": number, "state": "idle", "host": "box", "pid": 100 + number, **known}
    return RankInfo(**reported)  # type: ignore[arg-type]


def mesh(ranks: list[RankInfo], **known: object) -> MeshInfo:
    reported: dict[str, object] = {
        "name": "m",
        "spec": MeshSpec(axes={"rank": len(ranks)}),
        "ranks": tuple(ranks),
        "supervisor_pid": 1,
        "started_at": NOW - 300,
        "group_generation": 1,
        "groups": "ready",
        "clients": (),
        "names": (),
        "backend": "gloo",
        **known,
    }
    return MeshInfo(**reported)  # type: ignore[arg-type]


def text(info: MeshInfo) -> list[str]:
    return str(status_table(info, now=NOW)).splitlines()


def test_a_table_is_aligned_and_leaves_out_empty_columns() -> None:
    table = Table("Head.", ("a", "empty", "long name"), (("1", "", "x"), ("22", "", "")), ("Note.",))
    assert str(table) == "Head.\na   long name\n1   x\n22\nNote."


def test_the_status_of_a_mesh_shows_itself_as_its_table_and_keeps_its_fields() -> None:
    status = MeshStatus.of(mesh([rank(0), rank(1)], started_at=time.time()))
    assert repr(status).splitlines()[0] == "Mesh m: 2 ranks, process group ready (gloo), up 0 s, 0 cells run."
    assert "<th" in status._repr_html_()
    assert [one.pid for one in status.ranks] == [100, 101]


def test_a_table_in_html_escapes_what_it_shows() -> None:
    table = Table("A <b>", ("col",), (("<script>",),))
    assert table._repr_html_() == (
        "<p>A &lt;b&gt;</p><table><thead><tr><th style='text-align: left'>col</th></tr></thead><tbody>"
        "<tr><td style='text-align: left'>&lt;script&gt;</td></tr></tbody></table>"
    )


def test_every_state_that_a_rank_can_have_has_words() -> None:
    assert set(STATES) == set(get_args(get_type_hints(RankInfo)["state"]))


def test_a_rank_says_what_it_does_in_one_line() -> None:
    lines = text(
        mesh(
            [
                rank(0, rss_bytes=200 << 20, peak_rss_bytes=3 << 30),
                rank(1, state="busy", cell="cell 7", line=3),
                rank(2, state="silent", cell="cell 7", beat_age_s=12.0),
                rank(3, state="dead", exit="was killed by SIGKILL", rss_bytes=5),
            ],
            cells_run=7,
            names=("x", "model"),
            clients=("kernel (pid 5)",),
        )
    )
    assert lines == [
        "Mesh m: 4 ranks, process group ready (gloo), up 5 min, 7 cells run.",
        "rank  state                                            device  memory   peak     host  pid",
        "0     idle                                             cpu     200 MiB  3.0 GiB  box   100",
        "1     busy, cell 7 line 3                              cpu                       box   101",
        "2     no sign of life, cell 7, last heard of 12 s ago  cpu                       box   102",
        "3     dead, was killed by SIGKILL                      cpu                       box   103",
        "Names on the ranks: x, model.",
        "Attached: kernel (pid 5).",
        "Rank 3 is gone; cells run on the others (%%mesh --ranks 0-2), %mesh heal puts a new process in its place.",
    ]


def test_many_ranks_that_look_the_same_share_a_row() -> None:
    ranks = [rank(number, rss_bytes=(100 + number) << 20) for number in range(64)]
    ranks[9] = rank(9, state="dead", exit="exited with status 1")
    lines = text(mesh(ranks))
    assert lines[1:4] == [
        "rank       state                       device  memory              host  pid",
        "0-8,10-63  idle                        cpu     100 MiB to 163 MiB  box",
        "9          dead, exited with status 1  cpu                         box   109",
    ]


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"groups": "broken"}, "process group broken (gloo)"),
        ({"groups": "forming", "backend": None}, "the process group is being formed"),
        ({"groups": "none", "spec": MeshSpec(axes={"rank": 1}, process_group=False)}, "no process group,"),
        ({"spec": MeshSpec(axes={"dp": 1, "tp": 1})}, "1 rank (dp=1, tp=1), process"),
        ({"spec": MeshSpec(axes={"rank": 1}, num_hosts=4)}, "1 rank on 4 simulated hosts, process"),
        (
            {"spec": MeshSpec(axes={"rank": 4}, num_hosts=2, on="ssh://a,b", engine="ssh")},
            "4 ranks on 2 machines, process",
        ),
    ],
)
def test_the_heading_says_what_kind_of_mesh_it_is(known: dict[str, object], said: str) -> None:
    assert said in text(mesh([rank(0)], **known))[0]


def test_a_supervisor_without_ranks_says_how_to_start_them() -> None:
    assert text(mesh([], spec=None)) == ["Mesh m: no ranks yet, up 5 min.", "Start them with %mesh start -n 4."]


def test_many_names_are_counted() -> None:
    lines = text(mesh([rank(0)], names=tuple(f"n{number}" for number in range(30))))
    assert lines[-1].startswith("Names on the ranks: n0, n1, ")
    assert lines[-1].endswith("n19 and 10 more.")


def test_a_history_shows_when_how_long_and_how() -> None:
    entries = [
        HistoryEntry(3, "cell 3", "%%mesh --setup\n\nx = 1", (0, 1), NOW, 0.0042, "ok", setup=True, num_lines=1312),
        HistoryEntry(4, "cell 4", "x", (0,), NOW, 1.0, "ok", num_lines=0),
        HistoryEntry(None, "call", "", (0,), NOW, None, "running"),
    ]
    began = time.strftime("%H:%M:%S", time.localtime(NOW))
    assert [line.split() for line in str(history_table(entries, now=NOW + 90)).splitlines()] == [
        ["cell", "began", "took", "ranks", "ended", "output", "source"],
        ["3", began, "4", "ms", "0-1", "ok,", "setup", "1,312", "lines", "x", "=", "1"],
        ["4", began, "1.0", "s", "0", "ok", "kept", "x"],
        [began, "90.0", "s", "so", "far", "0", "running"],
    ]
    assert str(history_table([])) == "No cell has run on this mesh."


def test_a_history_names_who_ran_the_cells_where_several_did() -> None:
    person = HistoryEntry(3, "cell 3", "x", (0, 1), NOW, 1.0, "ok", by="kernel")
    agent = HistoryEntry(None, "", "%mesh heal", (), NOW, 0.0, "sent", by="mcp:claude-code")
    assert "kernel" not in str(history_table([person]))
    lines = str(history_table([person, agent])).splitlines()
    assert lines[0].split() == ["cell", "began", "took", "ranks", "ended", "by", "source"]
    assert lines[2].split()[1:] == ["0", "ms", "sent", "mcp:claude-code", "%mesh", "heal"]


def test_a_cells_first_line_is_the_one_that_says_something() -> None:
    assert first_line("\n# remark\n%%mesh dp=0\nloss = step()\nmore") == "loss = step()"
    assert first_line("# only a remark") == "# only a remark"
    assert first_line("  \n") == ""
    assert first_line("x" * 100) == "x" * 59 + "…"


def test_times_and_sizes_read_as_people_say_them() -> None:
    assert [format_age(s) for s in (-1, 0.5, 100, 600, 4000, 360_000)] == [
        "0 s",
        "0 s",
        "100 s",
        "10 min",
        "1 h 06 min",
        "4 days 4 h",
    ]
    assert [format_seconds(s) for s in (0.0004, 0.05, 1.26, 300)] == ["0 ms", "50 ms", "1.3 s", "5 min"]
    assert [format_bytes(n) for n in (5, 2048, 10 << 20, 3 << 29, 1 << 45)] == [
        "5 B",
        "2 KiB",
        "10 MiB",
        "1.5 GiB",
        "32768.0 GiB",
    ]
