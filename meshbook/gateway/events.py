"""What happens on a mesh, as server-sent events, for as long as a reader reads.

A reader that is slow gets fewer events and not older ones: each time it has taken one, the present state is compared
with what it was sent. Only output is sent in full, from a cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from meshbook.controller.session import Session
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription
from meshbook.errors import MeshbookError, MeshTimeout
from meshbook.gateway import answers
from meshbook.gateway.operations import fetch_output

_MAX_UPDATES_PER_S = 2.0
# Seconds without an event until a comment is sent, so that proxies and readers see that the stream is alive.
_KEEPALIVE_S = 15.0
# Seconds between two looks whether the server is to end.
_LOOK_S = 0.5


async def stream(session: Session, closing: asyncio.Event, cursor: int | None) -> AsyncIterator[bytes]:
    """Yield events until the mesh or the server ends.

    Args:
        closing: set when the server ends.
        cursor: output from here on; None: from now on.

    Raises:
        NotAttached, MeshTimeout, UsageError (the cursor): before the first event only.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    subscription = await run_in_threadpool(MeshSubscription, session, max_updates_per_s=_MAX_UPDATES_PER_S)

    def wake(_: MeshSnapshot) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(changed.set)

    subscription.listeners.append(wake)
    try:
        output = await run_in_threadpool(fetch_output, session, cursor)
        if cursor is None:
            cursor = output.last_place
        sent: dict[str, Any] = {}
        quiet_since = loop.time()
        while not closing.is_set():
            snapshot = subscription.snapshot
            for kind, content in _states(snapshot).items():
                if sent.get(kind) != content:
                    sent[kind], quiet_since = content, loop.time()
                    yield _event(kind, content)
            if snapshot.ended is not None:
                yield _event("end", {"reason": snapshot.ended})
                return
            try:
                output = await run_in_threadpool(fetch_output, session, cursor)
            except MeshTimeout:  # the supervisor is busy, or stuck
                continue
            except MeshbookError as error:
                yield _event("end", {"reason": session.ended or session.connection.stop_reason or str(error)})
                return
            answer = answers.logs_answer(output, cursor)
            new_cursor = answer["cursor"]
            if new_cursor != cursor:
                cursor, quiet_since = new_cursor, loop.time()
                if answer["output"]:
                    yield _event("output", answer, cursor)
                if output.num_left or "cursor=" in answer.get("left_out", ""):
                    continue  # there is more
            if loop.time() - quiet_since > _KEEPALIVE_S:
                quiet_since = loop.time()
                yield b": alive\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _LOOK_S)
            changed.clear()
        yield _event("end", {"reason": "the server has ended"})
    finally:
        subscription.close()


def _states(snapshot: MeshSnapshot) -> dict[str, Any]:
    """Return what is sent whenever it has changed, by kind of event."""
    metrics = [
        {"name": one["name"], "step": one["curve"][-1][0], "mean": one["curve"][-1][1]}
        for one in answers.metrics_answer(snapshot, tuple(rank.rank for rank in snapshot.ranks), None)["metrics"]
    ]
    states: dict[str, Any] = {
        "status": {"mesh": snapshot.name, "running": len(snapshot.calls), "ranks": answers.state_rows(snapshot.ranks)},
        "findings": {"findings": [answers.finding_answer(one) for one in snapshot.findings]},
    }
    return states | ({"metrics": {"metrics": metrics}} if metrics else {})


def _event(kind: str, content: Any, cursor: int | None = None) -> bytes:
    """Return an event; JSON has no line ends in it."""
    head = f"event: {kind}\n" + (f"id: {cursor}\n" if cursor is not None else "")
    return head.encode() + b"data: " + msgspec.json.encode(content) + b"\n\n"
