"""Digests: equal for equal values, different for different ones, and none where a comparison would cost too much."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.rank.previews.digests import MAX_DIGEST_ITEMS, digest_plain


def _circle() -> list[Any]:
    circle: list[Any] = ["x"]
    circle.append(circle)
    return circle


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, "x"]
    return value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1: 2}, [1, 2]),
        ({1: 2}, [[1, 2]]),
        ({"a": 1}, ["a", 1]),
        ({"a": 1}, ("dict", ["a", 1])),
        (["a"], ("list", ["a"])),
        ({"a"}, frozenset({"a"})),
        ([], ()),
        ([[1, 2], [3]], [[1], [2, 3]]),
        ([True, 1], [1, True]),
        ([...], [None]),
    ],
)
def test_values_of_different_structure_have_different_digests(one: Any, other: Any) -> None:
    assert None not in (digest_plain(one), digest_plain(other))
    assert digest_plain(one) != digest_plain(other)


def test_equal_strings_have_equal_digests_whether_or_not_they_are_interned() -> None:
    assert digest_plain(["ab", "\udc80"]) == digest_plain(["".join(("a", "b")), "\udc80"])


def test_sets_inside_of_others_have_equal_digests_whatever_order_they_are_in() -> None:
    names = [f"name{i}" for i in range(200)]
    assert digest_plain([{"a", *names}]) == digest_plain([{*reversed(names), "a"}])


@pytest.mark.parametrize(
    "value",
    [object(), [object()], {"a": type}, _circle(), _nested(3000), ["x"] * (MAX_DIGEST_ITEMS + 1), ["x" * (2 << 20)]],
)
def test_what_is_not_plain_or_too_large_has_no_digest(value: Any) -> None:
    assert digest_plain(value) is None


def test_a_dict_of_two_thousand_short_entries_has_a_digest() -> None:
    assert digest_plain({f"k{i}": "v" for i in range(MAX_DIGEST_ITEMS // 2 - 1)}) is not None
