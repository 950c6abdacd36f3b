"""When output is sent: batched, and within a budget."""

from __future__ import annotations

from meshbook.rank.output.output_pacing import BATCH_S, BURST_BYTES, BYTES_PER_S, OutputPacer


def test_output_is_sent_once_per_batch() -> None:
    pacer = OutputPacer(0.0)
    assert pacer.output_ready(1.0) == BATCH_S
    assert pacer.output_ready(1.01) is None
    assert pacer.deadline == 1.0 + BATCH_S
    assert pacer.flush_due(1.03) is None
    assert pacer.deadline is None
    assert pacer.output_ready(1.1) == BATCH_S


def test_beyond_a_burst_output_waits_for_its_rate() -> None:
    pacer = OutputPacer(0.0)
    pacer.output_ready(0.0)
    assert pacer.flush_due(0.0) is None
    pacer.sent(BURST_BYTES + BYTES_PER_S)
    pacer.output_ready(0.0)
    delay = pacer.flush_due(0.5)
    assert delay is not None
    assert delay > BATCH_S
    assert pacer.output_ready(0.6) is None  # it is scheduled
    assert pacer.flush_due(1.1) is None


def test_an_idle_rank_saves_up_no_more_than_a_burst() -> None:
    pacer = OutputPacer(0.0)
    assert pacer.flush_due(1e6) is None
    pacer.sent(BURST_BYTES)
    assert pacer.flush_due(1e6) is not None
