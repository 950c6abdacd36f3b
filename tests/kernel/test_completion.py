"""Completions of two sides, made one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.kernel.completion import TYPES_KEY, completer_namespace, merge_completions, root_name


def local(matches: list[str], start: int, end: int) -> dict[str, Any]:
    entries = [{"start": start, "end": end, "text": text, "type": "function", "signature": ""} for text in matches]
    return {
        "matches": matches,
        "cursor_start": start,
        "cursor_end": end,
        "metadata": {TYPES_KEY: entries},
        "status": "ok",
    }


def remote(matches: list[str], start: int, end: int) -> dict[str, Any]:
    return {"matches": matches, "cursor_start": start, "cursor_end": end, "types": ["attribute"] * len(matches)}


@pytest.mark.parametrize(
    ("code", "root"),
    [("model.fc.we", "model"), ("y = x", "x"), ("f(a[0].b", "a"), ("1 + ", None), ("data['k'].", "data"), ("", None)],
)
def test_the_root_of_what_is_typed(code: str, root: str | None) -> None:
    assert root_name(code, len(code)) == root


def test_the_root_is_that_at_the_cursor() -> None:
    assert root_name("first(second)", 3) == "first"
    assert root_name("first(second)", 8) == "second"


def test_without_a_ranks_answer_the_local_one_stands() -> None:
    ours = local(["a"], 0, 1)
    assert merge_completions(ours, None, "a", remote_first=True) is ours
    assert merge_completions(ours, remote([], 0, 0), "a", remote_first=True) is ours


def test_equal_matches_come_once_and_the_side_that_will_run_it_first() -> None:
    ours, theirs = local(["print", "prod"], 0, 2), remote(["product", "print"], 0, 2)
    assert merge_completions(ours, theirs, "pr", remote_first=True)["matches"] == ["product", "print", "prod"]
    assert merge_completions(ours, theirs, "pr", remote_first=False)["matches"] == ["print", "prod", "product"]


def test_answers_that_replace_different_parts_are_widened_to_the_larger() -> None:
    merged = merge_completions(local([".fc"], 5, 7), remote(["fc"], 6, 7), "model.f", remote_first=True)
    assert (merged["matches"], merged["cursor_start"], merged["cursor_end"]) == ([".fc"], 5, 7)


def test_types_of_both_sides_are_kept() -> None:
    merged = merge_completions(local(["a1"], 0, 1), remote(["a2"], 0, 1), "a", remote_first=True)
    types = {entry["text"]: entry["type"] for entry in merged["metadata"][TYPES_KEY]}
    assert types == {"a1": "function", "a2": "attribute"}


def test_the_completer_sees_only_what_it_is_shown_and_its_own_namespace_again_afterwards() -> None:
    own: dict[str, Any] = {"handle": object()}
    completer = SimpleNamespace(namespace=own, global_namespace=own)
    with completer_namespace(completer, {}):
        assert completer.namespace == completer.global_namespace == {}
    assert completer.namespace is completer.global_namespace is own
