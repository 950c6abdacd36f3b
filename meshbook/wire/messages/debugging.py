"""Messages about the debugger on a call that runs."""

from __future__ import annotations

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.payloads import Message
from meshbook.wire.messages.reports import RankExited

# Commands: controller -> supervisor -> host -> rank


class StopInDebugger(Message):
    """Have ranks stop in the debugger where they are in a call, and take its commands from this client from now on.

    The ranks' service threads reply with a `DebuggerPlace`, as builtins.
    """

    call: CallId
    ranks: Ranks
    target: CallId  # the call that they run


class LeaveDebugger(Message):
    """Ranks that wait for a debugger command of this client go on, and those that have yet to stop do not."""

    ranks: Ranks
    target: CallId


class PromptsOpen(Message):
    """To ranks' service threads: whether somebody is asked for a debugger command or by input(), on any rank.

    Timeouts of collectives do not count that time. From the supervisor.
    """

    ranks: Ranks
    is_open: bool


class OpenDebugPort(Message):
    """Have debugpy listen in a rank's process. The service thread replies with a `DebugPort`, as builtins.

    That takes longer than a reply may, so it is sent again until there is a port or a problem.
    """

    call: CallId
    ranks: Ranks
    port: int = 0  # 0: any that is free


# Reports


class DebuggerPlace(Struct, frozen=True, gc=False):
    """Where a rank was when it was asked to stop in the debugger."""

    place: str = ""  # "cell 7, line 12 in train"; "": it runs no code of the user's
    inside: str = ""  # what its line is in, if it waits: "all_reduce #41", "time.sleep"
    problem: str = ""  # why it does not stop


class DebugPort(Struct, frozen=True, gc=False):
    """Where debugpy listens in a rank's process."""

    host: str = ""
    port: int = 0
    machine: str = ""  # the name of the rank's machine
    cwd: str = ""
    problem: str = ""  # why it does not listen


class DebuggedCallEnded(Message):
    """A call has ended whose debugger's commands came from this client. From the supervisor."""

    target: CallId
    lost: tuple[RankExited, ...] = ()
