"""Where a rank lets actors in: called by its service thread, by name, when somebody asks for the rank's address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.actors.runtime.life import life
from meshbook.actors.runtime.post import farewell


def open_door(resolve: Callable[[str], Any]) -> list[Any]:
    """This process's address, as plain data. `resolve` gives the rank's own object for a handle among arguments."""
    found = life()
    found.on_rank = True
    found.post.parcels.resolve = resolve
    address = found.post.address
    return [address.node, address.key, address.pid]


def say_farewell() -> None:
    """The rank was told to end, and will, in the middle of whatever it does."""
    farewell()
