"""Whether the exits of ranks until now are known, for who has seen a connection break, and not why."""

from __future__ import annotations

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.payloads import Message


class TransportFailed(Message):
    """A collective of this rank has failed, and the reason has not come: the rank waits for `ExitsChecked`."""

    rank: int
    number: int  # of this question, within the rank's process


class CheckExits(Message):
    """To hosts: has one of these ranks ended? The call ends when each of them runs, or its exit has been reported."""

    call: CallId
    ranks: Ranks


class ExitsChecked(Message):
    """To a rank: every exit of before its `TransportFailed` of this number has been reported to it."""

    ranks: Ranks
    number: int
