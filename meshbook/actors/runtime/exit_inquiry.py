"""How a rank's actors learn how another process has exited: whoever has spawned them asks its own spawner, and so on.

The program at the root is a client of the meshes, and hears from their supervisors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.transport import Transport, encode
from meshbook.wire import messages
from meshbook.wire.messages import NodeAddress


class ExitInquiry:
    """Asks the owners of this process's actors, and answers those whose actors this process owns.

    Attributes:
        ask_here: has a mesh that this process is a client of look, and returns whether there is one with such a
            process.
    """

    def __init__(self, transport: Transport, owners: Callable[[], Iterable[NodeAddress]]) -> None:
        """owners: returns the processes that own actors of this one."""
        self.ask_here: Callable[[str, Callable[[], None]], bool] = lambda node, then: False
        self._transport, self._owners = transport, owners
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Any, Callable[[], None]]] = {}  # number -> who was asked, and what follows
        transport.message_handlers[messages.AskExit] = self._asked
        transport.message_handlers[messages.ExitAnswer] = self._answered
        transport.peer_lost_callbacks.append(self._peer_lost)

    def ask(self, node: str, then: Callable[[], None]) -> None:
        """Have it looked how a process has exited; call `then` when that is recorded, or not known. Any thread."""
        if self.ask_here(node, then):
            return
        for address in self._owners():
            if address.node == self._transport.address.node:
                continue
            try:
                peer = self._transport.peer(address)
            except PeerLost:
                continue
            number = next(self._numbers)
            self._open[number] = peer, then
            try:
                peer.send(encode(messages.AskExit(number, node)))
                return
            except PeerLost:
                if self._open.pop(number, None) is None:  # `_peer_lost` was faster
                    return
        then()

    def _asked(self, peer: Any, question: messages.AskExit) -> None:
        reasons = self._transport.exit_reasons

        def answer() -> None:
            reason = reasons.reason_of(question.node)
            with contextlib.suppress(PeerLost):
                peer.send(encode(messages.ExitAnswer(question.number, question.node, reason)))

        if reasons.ask is None:
            answer()
        else:
            reasons.ask(question.node, answer)

    def _answered(self, peer: Any, answer: messages.ExitAnswer) -> None:
        if answer.reason:
            self._transport.exit_reasons.record(answer.node, answer.reason)
        if (asked := self._open.pop(answer.number, None)) is not None:
            asked[1]()

    def _peer_lost(self, peer: Any, reason: str) -> None:
        for number, (asked, then) in list(self._open.items()):
            if asked is peer and self._open.pop(number, None) is not None:
                then()
