"""Both ends of linked sockets in one process, of which the DEALER's goes on in another socket: as in a standby."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from meshbook.wire import linked_sockets
from meshbook.wire.linked_sockets import LinkedDealer, LinkedRouter
from meshbook.wire.loop import Loop
from tests.budget import when

HELLO = b"it is me"


class HoldingLoop(Loop):
    """As one with a standby: while it is told to hold, actions wait."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Callable[[], object]] | None = None

    def act(self, action: Callable[[], object], *, logged: bool = True) -> None:
        if self.held is None:
            action()
        else:
            self.held.append(action)


class Ends:
    def __init__(self, folder: Path) -> None:
        self.loop, self.context = HoldingLoop(), zmq.Context[zmq.Socket[bytes]]()
        self.up: list[bytes] = []
        self.down: list[bytes] = []
        self.hellos: list[list[bytes]] = []
        socket = self.context.socket(zmq.ROUTER)
        address = f"ipc://{folder}/router"
        socket.bind(address)
        self.router = LinkedRouter(self.loop, socket, self._on_message, self._on_hello, handover=True)
        self.acts = True
        self.num_logged = 0  # actions that a standby is to take too
        self.dealer = LinkedDealer(self.context, address, b"dealer", act=self._act)
        self.dealer.introduce(HELLO)
        self.turn_until(lambda: self.hellos)

    def _act(self, send: Callable[[], object], *, logged: bool = True) -> None:
        self.num_logged += logged
        if self.acts:
            send()

    def _on_message(self, identity: bytes, body: bytes) -> None:
        self.up.append(body)

    def _on_hello(self, identity: bytes, frames: list[bytes]) -> None:
        self.hellos.append(frames)
        self.router.open_peer(identity)

    def turn_until(self, is_done: object) -> None:
        def seen() -> object:
            self.loop.run_once(0.005)
            while self.dealer.socket.poll(0):
                body = self.dealer.accept(self.dealer.socket.recv_multipart())
                if body is not None:
                    self.down.append(body)
            return is_done()  # type: ignore[operator]

        when(seen)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    yield ends
    ends.router.close()
    ends.dealer.close()
    ends.context.destroy(linger=0)


def test_a_dealer_in_another_process_gets_and_sends_what_was_lost_while_its_former_connection_is_open(
    ends: Ends,
) -> None:
    ends.dealer.send(b"1")
    ends.turn_until(lambda: ends.up == [b"1"])
    former = ends.dealer.socket
    ends.acts = False
    ends.dealer.send(b"2")  # is lost with the process
    ends.acts = True
    ends.router.send(b"dealer", b"first")  # and this arrives in its socket
    ends.dealer.reopen(ends.context)
    ends.dealer.send(b"3")
    ends.router.send(b"dealer", b"second")
    ends.turn_until(lambda: len(ends.up) >= 3 and len(ends.down) >= 2)
    assert (ends.up, ends.down) == ([b"1", b"2", b"3"], [b"first", b"second"])
    former.close(linger=0)


def test_that_much_data_is_acknowledged_is_no_action_of_a_standby_which_has_it_without_its_bytes(ends: Ends) -> None:
    before = ends.num_logged
    ends.router.send(b"dealer", bytes(3 << 20))
    ends.turn_until(lambda: ends.down)
    assert ends.num_logged == before
    assert not ends.dealer._link.owes_acknowledgement


@pytest.mark.parametrize("reason", ["an acknowledgement is due", "connections may have broken"])
def test_what_came_since_the_loop_holds_back_is_not_acknowledged_before_a_standby_knows_of_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(linked_sockets, "_ACKNOWLEDGE_AFTER_S", 0.0 if "due" in reason else 60.0)
    held: list[Callable[[], object]] = []
    ends.loop.held = held
    ends.dealer.send(b"1")
    ends.turn_until(lambda: ends.up)
    if "broken" in reason:
        ends.router._sync_later(dict(ends.router._peers))
    ends.turn_until(lambda: held)
    assert ends.dealer._link._unacknowledged
    ends.loop.held = None
    for action in held:
        action()
    ends.turn_until(lambda: not ends.dealer._link._unacknowledged)
