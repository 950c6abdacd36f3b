"""Derive findings from snapshots: why a mesh hangs, which ranks cause it, and what to do next.

`explain` is a pure function that the dashboard, `%mesh why`, the command line and the tests call. The idea is that of
STAT: what most ranks do is the intended behavior, and ranks that differ are suspects. The finders follow the graph of
which rank waits for which to ranks that wait for no other rank or to a cycle, and report these. Consequences of a root
cause are part of its finding, never a finding of their own: each finder leaves out the ranks that an earlier one has
explained.

This module does not know how snapshots are taken, nor processes, clocks or source text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from meshbook.diagnose import lone_ranks
from meshbook.diagnose.actor_waits import format_callee
from meshbook.diagnose.collective_errors import find_disagreements, find_ranks_alone_in_collectives
from meshbook.diagnose.cycles import find_cycles
from meshbook.diagnose.evidence import STABLE_S, Evidence
from meshbook.diagnose.kinds import BENIGN_KINDS, KINDS
from meshbook.diagnose.report import Finding as Finding
from meshbook.diagnose.report import dated as dated
from meshbook.diagnose.report import make_finding
from meshbook.diagnose.root_causes import find_root_causes
from meshbook.diagnose.source_files import sanitize_line
from meshbook.diagnose.wording import parenthesized, where_others_wait
from meshbook.ids import name_ranks
from meshbook.wire.messages import RankSnapshot

# Findings reported at once. More problems than this have one dominant cause.
MAX_FINDINGS = 12

# Grey 243 is readable on black and on white; JupyterLab does not support "dim".
_BAD, _GOOD, _DIM, _RESET = "\x1b[1;31m", "\x1b[1;32m", "\x1b[38;5;243m", "\x1b[0m"

# Yields findings; given the ranks that are explained already, to which it adds those that its findings explain beside
# their own.
Finder = Callable[[Evidence, set[int]], Iterator[Finding]]


def explain(
    snapshots: Sequence[RankSnapshot],
    *,
    axes: Mapping[str, int] | None = None,
    silent_hosts: Sequence[str] = (),
    earlier: Sequence[RankSnapshot] = (),
) -> tuple[Finding, ...]:
    """Return why the mesh makes no progress, most important first; never empty. Pure: neither blocks nor raises.

    Args:
        snapshots: what each rank is doing; of two snapshots of one rank the last one counts. Any field may be missing.
        axes: the mesh's axes and their sizes, in order; if given, ranks are also named by axis where possible.
        silent_hosts: machines that do not respond.
        earlier: snapshots taken at least half a second before, to distinguish ranks that progress from stalled ones.
    """
    evidence = Evidence(snapshots, axes, silent_hosts, earlier)
    explained: set[int] = set()
    found: list[Finding] = []
    for finder, max_weight in _FINDERS:
        if any(KINDS[finding.kind].weight > max_weight for finding in found):
            continue
        for finding in finder(evidence, explained):
            explained.update(finding.ranks, finding.others)
            found.append(finding)
    found.sort(key=lambda finding: (-KINDS[finding.kind].weight, not finding.others, finding.ranks))
    return tuple(found[:MAX_FINDINGS])


def as_text(findings: Sequence[Finding], color: bool = False) -> str:
    """Return what `%mesh why` prints: each finding's sentence, its evidence, and the next step."""
    paragraphs = []
    for number, finding in enumerate(findings, 1):
        lead = f"{number}. " if len(findings) > 1 else ""
        indent = " " * len(lead)
        lines = [f"{lead}{_colorize(finding.sentence, _GOOD if finding.kind in BENIGN_KINDS else _BAD, color)}."]
        lines += [f"{indent}  {_colorize(line, _DIM, color)}" for line in finding.lines]
        if finding.next_step:
            lines.append(f"{indent}Next: {finding.next_step}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _find_silent_hosts(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    for host in evidence.silent_hosts:
        ranks = tuple(rank for rank, snapshot in evidence.snapshots.items() if snapshot.host == host)
        waiting = evidence.waiters_of(ranks)
        whom = f" with {name_ranks(ranks)}" if ranks else ""
        yield make_finding(
            evidence,
            "host-silent",
            ranks,
            f"The host {sanitize_line(host, 80)}{whom} does not answer{where_others_wait(evidence, waiting, ranks)}",
            others=waiting,
        )


def _find_actor_deadlocks(evidence: Evidence, explained: set[int]) -> Iterator[Finding]:
    for cycle in evidence.actor_waits.find_cycles():
        ranks = tuple(sorted({wait.rank for wait in cycle}))
        waiting_behind = evidence.actor_waits.waits_leading_to(cycle)
        first = cycle[0]
        names = list(dict.fromkeys(f"{sanitize_line(wait.caller.name, 60)} (rank {wait.rank})" for wait in cycle))
        who = f"{', '.join(names[:-1])} and {names[-1]} wait for each other"
        if len(names) == 1:
            who = f"of {names[0]} wait for themselves"
        chain = " → ".join(
            f"{sanitize_line(wait.caller.name, 60)}.{sanitize_line(wait.caller.endpoint, 60)}"
            f"{parenthesized(wait.location)}"
            for wait in cycle
        )
        stable = min(wait.callee.since_s for wait in cycle) >= STABLE_S
        yield make_finding(
            evidence,
            "actor-deadlock",
            ranks,
            f"Actors {who}: {chain} → {format_callee(cycle[-1].callee)}, for which "
            f"{sanitize_line(first.caller.name, 60)} has no time while it is in "
            f"{sanitize_line(first.caller.endpoint, 60)}",
            at=first.location,
            others=[wait.rank for wait in waiting_behind],
            lines=[wait.phrase for wait in (*cycle, *waiting_behind)],
            sure=stable or bool(evidence.earlier),
        )
    # Ranks that wait for an endpoint on another rank: that endpoint is diagnosed on the rank that runs it.
    explained.update(
        rank
        for rank, activity in evidence.activities.items()
        if activity.kind == "waits-for-actor" and evidence.actor_waits.waits_only_for_other_ranks(rank)
    )


# In order: each leaves out the ranks that those before it have explained. It runs if nothing heavier was found.
_ANY_WEIGHT = max(kind.weight for kind in KINDS.values())
_FINDERS: tuple[tuple[Finder, int], ...] = (
    (_find_silent_hosts, _ANY_WEIGHT),
    (_find_actor_deadlocks, _ANY_WEIGHT),
    (find_disagreements, _ANY_WEIGHT),
    (find_ranks_alone_in_collectives, _ANY_WEIGHT),
    (find_root_causes, _ANY_WEIGHT),
    (find_cycles, _ANY_WEIGHT),
    (lone_ranks.find_blocked_ranks, _ANY_WEIGHT),
    (lone_ranks.find_latecomers, KINDS["straggler"].weight),
    (lone_ranks.find_python_loops, KINDS["slow"].weight),
    (lone_ranks.find_slow_ranks, KINDS["slow"].weight),
    (lone_ranks.find_idleness, 0),
)


def _colorize(text: str, colour: str, enabled: bool) -> str:
    return f"{colour}{text}{_RESET}" if enabled else text
