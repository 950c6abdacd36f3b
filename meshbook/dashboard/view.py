"""A mesh's picture as messages for a front end. Pure.

A widget in a notebook and a page of its own get the same messages and draw them with the same modules (`widgets/`).
They are plain data with a `kind`:

    layout       mesh, axes, ranks ("0-1023"), backend; before anything else, and when it changes
    update       columns: {name: [[value, "0-3,7"], ...]}, of the ranks whose value changed; `full`: of all
    findings     what is wrong, in words, worst first
    charts       curves over time (names with a leading dot: what ranks measure) or steps: the range of all ranks, and
                 a line for each rank followed; what is new, or `full`
    collectives  the last ones of some ranks, in seconds ago, and who waits for whom
    stacks       a merged tree, with `text` to copy
    logs         the last output of one rank
    actors       one row for each actor on the ranks that are shown
    told         one sentence about something that was asked for
    gone         the mesh has ended

A value is sent with the ranks that have it, because ranks mostly agree: a thousand ranks that run one line are a few
bytes. What is said twice does no harm, so that everything can be said again now and then: a page that was opened while
its messages waited behind a cell needs not ask.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from meshbook.controller.looking import Stacks
from meshbook.controller.onlooker import Picture
from meshbook.diagnose.code import cell_of, is_cell, short
from meshbook.diagnose.findings import Finding, as_text
from meshbook.diagnose.kinds import FINE
from meshbook.diagnose.tree import Node, SourceOf, says_little
from meshbook.ids import Ranks, format_ranks, name_ranks, parse_ranks
from meshbook.supervisor.watching import CollectiveNow, RankNow
from meshbook.wire.messages import ACTOR_THREAD, REMOTE_OPERATION

Message = dict[str, Any]

# Points of a curve that a page keeps: one for two or three of its pixels.
POINTS_KEPT = 300
# Ranks whose own curves are drawn; more lines are a tangle.
FOLLOWED = 8
# Ranks that a curve's range is taken from where there are more.
SAMPLED = 64
# Seconds between two points of what ranks measure, which they do once per second.
POINT_S = 1.0
# Seconds between two looks at the collectives.
_COLLECTIVES_S = 1.0
_COLLECTIVES_SPAN_S = 30.0
# Ranks whose collectives are shown, and how many of each: if that panel is open, and if not.
_COLLECTIVE_RANKS = {True: 32, False: 8}
_COLLECTIVES_OF_RANK = {True: 32, False: 8}
# Actors that a table shows, and characters of an error in it.
_ACTORS_SHOWN = 500
_ERROR_CHARS = 300
# With at most so many ranks the exact size of their memory is on their tiles.
_EXACT_RANKS = 128

# What a rank measures, as (name, title, unit, column of RankNow, or of the GPU where there is one).
_MEASURED = (
    (".memory", "Memory", "bytes", "rss_bytes"),
    (".gpu", "GPU memory, allocated", "bytes", "gpu_allocated_bytes"),
    (".cpu", "CPU, percent of a core", "", "cpu_percent"),
    (".utilisation", "GPU utilisation, percent", "", "gpu_utilisation"),
    (".collectives", "Collectives per second", "", "collectives_per_s"),
    (".steps", "Steps per second", "", "steps_per_s"),
)


class View:
    """What a front end has been told, so that it is told what is new.

    Attributes:
        ranks: those that it shows, in the order of the axes.
        axes: their axes; None: the mesh's own.
        followed: ranks whose own curves are drawn.
        shows: the panel that is open, as far as is known.
        has_actors: whether there are, or have been, actors on the mesh; then there is a panel for them.
    """

    def __init__(self, ranks: Ranks | None = None, axes: Mapping[str, int] | None = None) -> None:
        self.ranks, self.axes = ranks, axes
        self.followed: Ranks = ()
        self.shows = ""
        self.has_actors = False
        self._layout: Message = {}
        self._told: dict[int, tuple[RankNow, dict[str, Any]]] = {}
        self._most = 0  # bytes that a full memory bar stands for, without GPUs
        self._findings: tuple[Finding, ...] = ()
        self._bands: dict[str, deque[list[float]]] = {}
        self._point_at = float("-inf")
        self._steps: dict[str, int] = {}  # scalar -> the last step its band was told of
        self._lines: dict[tuple[str, int], float] = {}  # (chart, rank) -> x of its last point told
        self._collectives_at = float("-inf")
        self._collectives: Any = None
        self._ended: str | None = None
        self._asked: tuple[tuple[str, ...], Message] | None = None  # what ran when somebody asked why, and the answer

    def everything(self, picture: Picture) -> list[Message]:
        """All that there is to know, for somebody who may know nothing."""
        self._layout, self._findings = {}, ()
        self._told.clear()
        self._steps.clear()
        self._lines.clear()
        self._collectives_at, self._collectives, self._ended = float("-inf"), None, None
        messages = self.news(picture, full=True)
        if not any(message["kind"] == "findings" for message in messages):
            messages.append(findings(()) if self._asked is None else self._asked[1])
        return messages

    def news(self, picture: Picture, *, full: bool = False) -> list[Message]:
        """What changed since this was asked last; nothing where nothing did."""
        messages: list[Message] = []
        layout = self._layout_of(picture)
        if layout != self._layout:
            self._layout = layout
            self._told.clear()
            full = True
            messages.append(layout)
        columns = self._changed(picture)
        if columns or full:
            messages.append({"kind": "update", "full": full, "columns": columns})
        if self._asked is not None and self._asked[0] != _running(picture):
            self._asked, self._findings = None, ()
            messages.append(findings(()))
        if picture.findings != self._findings:
            self._asked, self._findings = None, picture.findings
            messages.append(findings(picture.findings))
        if charts := [*self._measured(picture, full), *self._logged(picture, full)]:
            messages.append({"kind": "charts", "keep": POINTS_KEPT, "charts": charts})
        if picture.at - self._collectives_at >= _COLLECTIVES_S or full:
            self._collectives_at = picture.at
            shown = collectives(picture, self._some_ranks(picture), self.shows == "collectives")
            if shown["rows"] and (picture.collectives is not self._collectives or shown["waits"]):
                self._collectives = picture.collectives
                messages.append(shown)
        if picture.ended != self._ended:
            self._ended = picture.ended
            messages.append({"kind": "gone", "reason": picture.ended or ""})
        return messages

    def follow(self, ranks: Ranks) -> None:
        """Draw these ranks' own curves from now on; the next `news` has what is known of them."""
        followed = ranks[:FOLLOWED]
        if followed != self.followed:
            self.followed = followed
            self._steps.clear()
            self._lines.clear()

    def asked_why(self, picture: Picture, found: Iterable[Finding]) -> Message:
        """The answer to somebody's question. It stands until something else runs, or more is found unasked."""
        answer = findings(found, asked=True)
        self._asked, self._findings = (_running(picture), answer), picture.findings
        return answer

    # ---- ranks

    def _of(self, picture: Picture) -> Ranks:
        return self.ranks if self.ranks is not None else tuple(rank.rank for rank in picture.ranks)

    def _layout_of(self, picture: Picture) -> Message:
        ranks = self._of(picture)
        axes = self.axes if self.axes is not None else picture.axes
        return {
            "kind": "layout",
            "mesh": picture.name,
            "axes": [[name, size] for name, size in axes.items()],
            "ranks": ",".join(map(str, ranks)) if list(ranks) != sorted(ranks) else format_ranks(ranks),
            "backend": picture.backend or "",
            "ended": picture.ended or "",
            "actors": self.has_actors,
        }

    def _changed(self, picture: Picture) -> dict[str, list[list[Any]]]:
        """What tiles show, of the ranks for which it is new."""
        wanted = set(self._of(picture))
        ranks = [rank for rank in picture.ranks if rank.rank in wanted]
        exact = len(ranks) <= _EXACT_RANKS
        most = 0 if any(rank.gpu_total_bytes for rank in ranks) else max(
            (rank.peak_rss_bytes or rank.rss_bytes or 0 for rank in ranks), default=0
        )
        if most:  # a round number above it, which stays for a while: no bar is full because it is the longest
            most = max(_LEAST_FULL_BYTES, 1 << most.bit_length())
        stale = most != self._most
        self._most = most
        changed: dict[str, dict[Any, list[int]]] = {}
        for rank in ranks:
            before = self._told.get(rank.rank)
            if before is not None and before[0] is rank and not stale:
                continue
            shown = _shown(rank, most, exact)
            known = before[1] if before is not None else _UNSAID
            self._told[rank.rank] = rank, shown
            for name, value in shown.items():
                if known.get(name) != value:
                    changed.setdefault(name, {}).setdefault(value, []).append(rank.rank)
        return {
            name: [[value, format_ranks(ranks)] for value, ranks in by_value.items()]
            for name, by_value in changed.items()
        }

    # ---- curves

    def _drawn(self, ranks: Sequence[int]) -> Ranks:
        """Ranks with a line of their own."""
        if self.followed:
            mine = set(ranks)
            return tuple(rank for rank in self.followed if rank in mine)
        return tuple(ranks) if len(ranks) <= FOLLOWED else ()

    def _measured(self, picture: Picture, full: bool) -> Iterable[Message]:
        if picture.at - self._point_at < POINT_S and not full and self._lines:
            return
        self._point_at = picture.at
        ranks = self._of(picture)
        drawn = self._drawn(ranks)
        by_rank = {rank.rank: rank for rank in picture.ranks}
        for name, title, unit, column in _MEASURED:
            now = [value for rank in ranks if rank in by_rank and (value := getattr(by_rank[rank], column)) is not None]
            band = self._bands.get(name)
            if band is None:
                if not now:
                    continue
                band = self._bands[name] = deque(_past(picture, column, ranks), maxlen=POINTS_KEPT)
            new: list[list[float]] = []
            if now and (not band or picture.at - band[-1][0] >= POINT_S):
                new = [[round(picture.at, 1), min(now), median(now), max(now)]]
                band.extend(new)
            whole = full or not self._lines.get((name, -1))
            self._lines[name, -1] = picture.at
            lines = {}
            for rank in drawn:
                since = self._lines.get((name, rank), float("-inf"))
                points = [point for point in picture.series.points(column, rank) if point[0] > since]
                if points:
                    self._lines[name, rank] = points[-1][0]
                    lines[str(rank)] = [[round(at, 1), round(value, 2)] for at, value in thin(points, POINTS_KEPT)]
            if whole or new or lines:
                told = list(band) if whole else new
                if drawn and len(drawn) == len(ranks):
                    told = []  # the lines are all there is
                yield {
                    "name": name,
                    "title": title,
                    "unit": unit,
                    "x": "time",
                    "full": whole,
                    "band": told,
                    "lines": lines,
                }

    def _logged(self, picture: Picture, full: bool) -> Iterable[Message]:
        ranks = self._of(picture)
        drawn = self._drawn(ranks)
        mine = set(ranks)
        alive = {rank.rank for rank in picture.ranks if rank.state != "dead"}
        for name in picture.scalars.names:
            have = [rank for rank in picture.scalars.ranks_of(name) if rank in mine]
            if not have:
                continue
            whole = full or name not in self._steps
            told = self._steps.get(name, -1)
            band: list[list[float | str]] = []
            if not drawn or len(drawn) < len(have):
                steps: dict[int, list[float]] = {}
                reached = []
                for rank in _sample(have, SAMPLED):
                    points = picture.scalars.after(name, rank, told)
                    if rank in alive:
                        reached.append(points[-1][0] if points else told)
                    for step, value, _ in points:
                        steps.setdefault(step, []).append(value)
                complete = min(reached, default=-1)
                rows = [
                    [step, *map(_spoken, (min(some), median(some), max(some)))]
                    for step, some in sorted(steps.items())
                    if step <= complete
                ]
                band = thin(rows, POINTS_KEPT)
            self._steps[name] = int(band[-1][0]) if band else told
            lines = {}
            for rank in drawn:
                since = self._lines.get((name, rank), float("-inf")) if not whole else float("-inf")
                points = picture.scalars.after(name, rank, since)
                if points:
                    self._lines[name, rank] = points[-1][0]
                    lines[str(rank)] = thin([[step, _spoken(value)] for step, value, _ in points], POINTS_KEPT)
            if band or lines:
                yield {
                    "name": name,
                    "title": name,
                    "unit": "",
                    "x": "step",
                    "full": whole,
                    "band": band,
                    "lines": lines,
                }

    def _some_ranks(self, picture: Picture) -> Ranks:
        ranks = self.followed or self._of(picture)
        return tuple(ranks)[: _COLLECTIVE_RANKS[self.shows == "collectives"]]


# Frames of a stack that a page draws, nested as they are, and characters of a source line.
_DEEPEST = 150
_SOURCE_CHARS = 200

# What a full memory bar stands for at least, where there is no GPU whose size it has.
_LEAST_FULL_BYTES = 1 << 30

# Colours and other escape sequences, and what else is no text. One that is never ended is over with its line.
_ORDERS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)

# What a front end takes a column to be before anything was said of it; not worth saying.
_UNSAID: Mapping[str, Any] = {"cell": "", "line": 0, "doing": "", "age": 0, "exit": ""}


def _shown(rank: RankNow, most: int, exact: bool) -> dict[str, Any]:
    """What the tile of a rank shows."""
    shown: dict[str, Any] = {
        "state": rank.state,
        "cell": rank.cell or "",
        "line": rank.line or 0,
        "doing": doing(rank),
        "age": rank.beat_age_s,
        "device": rank.device,
        "exit": rank.exit or "",
    }
    used, whole = memory(rank, most)
    if used is not None:
        shown["memory"] = round(50 * used / whole) * 2 if whole else 0
        if exact:
            shown["bytes"] = used
    return shown


def doing(rank: RankNow) -> str:
    """What a rank waits for, in a word or two; nothing if it works."""
    if rank.asking:
        return "input()"
    return rank.waits_in or ""


def memory(rank: RankNow, most: int) -> tuple[int | None, int]:
    """What a rank has, and of how much: of its GPU, or, without one, of the most that any rank ever had."""
    if rank.gpu_total_bytes:
        return rank.gpu_reserved_bytes or rank.gpu_allocated_bytes or 0, rank.gpu_total_bytes
    return rank.rss_bytes, most


def findings(found: Iterable[Finding], *, asked: bool = False) -> Message:
    """What is wrong, as it came: worst first. `asked`: somebody wants to hear also that nothing is."""
    return {"kind": "findings", "asked": asked, "findings": [finding(one) for one in found]}


def finding(found: Finding) -> Message:
    """One finding in a reader's words."""
    return {
        "kind": found.kind,
        "severity": "note" if found.kind in FINE else "bad" if found.sure else "warning",
        "text": found.sentence,
        "ranks": "" if found.kind in FINE else format_ranks(found.ranks) if found.ranks else "",
        "involved": format_ranks({*found.ranks, *found.others}) if found.ranks or found.others else "",
        "evidence": list(found.evidence),
        "next": found.next_step,
        "copy": as_text([found]),
    }


def stacks(found: Stacks, ranks: Ranks) -> Message:
    """A merged tree, each line where it is in the user's words."""
    tree = found.tree
    nodes: list[Message] = []
    for thread in tree.threads:
        below = [_node(node, tree.cells, found.source_of, 0) for node in thread.children]
        if thread.name:
            below = [
                {
                    "function": thread.name if thread.name.startswith(ACTOR_THREAD) else f"thread {thread.name}",
                    "where": "",
                    "ranks": format_ranks(thread.ranks),
                    "user": True,
                    "children": below,
                }
            ]
        nodes += below
    return {
        "kind": "stacks",
        "ranks": format_ranks(ranks),
        "title": f"{name_ranks(ranks)}, in {found.seconds * 1000:.0f} ms",
        "tree": nodes,
        "problems": [
            *(f"{name_ranks(those)}: {why}" for why, those in tree.without.items()),
            *(f"host {host} does not answer" for host in found.silent_hosts),
        ],
        "text": found.text,
    }


def _node(node: Node, cells: Mapping[str, str], source_of: SourceOf, depth: int) -> Message:
    cell = cells.get(node.file) or cell_of(node.file) or ("an earlier cell" if is_cell(node.file) else None)
    source = source_of(node.file, node.line) if node.user else None
    told: Message = {
        "function": node.function,
        "where": "" if node.file == REMOTE_OPERATION else f"{cell or short(node.file)}, line {node.line}",
        "ranks": format_ranks(node.ranks),
        "user": node.user,
        "children": [],
    }
    if not node.user and says_little(node):
        told["quiet"] = True  # not worth a word where library frames are folded
    if source and source.strip():
        told["source"] = source.strip()[:_SOURCE_CHARS]
    if depth < _DEEPEST:
        told["children"] = [_node(child, cells, source_of, depth + 1) for child in node.children]
    elif node.children:
        told["function"] += " … deeper frames are left out"
    return told


def logs(rank: int, text: str, limit_bytes: int) -> Message:
    """The last output of a rank, without colours and the other orders that terminals take."""
    cut = len(text.encode(errors="replace")) >= limit_bytes
    return {"kind": "logs", "rank": rank, "cut": cut, "text": _settled(_ORDERS.sub("", text))}


def actors(rows: Iterable[Mapping[str, Any]], ranks: Ranks) -> Message:
    """The actors on these ranks, and on processes of their own, by name.

    Args:
        rows: as `actors.overview.survey` gives them; those with a "home" are on no rank of this mesh.
    """
    wanted = set(ranks)
    shown = [row for row in rows if "home" in row or row["rank"] in wanted]
    shown.sort(key=lambda row: (row["actor"], row["id"], row["rank"]))
    return {
        "kind": "actors",
        "rows": [
            {
                "actor": row["actor"],
                "class": row["class"],
                "rank": f"{row['home']}: {row['rank']}" if "home" in row else row["rank"],
                "state": row["state"],
                "mailbox": row["mailbox"],
                "running": (row["running"] or "").lstrip("="),
                "seconds": round(row["seconds"] or 0.0, 1),
                "messages": row["messages"],
                "error": (row["last_error"] or "")[:_ERROR_CHARS],
            }
            for row in shown[:_ACTORS_SHOWN]
        ],
    }


def _settled(text: str) -> str:
    """What a terminal would show where lines were drawn over: their last state."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def collectives(picture: Picture, ranks: Sequence[int], many: bool) -> Message:
    """The last collectives of these ranks, and all that wait."""
    rows = []
    for rank in ranks:
        bars = [
            [
                one.op,
                one.group,
                one.seq,
                round(max(0.0, picture.at - one.began_at), 3),
                None if one.ended_at is None else round(max(0.0, picture.at - one.ended_at), 3),
                _where(one),
            ]
            for one in picture.collectives.get(rank, ())
            if one.ended_at is None or picture.at - one.ended_at < _COLLECTIVES_SPAN_S
        ]
        if bars:
            rows.append([rank, bars[-_COLLECTIVES_OF_RANK[many] :]])
    return {
        "kind": "collectives",
        "window_s": _COLLECTIVES_SPAN_S,
        "rows": rows,
        "waits": waits(picture.collectives, picture.at, len(picture.ranks)),
    }


def waits(known: Mapping[int, Sequence[CollectiveNow]], at: float, world_size: int) -> list[Message]:
    """Open collectives that some members of their group have not come to, longest first."""
    inside: dict[tuple[str, int, str], list[CollectiveNow]] = {}
    passed: dict[tuple[str, int, str], set[int]] = {}
    for rank, some in known.items():
        for one in some:
            if one.peer is None:
                key = one.group, one.seq, one.op
                if one.ended_at is None:
                    inside.setdefault(key, []).append(one)
                else:
                    passed.setdefault(key, set()).add(rank)
    found: list[Message] = []
    for (group, seq, op), some in inside.items():
        here = {one.rank for one in some}
        missing = set(some[0].group_ranks) - here - passed.get((group, seq, op), set())
        if missing:
            found.append(
                {
                    "op": op,
                    "group": "all ranks" if len(some[0].group_ranks) == world_size else f"group {group}",
                    "seq": seq,
                    "inside": format_ranks(here),
                    "missing": format_ranks(missing),
                    "since_s": round(max(0.0, at - min(one.began_at for one in some)), 1),
                }
            )
    return sorted(found, key=lambda wait: -float(wait["since_s"]))[:20]


def thin(points: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly, the last one among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(at * (len(points) - 1) / (most - 1))] for at in range(most)]


def chosen(text: Any, all_ranks: Ranks) -> Ranks:
    """Ranks as a front end names them; those that there are.

    Raises:
        ValueError: it is not a list of ranks.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a list of ranks; write it like 0 or 0,2-3")
    if text in ("", "none"):
        return ()
    known = set(all_ranks)
    return tuple(rank for rank in parse_ranks(text) if rank in known)


def _running(picture: Picture) -> tuple[str, ...]:
    return tuple(call.call for call in picture.calls)


def _sample(ranks: Sequence[int], most: int) -> list[int]:
    return thin(ranks, most)


def _spoken(value: float) -> float | str:
    """A number as JSON can say it, which knows neither NaN nor infinity: "nan", "inf"."""
    return value if math.isfinite(value) else str(value)


def _past(picture: Picture, column: str, ranks: Sequence[int]) -> list[list[float]]:
    """The range of ranks over what is remembered, by the steps in which it is."""
    steps: dict[float, list[float]] = {}
    for rank in _sample(ranks, SAMPLED):
        for at, value in picture.series.points(column, rank, picture.at - 600.0):
            steps.setdefault(at, []).append(value)
    rows = [[at, min(some), median(some), max(some)] for at, some in sorted(steps.items()) if at < picture.at]
    return thin(rows, POINTS_KEPT)


def _where(one: CollectiveNow) -> str:
    return f"line {one.line}" if one.line is not None else ""
