"""The store's memory: questions in, answers out, some of them later."""

from __future__ import annotations

from meshbook.supervisor.store import KeyStore
from meshbook.wire.messages import (
    StoreAdd,
    StoreCancel,
    StoreCompareSet,
    StoreDelete,
    StoreGet,
    StoreReply,
    StoreSet,
)


def test_a_question_is_answered_when_all_its_keys_are_there() -> None:
    store = KeyStore()
    assert store.handle(b"one", StoreGet(1, ("a", "b"))) == []
    assert store.handle(b"two", StoreSet(1, (("a", b"1"),))) == [(b"two", StoreReply(1))]
    answers = store.handle(b"two", StoreSet(2, (("b", b"2"),)))
    assert answers == [(b"two", StoreReply(2)), (b"one", StoreReply(1, (b"1", b"2")))]


def test_who_forgets_a_question_is_not_answered() -> None:
    store = KeyStore()
    store.handle(b"one", StoreGet(1, ("a",)))
    store.handle(b"one", StoreCancel(1))
    assert store.handle(b"two", StoreAdd(1, "a", 1)) == [(b"two", StoreReply(1, count=1))]


def test_a_key_that_was_deleted_before_the_others_came_is_waited_for_again() -> None:
    store = KeyStore()
    store.handle(b"one", StoreGet(1, ("a", "b")))
    store.handle(b"two", StoreSet(1, (("a", b"1"),)))
    store.handle(b"two", StoreDelete(2, "a"))
    assert len(store.handle(b"two", StoreSet(3, (("b", b"2"),)))) == 1
    assert (b"one", StoreReply(1, (b"1", b"2"))) in store.handle(b"two", StoreSet(4, (("a", b"1"),)))


def test_a_key_is_compared_before_it_is_set() -> None:
    store = KeyStore()
    assert store.handle(b"p", StoreCompareSet(1, "a", b"x", b"y"))[0][1].values == (b"x",)  # absent: what was expected
    assert store.handle(b"p", StoreCompareSet(2, "a", b"", b"y"))[0][1].values == (b"y",)
    assert store.handle(b"p", StoreCompareSet(3, "a", b"z", b"w"))[0][1].values == (b"y",)


def test_what_was_written_in_an_epoch_that_is_over_is_dropped_with_those_who_wait_for_it() -> None:
    store = KeyStore()
    store.handle(b"one", StoreSet(1, (("e1/a", b"1"), ("e10/a", b"2"))))
    store.handle(b"dead", StoreGet(1, ("e1/never",)))
    store.delete_prefix("e1/")
    assert len(store) == 1
    assert len(store.handle(b"one", StoreSet(2, (("e1/never", b"1"),)))) == 1
