"""A rank's way to the mesh's store: torch's own Store calls, a token at the door, and waits that can be given up."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import zmq
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from meshbook.rank.process_groups.store import MeshStore
from meshbook.supervisor.store import StoreServer
from meshbook.wire import keys
from meshbook.wire.loop import Loop
from tests.budget import WAIT_S, when
from tests.connections import cut


class Served:
    """A store served by a thread of the test's, and ways to it."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.loop = Loop()
        self.server = StoreServer(self.loop, self.context, f"ipc://{folder}/store.sock", "token")
        curve_keys = keys.new_curve_keys()
        self.tcp = (self.server.listen("127.0.0.1", curve_keys), curve_keys[0].decode())  # address, public key
        self._thread = threading.Thread(target=self._serve)
        self._stores: list[MeshStore] = []
        self._ended = False
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended:
            self.loop.run_once(max_wait_s=0.01)

    def store(
        self, token: str = "token", *, timeout_s: float = 30.0, address: str = "", server_key: str | None = None
    ) -> MeshStore:
        address = address or self.server.address
        self._stores.append(MeshStore(self.context, address, token, timeout_s=timeout_s, server_key=server_key))
        return self._stores[-1]

    def close(self) -> None:
        self._ended = True
        self._thread.join(WAIT_S)
        self.server.close()
        for store in self._stores:
            store.close()
        self.context.destroy(linger=0)


@pytest.fixture
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="mbs", dir="/tmp") as folder:
        served = Served(Path(folder))
        yield served
        served.close()


def test_torch_finds_in_it_all_that_a_store_can_do(served: Served) -> None:
    ours = served.store()
    store = PrefixStore("e1", ours)
    store.set("a", "1")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"1", True, False)
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "other", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["y", "x"]) == [b"2", b"1"]
    store.append("x", "23")
    assert store.get("x") == b"123"
    assert (store.delete_key("x"), store.delete_key("x")) == (True, False)
    assert store.num_keys() == 4
    assert (ours.get("e1/a"), ours.num_keys(), ours.has_extended_api()) == (b"1", 4, True)


def test_a_wait_ends_when_another_sets_what_it_waits_for(served: Served) -> None:
    found: list[bytes] = []
    reader = served.store()
    waits = threading.Thread(target=lambda: found.extend(reader.multi_get(["a", "b"])))
    waits.start()
    writer = served.store()
    writer.set("a", b"1")
    writer.set("b", b"2")
    waits.join(WAIT_S)
    assert found == [b"1", b"2"]


def test_ranks_here_and_those_of_other_machines_share_the_keys(served: Served) -> None:
    address, key = served.tcp
    near, far = served.store(), served.store(address=address, server_key=key)
    found: list[bytes] = []
    waits = threading.Thread(target=lambda: found.append(far.get("a")))
    waits.start()
    near.set("a", "1")
    waits.join(WAIT_S)
    far.set("b", "2")
    assert (found, near.get("b")) == ([b"1"], b"2")


def test_from_the_network_nobody_is_heard_without_the_servers_key_and_the_token(served: Served) -> None:
    address, key = served.tcp
    other_key = keys.new_curve_keys()[0].decode()
    for token, server_key in (("token", other_key), ("another", key)):
        stranger = served.store(token, timeout_s=0.3, address=address, server_key=server_key)
        with pytest.raises(DistStoreError, match="did not answer in time"):
            stranger.set("a", "1")
    assert served.store(address=address, server_key=key).num_keys() == 0


def test_requests_and_replies_outlive_a_connection_that_breaks(served: Served) -> None:
    waiting, other = served.store(), served.store()
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(waiting.get("a")))
    waiter.start()
    for number in range(20):
        assert other.add("n", 1) == number + 1  # once each
        assert cut("store.sock")
    other.set("a", "1")
    waiter.join(WAIT_S)
    assert got == [b"1"]


def test_a_wait_in_vain_ends_in_its_time_and_says_for_what(served: Served) -> None:
    store = served.store()
    with pytest.raises(DistStoreError, match="it waits for nobody's, which nobody has set"):
        store.wait(["nobody's"], timedelta(milliseconds=50))
    store.set("nobody's", b"late")
    assert store.get("nobody's") == b"late"  # not the late answer to the question before


def test_who_has_not_shown_the_token_can_neither_read_nor_write(served: Served) -> None:
    served.store().set("a", b"1")
    stranger = served.store("wrong", timeout_s=0.1)
    for act in (lambda: stranger.get("a"), lambda: stranger.set("a", b"2")):
        with pytest.raises(DistStoreError, match="did not answer"):
            act()
    assert served.store().get("a") == b"1"


@pytest.mark.parametrize("in_c", [False, True], ids=["in Python", "in C++"])
def test_a_wait_that_is_given_up_ends_and_the_next_one_works(served: Served, in_c: bool) -> None:
    ours = served.store()
    store = PrefixStore("e1", ours) if in_c else ours
    errors: list[BaseException] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            store.get("never")
        except RuntimeError as error:
            errors.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    begun.wait(WAIT_S)
    when(lambda: bool(served.server.store._pending))
    ours.cancel_waits()
    waits.join(WAIT_S)
    assert "given up" in str(errors[0])
    store.set("never", b"now")
    assert store.get("never") == b"now"
