"""What the table of faults decides, driven by plain reports of ranks."""

from __future__ import annotations

from typing import Any

from meshbook.tensors.faults import MISSING, FaultTable


def report(number: int, ename: str = "IndexError", **changes: Any) -> dict[str, Any]:
    fault = {"number": number, "ename": ename, "evalue": "no such row", "trace": "", "interrupted": False}
    return {**fault, "secondary": False, "lost": (), "spared": {}, "begun": (), **changes}


def table_after(*reports: tuple[tuple[int, ...], dict[str, Any]], ordinal: int = 0) -> FaultTable:
    table = FaultTable(ranks=(0, 1))
    table.update(ordinal, [(ranks, table.register(found, ranks), found) for ranks, found in reports])
    return table


def test_a_table_is_clear_until_ranks_report_ids_without_a_value() -> None:
    assert table_after().is_clear
    table = table_after(((0,), report(3, lost=(7,))))
    assert not table.is_clear
    assert 7 in table
    assert table.is_lost(7)
    assert 8 not in table


def test_an_id_that_kept_an_earlier_value_is_not_lost() -> None:
    table = table_after(((0, 1), report(3, spared={7: 2})))
    assert 7 in table
    assert not table.is_lost(7)
    assert table.of([7, 8])[7].skipped_writes == {0: 2, 1: 2}
    assert list(table.of([7, 8])) == [7]


def test_the_latest_reports_replace_those_of_earlier_batches() -> None:
    table = table_after(((0,), report(3, lost=(7,))))
    table.update(1, [])
    assert table.is_clear


def test_what_a_batch_to_come_overwrites_stays_clear_until_that_batch_has_ended() -> None:
    found = report(3, lost=(7,))
    table = table_after(((0,), found))
    table.mark_overwritten([7], ordinal=2)
    assert table.is_clear
    table.update(1, [((0,), table.register(found, (0,)), found)])  # a batch from before
    assert 7 not in table
    table.update(2, [((0,), table.register(found, (0,)), found)])
    assert 7 in table


def test_of_two_faults_that_reached_an_id_the_cause_is_told() -> None:
    secondary = report(5, "RuntimeError", secondary=True, lost=(7,))
    table = table_after(((1,), secondary), ((0,), report(3, lost=(7,))))
    assert table.of([7])[7].fault.number == 3


def test_an_error_of_a_secondary_fault_names_its_cause_and_reports_each_fault_once() -> None:
    secondary = report(5, "RuntimeError", secondary=True, lost=(8,))
    table = table_after(((0,), report(3, lost=(7,))), ((1,), secondary))
    error = table.error_of(8)
    assert error.failures[0].ename == "IndexError"
    assert error.failures[0].ranks == (0,)
    assert all(known.fault.is_reported for known in table.of([7]).values())


def test_parts_that_were_lost_long_ago_are_not_the_cause_of_a_later_fault() -> None:
    secondary = report(5, "RuntimeError", secondary=True, lost=(8,))
    table = table_after(((0,), report(-1, MISSING, spared={7: 1}, begun=(7,))), ((1,), secondary))
    assert table.error_of(8).failures[0].ename == "RuntimeError"


def test_an_id_that_all_ranks_left_unchanged_is_usable_once_its_fault_is_known() -> None:
    table = table_after(((0, 1), report(3, spared={7: 1})))
    assert table.separate_half_written() == []  # nobody has been told
    table.error_of(7)
    assert table.separate_half_written() == [7]


def test_an_id_that_some_ranks_changed_is_half_written_until_it_is_overwritten() -> None:
    for found in (report(3, spared={7: 1}, interrupted=True), report(3, spared={7: 1}, begun=(7,), interrupted=True)):
        ranks = (0, 1) if found["begun"] else (0,)
        table = table_after((ranks, found))
        assert table.separate_half_written() == []
        assert table.is_half_written(7)
        assert "changed on some ranks and not on others" in str(table.error_of(7))
        table.mark_overwritten([7], ordinal=1)
        assert table.is_clear


def test_old_faults_are_forgotten() -> None:
    table = FaultTable(ranks=(0,))
    first = table.register(report(0), (0,))
    for number in range(1, 1001):
        table.register(report(number), (0,))
    assert table.register(report(0), (0,)) is not first


def test_a_fault_has_the_call_site_of_its_operation() -> None:
    table = FaultTable(ranks=(0,))
    code = report.__code__
    sites = [((code, number),) for number in range(3)]
    assert table.register(report(11), (0,), first_op=10, call_sites=sites).call_site == sites[1]
    assert table.register(report(13), (0,), first_op=10, call_sites=sites).call_site == ()


def test_a_traceback_of_a_rank_is_told_if_it_has_lines_of_the_user_or_is_a_defect() -> None:
    torchs = (
        'Traceback (most recent call last):\n  File "/v/site-packages/torch/_ops.py", line 875, in __call__\n    x()\n'
    )
    users = f'{torchs}  File "/home/me/net.py", line 3, in forward\n    y()\n'

    def shown(**changes: Any) -> str:
        table = FaultTable(ranks=(0,))
        return str(table.error_from(table.register(report(1, **changes), (0,))))

    assert "_ops.py" not in shown(trace=torchs)
    assert "net.py" in shown(trace=users)
    assert "_ops.py" in shown(trace=torchs, ename="AssertionError")
