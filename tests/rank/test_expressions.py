from __future__ import annotations

import pickle
from typing import Any

import pytest

from meshbook.rank.previews.expressions import BINARY, UNARY, Expression, NameRef, ResultRef, evaluate

x = Expression(NameRef("x"))
y = Expression(NameRef("y"))


class Keyed:
    def __getitem__(self, key: Any) -> Any:
        return key


class Matrix:
    def __init__(self, name: str) -> None:
        self.name = name

    def __matmul__(self, other: Matrix) -> str:
        return f"{self.name}@{other.name}"


class Model:
    layers = ("first", "second")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def follow(path: Expression, **names: Any) -> Any:
    return evaluate(pickle.loads(pickle.dumps(path)), names, {})


def test_attributes_items_and_calls_lead_to_what_python_finds() -> None:
    model = Model()
    assert follow(x, x=model) is model
    assert follow(x.attr("layers").item(1), x=Model) == "second"
    assert follow(x.item(slice(None, None, -1)), x=[1, 2]) == [2, 1]
    assert follow(x.call((1,), {"lr": 2}), x=model) == ((1,), {"lr": 2})


def test_paths_among_arguments_keys_and_operands_are_followed_too() -> None:
    assert follow(x.item(y), x=[5, 6], y=1) == 6
    assert follow(x.item((slice(y, None), y)), x=Keyed(), y=1) == (slice(1, None), 1)
    assert follow(x.call((y, [y, {"k": y}], (y,))), x=lambda *a: a, y=2) == (2, [2, {"k": 2}], (2,))
    assert follow(x.binary("add", y.attr("real")), x=1, y=2) == 3


def test_containers_without_paths_arrive_as_the_objects_they_are() -> None:
    batch = [1, 2]
    assert evaluate(x.call((batch,)), {"x": lambda given: given}, {}) is batch


def test_kept_objects_are_found_by_their_call() -> None:
    kept = object()
    assert evaluate(Expression(ResultRef("a-1")), {}, {"a-1": kept}) is kept


def test_a_missing_name_is_a_name_error_with_the_name() -> None:
    with pytest.raises(NameError, match="name 'x' is not defined") as caught:
        follow(x.attr("shape"))
    assert caught.value.name == "x"


def test_what_is_missing_is_asked_of_resolve_by_its_key() -> None:
    asked: list[str] = []

    def resolve(key: str) -> str:
        asked.append(key)
        return key.upper()

    assert evaluate(x.binary("add", Expression(ResultRef("a-1"))), {}, {}, resolve) == "NAME:XREF:A-1"
    assert asked == ["name:x", "ref:a-1"]


def test_errors_of_the_steps_are_the_users_own() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        follow(x.attr("nope"), x=1)
    with pytest.raises(ZeroDivisionError):
        follow(x.binary("truediv", 0), x=1)
    failure = ValueError("mine")

    def fail() -> None:
        raise failure

    with pytest.raises(ValueError, match="mine") as caught:
        evaluate(x.call(), {"x": fail}, {})
    assert caught.value is failure


@pytest.mark.parametrize("op", sorted(BINARY))
def test_binary_operators_compute_what_python_computes_on_either_side(op: str) -> None:
    special: dict[str, tuple[Any, Any]] = {"contains": ([3, 4], 3), "matmul": (Matrix("l"), Matrix("r"))}
    left, right = special.get(op, (6, 3))
    act = BINARY[op][0]
    assert follow(x.binary(op, right), x=left) == act(left, right)
    assert follow(x.binary(op, left, reflected=True), x=right) == act(left, right)


@pytest.mark.parametrize("op", sorted(UNARY))
def test_unary_operators_compute_what_python_computes(op: str) -> None:
    value: Any = [1, 2] if op == "len" else -3
    assert follow(x.unary(op), x=value) == UNARY[op][0](value)


@pytest.mark.parametrize(
    ("path", "spelling"),
    [
        (x.attr("shape").item(0), "x.shape[0]"),
        (x.item((slice(1, 3), ..., None)), "x[1:3, ..., None]"),
        (x.item(slice(None, None, -1)), "x[::-1]"),
        (x.item((1,)), "x[1,]"),
        (x.item("key"), "x['key']"),
        (x.call((y, [x]), {"dim": 1}), "x(y, [x], dim=1)"),
        (x.binary("add", y).attr("sum").call(), "(x + y).sum()"),
        (x.binary("add", 1).binary("mul", 2), "(x + 1) * 2"),
        (x.binary("mul", x.binary("add", 1)), "x * (x + 1)"),
        (x.binary("sub", x.binary("sub", 1)), "x - (x - 1)"),
        (x.binary("sub", 3, reflected=True), "3 - x"),
        (x.binary("pow", 2).unary("neg"), "-x ** 2"),
        (x.unary("neg").binary("pow", 2), "(-x) ** 2"),
        (x.binary("pow", x.binary("pow", 2)), "x ** x ** 2"),
        (x.binary("lt", 1).binary("lt", 2), "(x < 1) < 2"),
        (x.binary("lt", 3).binary("and", x.binary("gt", 1)), "(x < 3) & (x > 1)"),
        (x.binary("contains", 3), "3 in x"),
        (x.unary("len"), "len(x)"),
        (Expression(ResultRef("c-1", "x + 1")).attr("shape"), "(x + 1).shape"),
        (Expression(ResultRef("c-1", "x.mean()")).attr("shape"), "x.mean().shape"),
        (Expression(ResultRef("c-1")).attr("shape"), "<c-1>.shape"),
        (x.call(("a" * 100,)), f"x('{'a' * 38}…)"),
    ],
)
def test_a_path_reads_as_python_would_spell_it(path: Expression, spelling: str) -> None:
    assert str(path) == spelling


def test_a_spelling_with_plain_operands_means_what_the_path_means() -> None:
    names = {"x": 7, "y": 2}
    for path in (
        x.binary("add", y).binary("mul", 2),
        x.binary("sub", y.binary("sub", 1)),
        x.binary("pow", y.binary("pow", 2)),
        x.binary("pow", y).binary("pow", 2),
        x.unary("neg").binary("pow", 2),
        x.binary("pow", 2).unary("neg"),
        x.binary("floordiv", y, reflected=True),
        x.binary("sub", -1),
        x.binary("lt", 9).binary("eq", True),
        x.unary("not").binary("or", 8),
        x.binary("mod", y.binary("add", 3)).unary("invert"),
    ):
        assert eval(str(path), {}, dict(names)) == evaluate(path, names, {}), str(path)


def test_only_names_attributes_and_constant_subscripts_are_plain() -> None:
    assert x.attr("layers").item(0).item("w").is_lookup_only()
    assert not x.item(y).is_lookup_only()
    assert not x.call().is_lookup_only()
    assert not x.item(slice(1)).is_lookup_only()
    assert not Expression(ResultRef("c-1")).is_lookup_only()
