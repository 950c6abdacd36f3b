"""The actor that Monarch's round trips are measured with. It stands alone: Monarch's processes import it by name."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, endpoint


class Idle(Actor):
    """Does nothing, or runs a cell."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    @endpoint
    def nothing(self) -> None: ...

    @endpoint
    def cell(self, source: str) -> None:
        exec(source, self.names)
