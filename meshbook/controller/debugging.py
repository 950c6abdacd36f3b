"""The ranks of a call that the debugger has stopped, as one prompt: answers folded, commands for some or all of them.

Pure: the time is passed in as seconds; the caller shows, asks and sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshbook.fold.lines import LineFolder
from meshbook.ids import Ranks, format_ranks, name_ranks, parse_ranks
from meshbook.wire.messages import DebuggerStop, FoldedItem, Line, RankExited, Text

# Seconds that a prompt waits for further ranks to stop, after the first that did. When all have, it comes at once;
# where some go on, or wait in a collective, it is to be there within 0.3 s. Who stops later joins at the next prompt.
_STOPS_S = 0.2
# ... for ranks that were sent a command, which may take a while.
_COMMAND_S = 1.0

_CONTINUE = ("c", "cont", "continue")
_QUIT = ("q", "quit", "exit")
_FOCUS = re.compile(r"ranks?\s+(?P<ranks>all|\d[\d,\s-]*)")
_ALL = re.compile(r"all\s+(?P<command>[^\s=(.\[].*)")

HELP = """\
p EXPRESSION, any Python      on the ranks of the prompt; equal answers are shown once
n, s, r, until LINE, jump     next line, into a call, to the return, to a line
w, u, d, l, ll, a             the stack, up, down, source, arguments
b LINE, b FUNCTION, cl, tbreak  breakpoints, until the cell ends
c                             go on; ranks that are not in the prompt stay stopped
rank 2, ranks 0-3, ranks all  which ranks the next commands go to
all n                         one command for all that are stopped
ranks                         where each is stopped
q                             end the cell on all ranks, nobody is left waiting; after %debug: end the look
"""


@dataclass(frozen=True)
class TypedCommand:
    """What a line that was typed at the prompt asks for.

    Attributes:
        replies: what each rank gets; None: there is nobody to give it a command.
        items: to show now.
        ends_call: the call is to be stopped on all its ranks, also those that run.
    """

    replies: dict[int, str | None] = field(default_factory=dict)
    items: tuple[FoldedItem, ...] = ()
    ends_call: bool = False


def describe_end(title: str, lost: Iterable[RankExited]) -> str:
    """Return "cell 3 has ended: rank 1 was killed by SIGKILL", for a user who is at its prompt."""
    ranks = describe_exits(lost)
    return f"{title} has ended{f': {ranks}' if ranks else ''}"


def describe_exits(exits: Iterable[RankExited]) -> str:
    """Return "rank 1 was killed by SIGKILL, rank 2 exited with code 3"."""
    return ", ".join(f"rank {exited.rank} {exited.description}" for exited in exits)


class DebuggerPrompt:
    """The prompt of one call.

    Attributes:
        places: where ranks were that have not stopped, "in recv at cell 7, line 3".
    """

    def __init__(self, ranks: Ranks, asked: Ranks | None = None) -> None:
        """
        Args:
            ranks: of the call.
            asked: those that were asked to stop; None: all may stop.
        """
        self._ranks = ranks
        self.places: dict[int, str] = {}
        self._stopped: dict[int, DebuggerStop] = {}
        self._unshown: dict[int, str] = {}  # texts that came since the last prompt
        # May stop any moment: the prompt waits for them a little.
        self._awaited = set(ranks if asked is None else asked)
        self._returning: set[int] = set()  # have been let go, and may stop again
        self._focus: frozenset[int] | None = None  # None: all that are stopped
        self._due_at = float("inf")
        self._has_prompted = False

    @property
    def stopped(self) -> Ranks:
        return tuple(sorted(self._stopped))

    @property
    def is_over(self) -> bool:
        """Whether all ranks were let go, and none may stop again at a step or a breakpoint."""
        return self._has_prompted and not self._stopped and not self._returning

    def remove(self, rank: int) -> None:
        """Record that a rank will say nothing more, because it was lost."""
        self._stopped.pop(rank, None)
        self._awaited.discard(rank)
        self._returning.discard(rank)

    def add(self, rank: int, stop: DebuggerStop, now: float) -> None:
        """Record that a rank waits for a command."""
        if not self._stopped:
            self._due_at = max(now + _STOPS_S, self._due_at if self._due_at < float("inf") else 0.0)
        self._stopped[rank] = stop
        self._returning.discard(rank)
        self._unshown[rank] = self._unshown.get(rank, "") + stop.text
        self._awaited.discard(rank)

    def seconds_until_due(self, now: float) -> float | None:
        """Return how long the prompt is to wait for further ranks; None: no rank is stopped."""
        if not self._stopped:
            return None
        return max(0.0, self._due_at - now) if self._awaited else 0.0

    def pop_text(self, now: float) -> tuple[FoldedItem, ...]:
        """Return what the ranks said since the last prompt, folded."""
        texts, self._unshown = self._unshown, {}
        if not texts:
            return ()
        folder = LineFolder(texts)
        for rank in sorted(texts):
            text = texts[rank]
            folder.feed(rank, (Text("stdout", text if not text or text.endswith("\n") else text + "\n"),), now)
        return tuple(folder.flush(now, final=True))

    def prompt(self) -> str:
        """Return the prompt: which ranks a command goes to, and who else is stopped or runs."""
        others = tuple(sorted(set(self._stopped) - set(self._in_focus())))
        running = tuple(sorted(set(self._ranks) - set(self._stopped)))
        parts = [name_ranks(self._in_focus())]
        if not self._has_prompted:
            self._has_prompted = True
            parts.append("h lists the commands")
        if others:
            parts.append(f"{format_ranks(others)} stopped too")
        if running:
            parts.append(f"{format_ranks(running)} not stopped")
        return f"({' · '.join(parts)}) "

    def typed(self, line: str | None, now: float) -> TypedCommand:
        """Handle what was typed at the prompt; None: there is nobody to type."""
        if line is None:
            return self._send(self.stopped, None, now)
        text = line.strip()
        if text in _QUIT:
            is_look_back = all(stop.is_post_mortem for stop in self._stopped.values())
            return self._send(self.stopped, "c", now) if is_look_back else self.end()
        if text in ("help", "h", "?"):
            return self._say(HELP)
        if text == "ranks":
            return self._say(self._places())
        if chosen := _FOCUS.fullmatch(text):
            return self._say(self._choose(chosen["ranks"]))
        if for_all := _ALL.fullmatch(text):
            return self._send(self.stopped, for_all["command"], now)
        return self._send(self._in_focus(), line, now)

    def end(self) -> TypedCommand:
        """Let go of all ranks: the call is stopped."""
        ranks = self.stopped
        self._stopped.clear()
        return TypedCommand(dict.fromkeys(ranks), ends_call=True)

    def _send(self, ranks: Ranks, command: str | None, now: float) -> TypedCommand:
        words = (command or "c").split()
        for rank in ranks:
            stop = self._stopped.pop(rank)
            if stop.has_breakpoints or words[:1] not in ([word] for word in _CONTINUE):
                self._returning.add(rank)
        self._awaited = set(ranks)
        self._due_at = now + _COMMAND_S
        return TypedCommand(dict.fromkeys(ranks, command))

    def _say(self, text: str) -> TypedCommand:
        lines = text.splitlines()
        return TypedCommand(items=tuple(Line(ranks=self._ranks, stream="stdout", text=line) for line in lines))

    def _in_focus(self) -> Ranks:
        """Return the ranks that a command goes to: all that are stopped once none of the chosen ones is."""
        chosen = self.stopped if self._focus is None else tuple(sorted(self._focus & set(self._stopped)))
        return chosen or self.stopped

    def _choose(self, ranks: str) -> str:
        if ranks == "all":
            self._focus = None
            return ""
        try:
            wanted = set(parse_ranks(ranks.replace(" ", "")))
        except ValueError as error:
            return f"{error}\n"
        if missing := sorted(wanted - set(self._stopped)):
            return f"{name_ranks(missing)}: not stopped; stopped: {format_ranks(self.stopped)}\n"
        self._focus = frozenset(wanted)
        return ""

    def _places(self) -> str:
        lines = [f"rank {rank}: {stop.place}" for rank, stop in sorted(self._stopped.items())]
        running = sorted(set(self._ranks) - set(self._stopped))
        lines += [f"rank {rank}: not stopped, {self.places[rank]}" for rank in running if rank in self.places]
        if others := [rank for rank in running if rank not in self.places]:
            lines.append(f"{name_ranks(others)}: not stopped")
        return "\n".join(lines) + "\n"
