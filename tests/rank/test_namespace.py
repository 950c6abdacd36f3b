from __future__ import annotations

import weakref
from typing import Any

import pytest

from meshbook.rank.cells.namespace import NamespaceTracker


class Space:
    """A namespace in which cells run, and what they are found to have changed."""

    def __init__(self, **names: Any) -> None:
        self.values: dict[str, Any] = dict(names)
        self.hidden: dict[str, Any] = {}
        self.names = NamespaceTracker(self.values, self.hidden)
        self.names.snapshot()

    def run(self, source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        code = compile(source, "<cell>", "exec")
        exec(code, self.values)
        return self.names.pop_changes((code,))


class Thing:
    pass


@pytest.mark.parametrize(
    "value", [1, 2.5, "text", b"bytes", None, True, [1], {"a": 1}, (1, 2), {3}, Thing(), len, Thing]
)
def test_new_names_are_bound_and_old_ones_are_not_news(value: object) -> None:
    space = Space(old=value)
    assert space.run("new = old") == (("new",), ())
    assert space.run("pass") == ((), ())


def test_bound_names_come_in_the_order_in_which_they_appeared() -> None:
    assert Space().run("b = 1\na = 2\nimport json\ndef f(): pass\nclass C: pass\nfor i in range(2): pass") == (
        ("b", "a", "json", "f", "C", "i"),
        (),
    )


def test_deleted_names_are_told() -> None:
    space = Space(a=1, b=[2], c=Thing())
    assert space.run("del c, a") == ((), ("a", "c"))
    assert space.run("del b\nb = 3") == (("b",), ())


def test_binding_a_name_to_the_object_it_has_is_no_change() -> None:
    space = Space(n=1, thing=Thing(), text="x" * 10_000)
    assert space.run("n = n; thing = thing") == ((), ())


def test_changing_an_object_in_place_is_no_change_of_its_name() -> None:
    space = Space(xs=[1], table={}, thing=Thing())
    assert space.run("xs.append(2); table['a'] = 1; thing.x = 1") == ((), ())


@pytest.mark.parametrize("make", ["Thing()", "[]", "{}", "()", "3.5", "'a' * 5000", "object()"])
def test_a_new_object_is_seen_even_where_the_old_one_lay(make: str) -> None:
    """After `del x` the next object of that size often gets the same address."""
    space = Space(Thing=Thing)
    exec(f"x = {make}", space.values)
    space.names.snapshot()
    bound, unbound = space.run(f"del x\nx = {make.replace('3.5', '4.5')}")
    assert unbound == ()
    # () is one object for all of Python, and storing it may count as a change or not.
    assert bound == ("x",) or make == "()"


def test_names_that_a_function_binds_with_global_are_seen() -> None:
    space = Space(xs=[1])
    assert space.run("def f():\n    global xs, y\n    xs = []\n    y = 1\nf()") == (("xs", "f", "y"), ())


def test_underscored_names_and_the_shells_own_are_left_out() -> None:
    assert Space().run("_ = 1; _private = 2; __x = 3; In = []; Out = {}; x = 4") == (("x",), ())


def test_keys_that_are_no_names_are_left_out() -> None:
    assert Space().run("globals()[3] = 1; globals()[''] = 2; globals()[(1, 2)] = 3; x = 4") == (("", "x"), ())
    assert Space().run("globals()[3] = 1; del globals()[3]") == ((), ())


def test_hidden_names_are_left_out_until_they_are_bound_to_something_else() -> None:
    space = Space()
    space.hidden["rank"] = 3
    assert space.run("rank = 3") == ((), ())
    assert space.run("rank = 4") == (("rank",), ())


def test_nothing_is_kept_alive_by_being_remembered() -> None:
    space = Space(thing=Thing())
    gone = weakref.ref(space.values["thing"])
    space.run("del thing")
    assert gone() is None
    thing = Thing()
    gone = weakref.ref(thing)
    space.values["holder"] = [thing]  # a list cannot be weakly referenced
    space.names.snapshot()
    del thing
    space.run("del holder")
    assert gone() is None


def test_what_happened_before_settling_is_not_news() -> None:
    space = Space()
    space.values["pushed"] = [1]
    space.names.snapshot()
    assert space.run("x = 1") == (("x",), ())


def test_names_are_found_in_code_with_more_than_256_of_them() -> None:
    space = Space()
    many = "\n".join(f"x{i} = [{i}]" for i in range(600))
    space.run(many)
    ids = {name: id(value) for name, value in space.values.items()}
    bound, _ = space.run("del x599\nx599 = [599]")
    assert bound == ("x599",)
    assert set(ids) == set(space.values)
