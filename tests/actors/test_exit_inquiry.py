"""How a rank's actors ask their owners how another process has exited. No processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshbook.actors.runtime.exit_inquiry import ExitInquiry
from meshbook.actors.runtime.exit_reasons import ExitReasons
from meshbook.actors.runtime.peer import PeerLost
from meshbook.wire import messages
from meshbook.wire.messages import NodeAddress

HERE, OWNER, OTHER = (NodeAddress(name, "key", pid) for pid, name in enumerate(("here", "owner", "other")))


class Peer:
    def __init__(self, address: NodeAddress) -> None:
        self.address, self.is_lost = address, False
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        if self.is_lost:
            raise PeerLost("it has ended")
        self.sent.append(frame)


class Process:
    """A process with its inquiry, and peers that only store what they are sent."""

    def __init__(self, *owners: NodeAddress) -> None:
        self.peers = {address: Peer(address) for address in (OWNER, OTHER)}
        self.exit_reasons = ExitReasons()
        self.transport: Any = SimpleNamespace(
            address=HERE,
            message_handlers={},
            peer_lost_callbacks=[],
            exit_reasons=self.exit_reasons,
            peer=self.peers.__getitem__,
        )
        self.inquiry = ExitInquiry(self.transport, lambda: owners)
        self.exit_reasons.ask = self.inquiry.ask
        self.num_ended = 0

    def ask(self, node: str) -> None:
        def ended() -> None:
            self.num_ended += 1

        self.inquiry.ask(node, ended)

    def hear(self, message: Any, peer: Peer) -> None:
        self.transport.message_handlers[type(message)](peer, message)

    def lose(self, peer: Peer) -> None:
        peer.is_lost = True
        for callback in self.transport.peer_lost_callbacks:
            callback(peer, "it has ended")


def test_an_owners_answer_is_recorded_before_the_asker_goes_on() -> None:
    process = Process(HERE, OWNER)
    process.ask("lost")
    assert (len(process.peers[OWNER].sent), process.num_ended) == (1, 0)
    process.hear(messages.ExitAnswer(1, "lost", "was killed by SIGKILL"), process.peers[OWNER])
    assert process.exit_reasons.reason_of("lost") == "was killed by SIGKILL"
    assert process.num_ended == 1


def test_without_an_owner_nothing_is_known_and_the_asker_goes_on_at_once() -> None:
    process = Process(HERE)
    process.ask("lost")
    assert process.num_ended == 1


def test_an_owner_that_is_gone_is_passed_over_and_one_that_goes_ends_the_wait_once() -> None:
    process = Process(OTHER, OWNER)
    process.peers[OTHER].is_lost = True
    process.ask("lost")
    process.lose(process.peers[OWNER])
    assert process.num_ended == 1
    process.lose(process.peers[OWNER])
    process.hear(messages.ExitAnswer(1, "lost", ""), process.peers[OWNER])
    assert process.num_ended == 1
    assert process.exit_reasons.reason_of("lost") == ""


def test_what_is_asked_of_a_process_whose_meshes_do_not_know_it_goes_to_its_own_owner() -> None:
    process = Process(OWNER)
    process.hear(messages.AskExit(40, "lost"), process.peers[OTHER])
    assert (len(process.peers[OWNER].sent), process.peers[OTHER].sent) == (1, [])
    process.hear(messages.ExitAnswer(1, "lost", "exited with code 3"), process.peers[OWNER])
    (answer,) = process.peers[OTHER].sent
    assert b"exited with code 3" in answer


def test_a_mesh_of_this_process_is_asked_before_an_owner() -> None:
    process = Process(OWNER)

    def ask_here(node: str, then: Any) -> bool:
        process.exit_reasons.record(node, "exited with code 3")
        then()
        return True

    process.inquiry.ask_here = ask_here
    process.ask("lost")
    assert (process.num_ended, process.peers[OWNER].sent) == (1, [])
