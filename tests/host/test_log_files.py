"""What ranks printed, on their host's disk: written, bounded, and searched in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshbook.host.log_files import HEADER, LogFiles
from meshbook.host.log_search import LogSearch, SearchRequest
from meshbook.wire.loop import Loop
from meshbook.wire.messages import KeptLogs, LogsFound, SearchLogs
from tests.host.test_beats import Clock


class Host:
    """Log files without ranks."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.folder = folder / "logs"
        self.files = LogFiles(Loop(self.clock), self.folder)

    def print(self, rank: int, text: str, *, kind: int = 1) -> None:
        self.files.append(rank, kind, text)
        self.clock.now += 2.0

    def search(self, pattern: str = "", **options: Any) -> list[tuple[int, str]]:
        """Ranks and texts of the hits."""
        return [
            (match.line.ranks[0], match.line.text) for found in self.reports(pattern, **options) for match in found.hits
        ]

    def reports(self, pattern: str = "", **options: Any) -> list[LogsFound]:
        self.files.flush()
        command = SearchLogs(call="c", pattern=pattern, **options)  # type: ignore[arg-type]
        request = SearchRequest(str(self.folder), command, self.files.kept(), mergeable=False)
        return list(LogSearch(request).run())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_lines_are_found_by_rank_and_in_the_order_of_time(host: Host, tmp_path: Path) -> None:
    host.print(1, "loss=1\nother\n")
    host.print(0, "loss=2\n")
    host.print(1, "loss=3\n", kind=2)
    assert host.search("loss=[0-9]") == [(1, "loss=1"), (0, "loss=2"), (1, "loss=3")]
    assert host.search("loss", ranks=(0,)) == [(0, "loss=2")]
    assert host.search(r"^o.*r$") == [(1, "other")]


def test_a_line_that_is_printed_in_pieces_is_one_and_so_are_a_progress_bars_states(host: Host, tmp_path: Path) -> None:
    for piece in ("lo", "ss=", "nan\n", "\r 10%", "\r 90%", "\r100%"):
        host.print(0, piece)
    assert host.search("loss=nan") == [(0, "loss=nan")]
    assert host.search("%") == [(0, "100%")]


def test_colours_do_not_hide_what_is_searched_for(host: Host, tmp_path: Path) -> None:
    host.print(0, "loss=\x1b[31mnan\x1b[0m\n")
    assert host.search("loss=nan$") == [(0, "loss=nan")]


def test_context_is_of_the_same_rank_and_overlapping_hits_are_one_block(host: Host, tmp_path: Path) -> None:
    host.print(0, "a\nb\nHIT 1\nc\nHIT 2\nd\ne\nf\nHIT 3\n")
    host.print(1, "of another\n")
    found = [match for report in host.reports("HIT", context=1, fold="off") for match in report.hits]
    assert [(match.line.text, match.matching) for match in found] == [
        ("b\nHIT 1\nc\nHIT 2\nd", (1, 3)),
        ("f\nHIT 3", (1,)),
    ]


def test_no_line_from_before_the_time_is_shown(host: Host, tmp_path: Path, monkeypatch: Any) -> None:
    for number in range(5):
        host.print(0, f"line {number}\n")
    monkeypatch.setattr("meshbook.host.log_search.wall", host.clock.wall)
    assert host.search("line", since_s=4.5) == [(0, "line 3"), (0, "line 4")]


def test_the_newest_hits_are_returned_and_the_others_counted(host: Host, tmp_path: Path) -> None:
    host.print(0, "".join(f"line {number}\n" for number in range(10)))
    first, last = host.reports("line", limit=3)
    assert [match.line.text for match in first.hits] == ["line 7", "line 8", "line 9"]
    assert (last.num_left_out, last.ended) == (7, True)


def test_what_is_over_the_limit_is_the_oldest_of_the_rank_that_printed_most(host: Host, tmp_path: Path) -> None:
    host.files.set_limit(200_000)
    host.print(0, "quiet\n")
    for number in range(100):
        host.print(1, f"{number:2} {'x' * 5000}\n")
        host.files.flush()
    kept = host.files.kept()
    assert kept.num_bytes <= 200_000
    assert kept.num_bytes + kept.dropped_bytes == HEADER.size + 6 + 100 * (HEADER.size + 5004)
    assert sum(path.stat().st_size for path in host.folder.iterdir()) == kept.num_bytes
    assert host.search("quiet") == [(0, "quiet")]
    numbers = [int(text.split()[0]) for _, text in host.search("xxx", fold="off")]
    assert numbers == list(range(numbers[0], 100))  # the newest, none of them cut
    (report,) = [report for report in host.reports("quiet") if report.kept]
    assert report.kept is not None
    assert report.kept.since == 1000.0


def test_a_host_that_is_started_again_goes_on_with_the_files_of_the_former(host: Host, tmp_path: Path) -> None:
    host.print(0, "before\n")
    host.files.flush()
    again = Host(tmp_path)
    again.clock.now = 2000.0
    again.print(0, "after\n")
    assert again.search() == [(0, "before"), (0, "after")]


def test_a_standby_writes_again_what_the_supervisor_may_not_have_written(host: Host, tmp_path: Path) -> None:
    host.print(0, "one\n")
    host.files.flush()
    host.print(0, "two\n")
    host.files.flush()
    path = host.folder / "0-1"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])  # it was killed as it wrote
    host.files.take_over()
    assert path.read_bytes() == whole
    assert host.search() == [(0, "one"), (0, "two")]


def test_what_the_disk_refuses_is_counted_and_the_rest_is_found(host: Host, tmp_path: Path) -> None:
    host.print(0, "one\n")
    host.files.flush()
    path = host.folder / "0-1"
    path.rename(tmp_path / "aside")
    path.mkdir()  # refuses
    host.print(0, "lost\n")
    host.files.flush()
    path.rmdir()
    (tmp_path / "aside").rename(path)
    host.print(0, "two\n")
    assert host.search() == [(0, "one"), (0, "two")]
    kept = host.files.kept()
    assert kept.unwritten_bytes == HEADER.size + len("lost\n")
    assert kept.problem == "Is a directory"


def test_without_output_there_is_nothing_and_no_folder(host: Host, tmp_path: Path) -> None:
    (report,) = host.reports("anything")
    assert report.kept == KeptLogs(host="", since=None, num_bytes=0, limit_bytes=256 << 20)
    assert not host.folder.exists()
