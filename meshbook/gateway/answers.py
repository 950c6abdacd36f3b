"""What a mesh knows, as JSON that is folded by rank and bounded in size. Pure: data in, dicts out.

What programs on the ranks have written, or could have chosen (output, errors, names of files and functions), is under
the key `untrusted_output`: an agent takes it for data, whatever it says. What did not fit is under `left_out`: how much
it is, and how to get it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

import msgspec

from meshbook.controller.console import Console
from meshbook.controller.past_cells import end_items
from meshbook.controller.subscription import MeshSnapshot
from meshbook.diagnose.findings import Finding
from meshbook.fold import rendering
from meshbook.ids import Ranks, format_ranks
from meshbook.wire.messages import FoldedItem, HistoryEntry, KeptCell, Line, MeshInfo, NewOutput, OpenCall, RankStatus

T = TypeVar("T")
Answer = dict[str, Any]

# Characters of one answer: some 3,000 tokens.
MAX_CHARS = 12_000
_MAX_SOURCE_CHARS = 300
_MAX_MEMORY_ROWS = 32
_MAX_NAMES = 60
_MAX_POINTS = 20

_MEMORY_COLUMNS = (
    "rss_bytes", "peak_rss_bytes", "gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_peak_bytes", "gpu_used_bytes",
    "gpu_total_bytes",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Bounds


def fit(items: Sequence[T], max_chars: int) -> list[T]:
    """Return the first items that fit into so many characters of JSON, one at least."""
    kept: list[T] = []
    left = max_chars
    for item in items:
        left -= len(msgspec.json.encode(item))
        if left < 0 and kept:
            break
        kept.append(item)
    return kept


def cut(text: str, max_chars: int) -> str:
    """Return the text, or its beginning and its end with a line between them that says how much is left out."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 4
    tail = max_chars - head
    return f"{text[:head]}\n… {len(text) - max_chars:,} characters left out …\n{text[-tail:]}"


def without_empty(fields: Mapping[str, Any]) -> Answer:
    """Return the fields that say something."""
    return {name: value for name, value in fields.items() if value not in (None, "", (), [], {})}


def utc(at: float) -> str:
    """Format a wall-clock time: `2026-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---------------------------------------------------------------------------------------------------------------------
# State


def mesh_answer(name: str, info: MeshInfo | None, trouble: str, now: float, started_at: float) -> Answer:
    """Return one mesh of a list."""
    fields: Answer = {"mesh": name, "up_s": round(now - started_at), "trouble": trouble}
    if info is not None:
        states = [rank.state for rank in info.ranks]
        fields |= {
            "axes": dict(info.spec.axes) if info.spec is not None else None,
            "num_ranks": len(info.ranks),
            "states": {state: states.count(state) for state in dict.fromkeys(states)},
            "attached": list(info.clients),
        }
    return without_empty(fields)


def status_answer(snapshot: MeshSnapshot, info: MeshInfo, running: Iterable[OpenCall], ranks: Ranks) -> Answer:
    """Return what the ranks do, a row for all that do the same."""
    chosen = [rank for rank in snapshot.ranks if rank.rank in set(ranks)]
    rows = _fold_ranks(chosen, snapshot.at)
    shown = fit(rows, MAX_CHARS // 2)
    names = list(info.names)
    return without_empty(
        {
            "mesh": info.name,
            "axes": dict(info.spec.axes) if info.spec is not None else None,
            "process_group": info.groups,
            "backend": info.backend,
            "up_s": round(snapshot.at - info.started_at),
            "cells_run": info.cells_run,
            "attached": list(info.clients),
            "running": [_open_call(call) for call in running],
            "ranks": shown,
            "findings": [finding_answer(one) for one in snapshot.findings],
            "names_on_ranks": names[:_MAX_NAMES],
            "left_out": _left_out(
                (len(rows) - len(shown), "rows of ranks: ask with ranks"),
                (len(names) - _MAX_NAMES, "names"),
            ),
        }
    )


def _open_call(call: OpenCall) -> Answer:
    return without_empty(
        {
            "cell": call.label,
            "ticket": call.call,
            "ranks": format_ranks(call.ranks),
            "seconds": round(call.seconds, 1),
            "client_is_gone": call.orphaned or None,
        }
    )


def _fold_ranks(ranks: Iterable[RankStatus], now: float) -> list[Answer]:
    """Return a row for all ranks in the same state, cell, line and collective; of numbers the largest."""
    groups: dict[tuple[Any, ...], list[RankStatus]] = {}
    for rank in ranks:
        key = (rank.state, rank.cell, rank.line, rank.waits_in, rank.host, rank.exit, rank.awaiting_input)
        groups.setdefault(key, []).append(rank)
    rows = []
    for (state, cell, line, waits_in, host, exit, awaiting_input), group in groups.items():
        since = min((rank.waits_since for rank in group if rank.waits_since is not None), default=None)
        rows.append(
            without_empty(
                {
                    "ranks": format_ranks(rank.rank for rank in group),
                    "state": state,
                    "cell": cell,
                    "line": line,
                    "waits_in": waits_in,
                    "waits_s": round(now - since, 1) if since is not None else None,
                    "asks_for_input": awaiting_input or None,
                    "host": host,
                    "exit": exit,
                    "last_heartbeat_s_ago": max(rank.beat_age_s for rank in group) or None,
                    "gil_held_s": max((rank.gil_lag_s or 0.0 for rank in group), default=0.0) or None,
                }
            )
        )
    return rows


def state_rows(ranks: Iterable[RankStatus]) -> list[Answer]:
    """Return what ranks do, as `status_answer`, without the numbers that change all the time."""
    rows = _fold_ranks(ranks, 0.0)
    changing = ("waits_s", "last_heartbeat_s_ago", "gil_held_s")
    return [{name: value for name, value in row.items() if name not in changing} for row in rows]


def finding_answer(finding: Finding) -> Answer:
    """Return a finding; its sentences quote what programs have written."""
    return without_empty(
        {
            "kind": finding.kind,
            "ranks": format_ranks(finding.ranks) if finding.ranks else None,
            "waiting_ranks": format_ranks(finding.others) if finding.others else None,
            "sure": finding.sure,
            "cell": finding.cell,
            "line": finding.line,
            "next_step": finding.next_step,
            "waits": [
                {"ranks": format_ranks(ranks), "for": format_ranks(for_ranks), "in": operation}
                for ranks, for_ranks, operation in finding.waits
            ],
            "untrusted_output": without_empty(
                {"sentence": finding.sentence, "evidence": list(finding.evidence), "file": finding.file}
            ),
        }
    )


def findings_answer(findings: Sequence[Finding], **fields: Any) -> Answer:
    answers = [finding_answer(one) for one in findings]
    shown = fit(answers, MAX_CHARS)
    left_out = _left_out((len(answers) - len(shown), "findings, which are less important"))
    return {"findings": shown, **without_empty({**fields, "left_out": left_out})}


def memory_answer(snapshot: MeshSnapshot, ranks: Ranks) -> Answer:
    """Return the memory of each rank in bytes; of many ranks those with the most, and the spread of all."""
    chosen = [rank for rank in snapshot.ranks if rank.rank in set(ranks)]
    columns = [name for name in _MEMORY_COLUMNS if any(getattr(rank, name) is not None for rank in chosen)]
    by_use = sorted(chosen, key=lambda rank: (-(rank.gpu_allocated_bytes or 0), -(rank.rss_bytes or 0)))
    shown = sorted(by_use[:_MAX_MEMORY_ROWS], key=lambda rank: rank.rank)
    spread = {}
    for name in columns:
        values = [value for rank in chosen if (value := getattr(rank, name)) is not None]
        spread[name] = {"min": min(values), "median": median(values), "max": max(values)}
    return without_empty(
        {
            "columns": ["rank", "host", "device", *columns],
            "rows": [[rank.rank, rank.host, rank.device, *(getattr(rank, name) for name in columns)] for rank in shown],
            "spread": spread if len(chosen) > 1 else None,
            "left_out": _left_out((len(chosen) - len(shown), "ranks that use less: ask with ranks")),
        }
    )


def stacks_answer(text: str, problems: Mapping[int, str], moved: Mapping[int, bool], silent: Sequence[str]) -> Answer:
    """Return stacks as a tree, in which ranks with equal frames share a branch."""
    left_out = f"{len(text) - MAX_CHARS:,} characters: ask for some ranks" if len(text) > MAX_CHARS else None
    return without_empty(
        {
            "moved_ranks": format_ranks(rank for rank, is_moving in moved.items() if is_moving) if moved else None,
            "still_ranks": format_ranks(rank for rank, is_moving in moved.items() if not is_moving) if moved else None,
            "problems": [f"rank {rank}: {problem}" for rank, problem in list(problems.items())[:8]],
            "silent_hosts": list(silent),
            "untrusted_output": cut(text, MAX_CHARS),
            "left_out": left_out,
        }
    )


def metrics_answer(snapshot: MeshSnapshot, ranks: Ranks, name: str | None) -> Answer:
    """Return the numbers that ranks passed to `meshbook.log`: the last of each rank, and a thinned curve of the mean.

    Args:
        name: of one of them; None: all.
    """
    curves = snapshot.scalars
    names = [one for one in curves.names if name in (None, one)]
    found = []
    for one in names:
        points = {
            rank: rows for rank in curves.ranks_of(one) if rank in set(ranks) and (rows := curves.points(one, rank))
        }
        if points:
            found.append(_metric(one, points))
    shown = fit(found, MAX_CHARS)
    return without_empty(
        {"metrics": shown, "left_out": _left_out((len(found) - len(shown), "metrics: ask with name"))}
    ) or {"metrics": []}


def _metric(name: str, points: Mapping[int, Sequence[tuple[int, float, float]]]) -> Answer:
    by_value: dict[tuple[int, float], list[int]] = {}
    by_step: dict[int, list[float]] = {}
    for rank, rows in points.items():
        step, value, _ = rows[-1]
        by_value.setdefault((step, value), []).append(rank)
        for step, value in _latest_run(rows):
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    stride = max(1, -(-len(steps) // _MAX_POINTS))
    thinned = sorted({*steps[::stride], steps[-1]})
    last = [
        {"ranks": format_ranks(those), "step": step, "value": _number(value)}
        for (step, value), those in by_value.items()
    ]
    return without_empty(
        {
            "name": name,
            "last": last[:8],
            "curve": [[step, _number(sum(by_step[step]) / len(by_step[step]))] for step in thinned],
            "curve_is": "step, mean over ranks, of the latest run",
            "left_out": _left_out(
                (len(last) - 8, "ranks' last values: ask with ranks"), (len(steps) - len(thinned), "steps")
            ),
        }
    )


def _latest_run(rows: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """Return step and value since the step last went back, as it does when a training begins anew."""
    found: list[tuple[int, float]] = []
    for step, value, _ in rows:
        if found and step < found[-1][0]:
            found.clear()
        found.append((step, value))
    return found


def _number(value: float) -> float | str:
    """Return a number as JSON has it, with six digits: JSON has neither NaN nor infinity."""
    rounded = float(f"{value:.6g}")
    return rounded if rounded - rounded == 0 else str(rounded)


# ---------------------------------------------------------------------------------------------------------------------
# Cells and their output


def history_answer(entries: Sequence[HistoryEntry], limit: int, skip: int) -> Answer:
    """Return the latest cells, the oldest of them first, and what agents did beside cells."""
    end = max(0, len(entries) - skip)
    chosen = entries[max(0, end - limit) : end]
    rows = [
        without_empty(
            {
                "cell": entry.number,
                "ticket": entry.call,
                "by": entry.by,
                "began": utc(entry.started_at),
                "seconds": round(entry.seconds, 2) if entry.seconds is not None else None,
                "ranks": format_ranks(entry.ranks) if entry.ranks else None,
                "status": entry.status,
                "setup": entry.setup or None,
                "lines": entry.num_lines,
                "source": cut(entry.source, _MAX_SOURCE_CHARS),
            }
        )
        for entry in chosen
    ]
    shown = fit(rows[::-1], MAX_CHARS)[::-1]
    older = end - len(shown)
    return {
        "cells": shown,
        **without_empty({"left_out": f"{older} older: ask with skip={skip + len(shown)}" if older > 0 else None}),
    }


def logs_answer(output: NewOutput, since: int | None) -> Answer:
    """Return output of cells in the order in which it was printed, and the cursor for what follows it.

    Of more than fits, the newest is returned; with a cursor the oldest.
    """
    by_call = {kept.entry.call: kept for kept in output.cells}
    items = [one for one in output.items if one.call in by_call]  # of older cells the history has nothing any more
    texts = [cut(_item_text(one.item, by_call[one.call].entry.ranks), MAX_CHARS) for one in items]
    num_fitting = _num_fitting(texts[::-1] if since is None else texts)
    first, end = (len(texts) - num_fitting, len(texts)) if since is None else (0, num_fitting)
    groups: list[Answer] = []
    for one, text in zip(items[first:end], texts[first:end], strict=True):
        if text:
            group = _output_group(by_call[one.call], is_live=one.place == 0)
            if not groups or group.items() - groups[-1].items():
                groups.append({**group, **({"from": utc(one.at)} if one.place else {}), "untrusted_output": ""})
            groups[-1]["untrusted_output"] += text
    notices = [_item_text(item, kept.entry.ranks).strip() for kept in output.cells for item in kept.items]
    if first:
        notices.append(f"{first} earlier lines: ask with a smaller cursor, 0 for all that is kept")
    cursor = output.last_place
    if end < len(texts) or output.num_left:
        cursor = max((one.place for one in items[:end]), default=since or 0)
        notices.append(f"what follows: ask with cursor={cursor}")
    return {"output": groups, "cursor": cursor, **without_empty({"left_out": "; ".join(notices)})}


def _num_fitting(texts: Sequence[str]) -> int:
    """Return how many of the first texts fit into an answer, one at least."""
    total = 0
    for number, text in enumerate(texts):
        total += len(text)
        if total > MAX_CHARS and number:
            return number
    return len(texts)


def _output_group(kept: KeptCell, *, is_live: bool) -> Answer:
    entry = kept.entry
    return without_empty(
        {
            "cell": entry.label or entry.number,
            "ticket": entry.call,
            "by": entry.by,
            "ranks": format_ranks(entry.ranks),
            "still_being_written": is_live or None,
        }
    )


def _item_text(item: FoldedItem, ranks: Ranks) -> str:
    if isinstance(item, Line):
        return rendering.plain_text(rendering.render_line(item, ranks, colour=False)) + (item.end or "\n")
    console = Console(ranks, echo=False)
    console((item,))
    if console.text:
        return console.text
    data = getattr(getattr(item, "item", None), "data", None)
    return f"({', '.join(data)})\n" if data else ""


def result_answer(output: NewOutput, since: int | None) -> Answer:
    """Return how a cell ended, or that it runs, and what it printed after a place."""
    (kept,) = output.cells
    entry, finished = kept.entry, kept.finished
    logs = logs_answer(output, since)
    text = "".join(group["untrusted_output"] for group in logs["output"])
    end: Answer = {}
    if finished is not None:
        is_ok = all(part.outcome.status == "ok" for part in finished.outcomes)
        items = end_items(finished, entry.ranks, entry.label or "the cell")
        shown = rendering.plain_text("".join(_item_text(item, entry.ranks) for item in items))
        end = {"value" if is_ok else "error": cut(shown.rstrip("\n"), MAX_CHARS // 2)}
    return {
        "ticket": entry.call,
        "cell": entry.number,
        "status": entry.status,
        **without_empty(
            {
                "by": entry.by,
                "ranks": format_ranks(entry.ranks),
                "seconds": round(entry.seconds, 2) if entry.seconds is not None else None,
                "untrusted_output": without_empty({"printed": text, **end}),
                "left_out": logs.get("left_out"),
            }
        ),
        "cursor": logs["cursor"],
    }


def _left_out(*counts: tuple[int, str]) -> str:
    return "; ".join(f"{count:,} {what}" for count, what in counts if count > 0)
