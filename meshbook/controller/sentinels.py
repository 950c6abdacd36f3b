"""Switches the ranks' sentinels on and off, and shows what they have found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec

from meshbook.controller.running import require_living
from meshbook.controller.session import Session, incarnations
from meshbook.controller.tables import TextReport
from meshbook.ids import Ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import NumberFinding, SentinelReport

# In the session's extras: the ranks whose sentinels this process has switched on, and in which of their processes.
_KEY = "sentinels.on"
_TIMEOUT_S = 2.0


@dataclass(frozen=True, repr=False)
class NumberReport(TextReport):
    """What the sentinels of some ranks have found. Displays itself; true if all have answered and found nothing.

    Attributes:
        on: the ranks whose sentinels are on.
        findings: (rank, finding), by step.
        num_updates: steps of optimizers that were watched, on the rank with most.
        silent: ranks that did not answer in time; what they have found is not here.
    """

    on: Ranks
    findings: tuple[tuple[int, NumberFinding], ...]
    num_updates: int
    silent: Ranks = ()

    def __bool__(self) -> bool:
        return not self.findings and not self.silent

    @property
    def text(self) -> str:
        """The output of `%mesh nan`."""
        state = f"on, on {name_ranks(self.on)}" if self.on else "off (%mesh nan on)"
        heading = f"The sentinel is {state}; {self.num_updates:,} updates watched"
        lines = [f"  {line}" for line in dict.fromkeys(finding.text for _, finding in self.findings)]
        if self.silent:
            did_not = f"{name_ranks(self.silent)} did not answer within {_TIMEOUT_S:.0f} s"
            lines.append(f"  {did_not} (%mesh why tells why); ask again")
        return "\n".join([f"{heading}.", *lines]) if lines else f"{heading}, nothing found."


def switch(session: Session, own: Ranks, *, on: bool) -> None:
    """Switch the sentinels of the living ranks of a view on or off; see `Mesh.nan`."""
    ranks = require_living(session, own, None)
    session.run_for_values(messages.SetSentinel(session.connection.next_call_id(), ranks, on), "nan")
    if _KEY not in session.extras:
        session.healed_hooks.append(partial(_after_heal, session))
    switched: dict[int, int] = session.extras.setdefault(_KEY, {})
    for rank, incarnation in zip(ranks, incarnations(session, ranks), strict=True):
        if on:
            switched[rank] = incarnation
        else:
            switched.pop(rank, None)


def report(session: Session, own: Ranks) -> NumberReport:
    """Return what was found. Blocks for 2 s at most; also while a cell runs."""
    ranks = require_living(session, own, None)
    parts = session.query(messages.QuerySentinel(session.connection.next_call_id(), ranks), _TIMEOUT_S)
    replies = [
        (rank, msgspec.convert(part.outcome.reply, SentinelReport))
        for part in parts
        if part.outcome.reply
        for rank in part.ranks
    ]
    found = [(rank, finding) for rank, reply in replies for finding in reply.findings]
    return NumberReport(
        tuple(sorted(rank for rank, reply in replies if reply.on)),
        tuple(sorted(found, key=lambda pair: (pair[1].step or 0, pair[0]))),
        max((reply.num_updates for _, reply in replies), default=0),
        tuple(sorted({*ranks}.difference(rank for rank, _ in replies))),
    )


def _after_heal(session: Session) -> None:
    """Switch on the sentinels of ranks that have new processes; the others keep theirs, with what they have found."""
    switched: dict[int, int] = session.extras[_KEY]
    living = session.living(tuple(sorted(switched)))
    now = zip(living, incarnations(session, living), strict=True)
    if new := tuple(rank for rank, incarnation in now if incarnation != switched[rank]):
        switch(session, new, on=True)
