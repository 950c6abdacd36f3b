"""The stream of a mesh's events, as a reader sees its end."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.controller.subscription import MeshSnapshot
from meshbook.errors import NotAttached
from meshbook.gateway import events


def test_a_reader_hears_why_a_mesh_has_ended_before_its_supervisor_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [SimpleNamespace(last_place=0)]

    def fetch_output(session: Any, cursor: int | None) -> Any:
        if answers:
            return answers.pop()
        raise NotAttached("the mesh 'short' has ended: stopped by a person; what its ranks held is gone")

    subscription = SimpleNamespace(snapshot=MeshSnapshot(), listeners=[], close=lambda: None)
    monkeypatch.setattr(events, "MeshSubscription", lambda session, **options: subscription)
    monkeypatch.setattr(events, "fetch_output", fetch_output)
    session: Any = SimpleNamespace(ended=None, connection=SimpleNamespace(stop_reason="stopped by a person"))

    async def read() -> list[bytes]:
        return [event async for event in events.stream(session, asyncio.Event(), None)]

    kind, data = asyncio.run(read())[-1].decode().splitlines()[:2]
    assert (kind, json.loads(data.removeprefix("data: "))) == ("event: end", {"reason": "stopped by a person"})
