"""What overviews show of an actor: its state, the messages in progress, its last error."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.actors.runtime.calls import IncomingCall, MessageKey
from meshbook.actors.runtime.interrupts import Interruptible
from meshbook.actors.runtime.ports import ReplyPort
from meshbook.actors.shape import Point
from meshbook.clock import monotonic, wall
from meshbook.wire.messages import MAX_END_FRAMES, ActiveEndpoint, ActorFailure, Frame, PendingEndpointCall


class RunningMessage(NamedTuple):
    """A message in progress."""

    method: str
    started_at: float  # time.monotonic()
    task: asyncio.Task[None] | None  # None: not on an event loop
    caller: str  # node of the sending process


class ActorRecord:
    """The facts about one actor that any thread may read."""

    def __init__(self, id: str, name: str, point: Point) -> None:
        self.id, self.name, self.point = id, name, point
        self.class_name = "?"
        self.spawned_at = wall()
        self.state = "starting"  # "living", "failed", "stopped"
        self.last_error: str | None = None
        self.num_messages = 0
        self.running: dict[MessageKey, RunningMessage] = {}
        # explicit ports that its endpoints were given, as long as anybody here has them
        self.reply_ports: weakref.WeakSet[ReplyPort[Any]] = weakref.WeakSet()

    @property
    def label(self) -> str:
        """The actor's name and its point in its mesh, for messages."""
        return f"{self.name} {self.point}" if self.point.extent else self.name

    def constructed(self, failure: ActorFailure | None) -> None:
        """`__init__` has returned, or failed."""
        self.state, self.last_error = ("living", None) if failure is None else ("failed", failure.text)

    def begin(self, call: IncomingCall, task: asyncio.Task[None] | None) -> None:
        self.num_messages += 1
        self.running[call.key] = RunningMessage(call.request.method, monotonic(), task, call.peer.address.node)

    def give_up_ports(self, reason: str) -> None:
        """Send callers an error who wait for an answer through a port: the actor has ended."""
        for port in list(self.reply_ports):
            port.give_up(f"kept the port of this call, and its actor has ended without an answer: {reason}")

    def status_row(self, *, num_queued: int) -> dict[str, Any]:
        """Return the actor's status as plain data."""
        running = next(iter(list(self.running.values())), None)
        return {
            "actor": self.name,
            "id": self.id,
            "class": self.class_name,
            "place": self.point.rank,
            "point": dict(self.point),
            "born_at": self.spawned_at,
            "state": self.state,
            "mailbox": num_queued,
            "running": running.method if running else None,
            "seconds": monotonic() - running.started_at if running else None,
            "messages": self.num_messages,
            "last_error": self.last_error,
        }

    def snapshot_endpoints(
        self, node: str, *, is_async: bool, awaited: Mapping[tuple[str, MessageKey], Sequence[PendingEndpointCall]]
    ) -> list[ActiveEndpoint]:
        """Return the messages in progress and the replies that each waits for."""
        now = monotonic()
        return [
            ActiveEndpoint(
                actor=self.id,
                name=self.name,
                node=node,
                endpoint=running.method.removeprefix("="),
                caller=running.caller,
                call=max(0, key[1]) if key[0] >= 0 else 0,
                is_async=is_async,
                running_s=now - running.started_at,
                frames=_awaiting_frames(running.task),
                pending_calls=tuple(awaited.get((self.id, key), ())),
            )
            for key, running in list(self.running.items())
        ]


def _awaiting_frames(task: asyncio.Task[None] | None) -> tuple[Frame, ...]:
    """Return a task's frames, outermost first, through all coroutines that it awaits."""
    frames: list[Frame] = []
    awaitable: Any = task.get_coro() if task is not None else None
    while awaitable is not None and len(frames) < MAX_END_FRAMES:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(Frame(file=code.co_filename, line=frame.f_lineno or code.co_firstlineno, function=code.co_name))
        # `await_in_sections` drives its coroutine itself, so `cr_await` does not show it
        inner = frame.f_locals.get("work") if code is Interruptible.await_in_sections.__code__ else None
        awaitable = inner or getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return tuple(frames)
