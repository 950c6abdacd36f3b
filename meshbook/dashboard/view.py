"""The state of a mesh as messages for a front end. Pure.

A notebook widget and a standalone page receive the same messages and draw them with the same modules (`widgets/`). They
are plain data with a `kind`:

    layout       mesh, axes, ranks ("0-1023"), backend; sent first, and when it changes
    update       columns: {name: [[value, "0-3,7"], ...]}, of the ranks whose value changed; `full`: of all ranks
    findings     what is wrong, in words, worst first
    charts       curves over time (names with a leading dot: measured by the ranks) or over steps: the range of all
                 ranks, and a line for each followed rank; new points only, or all with `full`
    collectives  the last collectives of some ranks, in seconds ago, and who waits for whom
    stacks       a merged tree, with `text` to copy
    logs         the last output of one rank
    actors       one row for each actor on the ranks that are shown
    reply        one sentence in reply to a request
    gone         the mesh has ended

A value is sent with the ranks that have it, because ranks mostly agree: a thousand ranks on the same line take a few
bytes. Messages are idempotent, so everything can be resent periodically: a page that was opened while its messages
waited behind a cell does not need to request anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshbook.controller.reports import Stacks
from meshbook.controller.subscription import MeshSnapshot
from meshbook.dashboard.charts import MAX_POINTS, ChartEncoder, Message
from meshbook.diagnose.findings import Finding, as_text
from meshbook.diagnose.kinds import BENIGN_KINDS
from meshbook.diagnose.source_files import cell_label, is_cell_file, short_path
from meshbook.diagnose.stack_tree import SourceOf, StackNode, is_uninformative
from meshbook.ids import Ranks, format_ranks, name_ranks, parse_ranks
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, REMOTE_OPERATION_FILE, CollectiveStatus, RankStatus

# Ranks whose own curves are drawn; more lines are unreadable.
MAX_FOLLOWED_RANKS = 8
# Seconds between two samples of the collectives.
_COLLECTIVES_INTERVAL_S = 1.0
_COLLECTIVES_SPAN_S = 30.0
# Ranks whose collectives are shown, and collectives per rank: True if that panel is open.
_MAX_COLLECTIVE_RANKS = {True: 32, False: 8}
_MAX_COLLECTIVES_PER_RANK = {True: 32, False: 8}
# Maximum rows of the actors table, and characters of an error in it.
_MAX_ACTORS = 500
_MAX_ERROR_CHARS = 300
# Up to this many ranks, tiles show the exact memory size.
_MAX_RANKS_WITH_BYTES = 128


class UpdateEncoder:
    """Tracks what a front end has received, and encodes only what is new.

    Attributes:
        ranks: the ranks that it shows, in the order of the axes.
        axes: their axes; None: the mesh's own.
        followed: ranks whose own curves are drawn.
        open_panel: the panel that is open, as far as is known.
        replay_command: replays the last failure that was recorded, in a terminal; "" without one.
        has_actors: whether the mesh has, or had, actors; if so, they get a panel.
    """

    def __init__(self, ranks: Ranks | None = None, axes: Mapping[str, int] | None = None) -> None:
        self.ranks, self.axes = ranks, axes
        self.followed: Ranks = ()
        self.open_panel = ""
        self.has_actors = False
        self.replay_command = ""
        self._sent_layout: Message = {}
        self._sent_tiles: dict[int, tuple[RankStatus, dict[str, Any]]] = {}
        self._memory_scale = 0  # bytes of a full memory bar, without GPUs
        self._sent_findings: tuple[Finding, ...] = ()
        self._charts = ChartEncoder()
        self._collectives_sent_at = float("-inf")
        self._sent_collectives: Any = None
        self._sent_ended: str | None = None
        self._why_answer: tuple[tuple[str, ...], Message] | None = (
            None  # the calls running at the last `why` request, and its reply
        )

    def full_update(self, snapshot: MeshSnapshot) -> list[Message]:
        """Return messages with the complete state, for a front end that may have none."""
        self._sent_layout = {}
        if self._why_answer is None:
            self._sent_findings = ()
        self._sent_tiles.clear()
        self._charts.forget()
        self._collectives_sent_at, self._sent_collectives, self._sent_ended = float("-inf"), None, None
        messages = self.updates(snapshot, full=True)
        if not any(message["kind"] == "findings" for message in messages):
            messages.append(findings_message(()) if self._why_answer is None else self._why_answer[1])
        return messages

    def updates(self, snapshot: MeshSnapshot, *, full: bool = False) -> list[Message]:
        """Return messages with the changes since the last call; empty if nothing changed."""
        messages: list[Message] = []
        layout = self._layout_message(snapshot)
        if layout != self._sent_layout:
            self._sent_layout = layout
            self._sent_tiles.clear()
            full = True
            messages.append(layout)
        columns = self._changed_columns(snapshot)
        if columns or full:
            messages.append({"kind": "update", "full": full, "columns": columns})
        if self._why_answer is not None and self._why_answer[0] != snapshot.calls:
            self._why_answer, self._sent_findings = None, ()
            messages.append(findings_message(()))
        if snapshot.findings != self._sent_findings:
            self._why_answer, self._sent_findings = None, snapshot.findings
            messages.append(findings_message(snapshot.findings))
        ranks = self._shown_ranks(snapshot)
        if charts := self._charts.charts(snapshot, ranks, self._charted_ranks(ranks), full):
            messages.append({"kind": "charts", "keep": MAX_POINTS, "charts": charts})
        if snapshot.at - self._collectives_sent_at >= _COLLECTIVES_INTERVAL_S or full:
            self._collectives_sent_at = snapshot.at
            shown = collectives_message(snapshot, self._collective_ranks(snapshot), self.open_panel == "collectives")
            if shown["rows"] and (snapshot.collectives is not self._sent_collectives or shown["waits"]):
                self._sent_collectives = snapshot.collectives
                messages.append(shown)
        if snapshot.ended != self._sent_ended:
            self._sent_ended = snapshot.ended
            messages.append({"kind": "gone", "reason": snapshot.ended or ""})
        return messages

    def follow(self, ranks: Ranks) -> None:
        """Draw these ranks' own curves from now on; the next `updates` contains their stored points."""
        followed = ranks[:MAX_FOLLOWED_RANKS]
        if followed != self.followed:
            self.followed = followed
            self._charts.forget()

    def record_why(self, snapshot: MeshSnapshot, found: Iterable[Finding]) -> Message:
        """Return the reply to a `why` request. It stays until the running calls or the unrequested findings change."""
        message = findings_message(found, requested=True)
        self._why_answer, self._sent_findings = (snapshot.calls, message), snapshot.findings
        return message

    # ---- ranks

    def _shown_ranks(self, snapshot: MeshSnapshot) -> Ranks:
        return self.ranks if self.ranks is not None else tuple(rank.rank for rank in snapshot.ranks)

    def _layout_message(self, snapshot: MeshSnapshot) -> Message:
        ranks = self._shown_ranks(snapshot)
        axes = self.axes if self.axes is not None else snapshot.axes
        return {
            "kind": "layout",
            "mesh": snapshot.name,
            "axes": [[name, size] for name, size in axes.items()],
            "ranks": ",".join(map(str, ranks)) if list(ranks) != sorted(ranks) else format_ranks(ranks),
            "backend": snapshot.backend or "",
            "ended": snapshot.ended or "",
            "actors": self.has_actors,
            "replay": self.replay_command,
        }

    def _changed_columns(self, snapshot: MeshSnapshot) -> dict[str, list[list[Any]]]:
        """Return the tile values of the ranks for which they changed."""
        wanted = set(self._shown_ranks(snapshot))
        ranks = [rank for rank in snapshot.ranks if rank.rank in wanted]
        exact = len(ranks) <= _MAX_RANKS_WITH_BYTES
        memory_scale = (
            0
            if any(rank.gpu_total_bytes for rank in ranks)
            else max((rank.peak_rss_bytes or rank.rss_bytes or 0 for rank in ranks), default=0)
        )
        # a power of two above the maximum, which rarely changes: otherwise the longest bar would always be full
        if memory_scale:
            memory_scale = max(_MIN_MEMORY_SCALE, 1 << memory_scale.bit_length())
        stale = memory_scale != self._memory_scale
        self._memory_scale = memory_scale
        changed: dict[str, dict[Any, list[int]]] = {}
        for rank in ranks:
            sent = self._sent_tiles.get(rank.rank)
            if sent is not None and sent[0] is rank and not stale:
                continue
            shown = _tile(rank, memory_scale, exact)
            known = sent[1] if sent is not None else _DEFAULT_TILE
            self._sent_tiles[rank.rank] = rank, shown
            for name, value in shown.items():
                if known.get(name) != value:
                    changed.setdefault(name, {}).setdefault(value, []).append(rank.rank)
        return {
            name: [[value, format_ranks(ranks)] for value, ranks in by_value.items()]
            for name, by_value in changed.items()
        }

    def _charted_ranks(self, ranks: Sequence[int]) -> Ranks:
        """Return the ranks that get a line of their own."""
        if self.followed:
            mine = set(ranks)
            return tuple(rank for rank in self.followed if rank in mine)
        return tuple(ranks) if len(ranks) <= MAX_FOLLOWED_RANKS else ()

    def _collective_ranks(self, snapshot: MeshSnapshot) -> Ranks:
        ranks = self.followed or self._shown_ranks(snapshot)
        return tuple(ranks)[: _MAX_COLLECTIVE_RANKS[self.open_panel == "collectives"]]


# Maximum depth of stack frames that a page draws nested, and characters of a source line.
_MAX_STACK_DEPTH = 150
_MAX_SOURCE_CHARS = 200

# Minimum bytes of a full memory bar if there is no GPU whose size defines it.
_MIN_MEMORY_SCALE = 1 << 30

# Colours and other escape sequences, and control characters. An unterminated sequence ends at its line.
_ESCAPE_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)

# Default values of a column in a front end; not sent.
_DEFAULT_TILE: Mapping[str, Any] = {"cell": "", "line": 0, "doing": "", "age": 0, "exit": ""}


def _tile(rank: RankStatus, memory_scale: int, exact: bool) -> dict[str, Any]:
    """Return what the tile of a rank shows."""
    shown: dict[str, Any] = {
        "state": rank.state,
        "cell": rank.cell or "",
        "line": rank.line or 0,
        "doing": wait_label(rank),
        "age": rank.beat_age_s,
        "device": rank.device,
        "exit": rank.exit or "",
    }
    used, capacity = memory_usage(rank, memory_scale)
    if used is not None:
        shown["memory"] = round(50 * used / capacity) * 2 if capacity else 0
        if exact:
            shown["bytes"] = used
    return shown


def wait_label(rank: RankStatus) -> str:
    """Return what a rank waits for, in a word or two; empty if it does not wait."""
    if rank.awaiting_input:
        return "input()"
    return rank.waits_in or ""


def memory_usage(rank: RankStatus, memory_scale: int) -> tuple[int | None, int]:
    """Return used and total memory: of the rank's GPU, or without one, of the process relative to `memory_scale`."""
    if rank.gpu_total_bytes:
        return rank.gpu_reserved_bytes or rank.gpu_allocated_bytes or 0, rank.gpu_total_bytes
    return rank.rss_bytes, memory_scale


def findings_message(found: Iterable[Finding], *, requested: bool = False) -> Message:
    """Return the findings in their order, worst first. `requested`: show also that nothing was found."""
    return {"kind": "findings", "asked": requested, "findings": [finding_message(one) for one in found]}


def finding_message(found: Finding) -> Message:
    """Return one finding as display text."""
    return {
        "kind": found.kind,
        "severity": "note" if found.kind in BENIGN_KINDS else "bad" if found.sure else "warning",
        "text": found.sentence,
        "ranks": "" if found.kind in BENIGN_KINDS else format_ranks(found.ranks) if found.ranks else "",
        "involved": format_ranks({*found.ranks, *found.others}) if found.ranks or found.others else "",
        "evidence": list(found.lines),
        "next": found.next_step,
        "copy": as_text([found]),
    }


def stacks_message(found: Stacks, ranks: Ranks) -> Message:
    """Return a merged tree, with each line located in the user's cells and files."""
    tree = found.tree
    nodes: list[Message] = []
    for thread in tree.threads:
        below = [_node_message(node, tree.cells, found.source_of, 0) for node in thread.children]
        if thread.name:
            below = [
                {
                    "function": thread.name if thread.name.startswith(ACTOR_THREAD_PREFIX) else f"thread {thread.name}",
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
            *(f"{name_ranks(those)}: {why}" for why, those in tree.ranks_without_stack.items()),
            *(f"host {host} does not answer" for host in found.silent_hosts),
        ],
        "text": found.text,
    }


def _node_message(node: StackNode, cells: Mapping[str, str], source_of: SourceOf, depth: int) -> Message:
    cell = cells.get(node.file) or cell_label(node.file) or ("an earlier cell" if is_cell_file(node.file) else None)
    source = source_of(node.file, node.line) if node.is_user_code else None
    message: Message = {
        "function": node.function,
        "where": "" if node.file == REMOTE_OPERATION_FILE else f"{cell or short_path(node.file)}, line {node.line}",
        "ranks": format_ranks(node.ranks),
        "user": node.is_user_code,
        "children": [],
    }
    if not node.is_user_code and is_uninformative(node):
        message["quiet"] = True  # hidden if library frames are folded
    if source and source.strip():
        message["source"] = source.strip()[:_MAX_SOURCE_CHARS]
    if depth < _MAX_STACK_DEPTH:
        message["children"] = [_node_message(child, cells, source_of, depth + 1) for child in node.children]
    elif node.children:
        message["function"] += " … deeper frames are left out"
    return message


def logs_message(rank: int, text: str, limit_bytes: int) -> Message:
    """Return the last output of a rank, without colours and other terminal escape sequences."""
    cut = len(text.encode(errors="replace")) >= limit_bytes
    return {"kind": "logs", "rank": rank, "cut": cut, "text": _apply_carriage_returns(_ESCAPE_SEQUENCES.sub("", text))}


def actors_message(rows: Iterable[Mapping[str, Any]], ranks: Ranks) -> Message:
    """Return the actors on these ranks, and in spawned processes, sorted by name.

    Args:
        rows: from `actors.listing.list_actors`; rows with a "home" are on no rank of this mesh.
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
                "error": (row["last_error"] or "")[:_MAX_ERROR_CHARS],
            }
            for row in shown[:_MAX_ACTORS]
        ],
    }


def _apply_carriage_returns(text: str) -> str:
    """Return the text as a terminal shows it, with lines overwritten by carriage returns."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def collectives_message(snapshot: MeshSnapshot, ranks: Sequence[int], is_panel_open: bool) -> Message:
    """Return the last collectives of these ranks, and all that wait."""
    waits = incomplete_collectives(snapshot.collectives, snapshot.at, len(snapshot.ranks))
    # Of these an empty row shows that they are not there.
    missing = {rank for wait in waits for rank in parse_ranks(wait["missing"])}
    rows = []
    for rank in ranks:
        bars = [
            [
                one.op,
                one.group,
                one.seq,
                round(max(0.0, snapshot.at - one.began_at), 3),
                None if one.ended_at is None else round(max(0.0, snapshot.at - one.ended_at), 3),
                _line_label(one),
                one.failure,
            ]
            for one in snapshot.collectives.get(rank, ())
            if one.ended_at is None or snapshot.at - one.ended_at < _COLLECTIVES_SPAN_S
        ]
        if bars or rank in missing:
            rows.append([rank, bars[-_MAX_COLLECTIVES_PER_RANK[is_panel_open] :]])
    return {
        "kind": "collectives",
        "window_s": _COLLECTIVES_SPAN_S,
        "rows": rows,
        "waits": waits,
    }


def incomplete_collectives(
    known: Mapping[int, Sequence[CollectiveStatus]], at: float, world_size: int
) -> list[Message]:
    """Return open collectives that some members of their group have not reached, longest wait first."""
    waiting: dict[tuple[str, int, str], list[CollectiveStatus]] = {}
    passed: dict[tuple[str, int, str], set[int]] = {}
    for rank, members in known.items():
        for one in members:
            if one.peer is None:
                key = one.group, one.seq, one.op
                if one.ended_at is None:
                    waiting.setdefault(key, []).append(one)
                else:
                    passed.setdefault(key, set()).add(rank)
    found: list[Message] = []
    for (group, seq, op), members in waiting.items():
        arrived = {one.rank for one in members}
        missing = set(members[0].group_ranks) - arrived - passed.get((group, seq, op), set())
        if missing:
            found.append(
                {
                    "op": op,
                    "group": "all ranks" if len(members[0].group_ranks) == world_size else f"group {group}",
                    "seq": seq,
                    "inside": format_ranks(arrived),
                    "missing": format_ranks(missing),
                    "since_s": round(max(0.0, at - min(one.began_at for one in members)), 1),
                }
            )
    return sorted(found, key=lambda wait: -float(wait["since_s"]))[:20]


def parse_ranks_in_mesh(text: Any, all_ranks: Ranks) -> Ranks:
    """Parse a front end's list of ranks; ranks that do not exist are dropped.

    Raises:
        ValueError: it is not a list of ranks.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a list of ranks; write it like 0 or 0,2-3")
    if text in ("", "none"):
        return ()
    known = set(all_ranks)
    return tuple(rank for rank in parse_ranks(text) if rank in known)


def _line_label(one: CollectiveStatus) -> str:
    return f"line {one.line}" if one.line is not None else ""
