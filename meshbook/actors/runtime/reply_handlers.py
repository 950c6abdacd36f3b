"""The open calls of a process, and its ports: who handles the replies that arrive."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from meshbook.wire import messages


class ReplyHandler(Protocol):
    """The handler of the replies to one call id, or of the messages to one port."""

    caller: Any  # (actor id, message key) of the caller; None: code outside any actor

    def on_reply(self, peer: Any, reply: Any) -> bool:
        """Handle an ActorReply, ActorFailure or PortMessage; return whether it was the last one."""

    def on_peer_lost(self, peer: Any, reason: str) -> bool:
        """Handle the exit of the process behind `peer`; return whether no more replies are expected."""

    def awaited_replies(self) -> list[messages.PendingEndpointCall]:
        """Return the actors that have not replied, if a caller waits for them."""


class ReplyHandlers:
    """The table of reply handlers. Any thread adds and removes; the reader thread passes on replies and losses."""

    def __init__(self) -> None:
        self.on_added: Callable[[], None] | None = None  # called for each new handler, on the caller's thread
        self._ids = itertools.count(1)
        self._handlers: dict[int, ReplyHandler] = {}

    def add(self, handler: ReplyHandler) -> int:
        """Register `handler`; return its id, which serves as call id or port."""
        handler_id = next(self._ids)
        self._handlers[handler_id] = handler
        if self.on_added is not None:
            self.on_added()
        return handler_id

    def remove(self, handler_id: int) -> None:
        self._handlers.pop(handler_id, None)

    def __len__(self) -> int:
        return len(self._handlers)

    def awaited_replies(self) -> list[tuple[Any, list[messages.PendingEndpointCall]]]:
        """Return the open calls that this process waits for, each with its caller. Any thread."""
        found = []
        for handler in list(self._handlers.values()):
            if replies := handler.awaited_replies():
                found.append((handler.caller, replies))
        return found

    def on_reply(self, handler_id: int, peer: Any, reply: Any) -> bool:
        """Pass a reply on; return whether anybody waits for it. Reader thread only."""
        handler = self._handlers.get(handler_id)
        if handler is None:
            return False
        if handler.on_reply(peer, reply):
            self._handlers.pop(handler_id, None)
        return True

    def on_peer_lost(self, peer: Any, reason: str, handler_id: int | None = None) -> None:
        """Tell one handler, or all of them, that a process has exited. Reader thread only."""
        for known_id in list(self._handlers) if handler_id is None else (handler_id,):
            handler = self._handlers.get(known_id)
            if handler is not None and handler.on_peer_lost(peer, reason):
                self._handlers.pop(known_id, None)
