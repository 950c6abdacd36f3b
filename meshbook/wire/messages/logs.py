"""Searches in what ranks have printed since their mesh started, which each host keeps on its disk."""

from __future__ import annotations

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.commands import Folding
from meshbook.wire.messages.output import Line
from meshbook.wire.messages.payloads import Message


class SearchLogs(Message):
    """To each host: find lines in what its ranks have printed, also those that are dead or have left the mesh.

    Answered by any number of `LogsFound`; the last one of a host says that it is.
    """

    call: CallId
    ranks: Ranks = ()  # (): all
    pattern: str = ""  # a regular expression of Python's `re`, searched for in each line; "": every line
    since_s: float | None = None  # seconds ago, by the host's clock; None: since the mesh started
    context: int = 0  # lines of the same rank to show before and behind each hit
    limit: int = 1000  # hits to return: the newest
    follow: bool = False  # go on with what is printed from now on, until `EndLogSearch`
    fold: Folding = "numbers"


class EndLogSearch(Message):
    """End a search of this client. No more is reported of it."""

    call: CallId


class LogMatch(Struct, frozen=True, gc=False, omit_defaults=True):
    """A line that was found, or several with their context, as the ranks of `line` have printed it."""

    time: float  # wall clock of its host, when the first of the ranks had printed it
    line: Line  # its text is several lines if there is context
    matching: tuple[int, ...] = (0,)  # which of these lines match, counted from 0


class KeptLogs(Struct, frozen=True, gc=False):
    """What a host has kept of its ranks' output."""

    host: str  # its name, "" where there is only one
    since: float | None  # wall clock of the oldest line; None: nothing was printed
    num_bytes: int
    limit_bytes: int
    dropped_bytes: int = 0  # the oldest, to stay within the limit
    unwritten_bytes: int = 0  # that the disk has refused
    problem: str = ""  # why it has refused them


class LogsFound(Message):
    """Hits of a search, in order of time."""

    call: CallId
    hits: tuple[LogMatch, ...] = ()
    num_left_out: int = 0  # older lines that match, of all ranks, beyond the limit
    kept: KeptLogs | None = None  # in the host's last report, or its first one if it follows
    ended: bool = False  # this host reports no more
    problem: str = ""  # why it could not search, or not to the end
