from __future__ import annotations

import collections
import math
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from IPython.core.formatters import BaseFormatter, DisplayFormatter
from torch import nn

from meshbook.rank.previews import preview as module
from meshbook.rank.previews import preview_printer
from meshbook.rank.previews.preview import preview
from meshbook.wire.messages import Preview, TensorMeta
from tests.budget import WAIT_S


class Quiet:
    """An object that must not be asked anything."""

    def _fail(self, *_args: Any) -> Any:
        raise AssertionError("user code ran")

    __repr__ = __str__ = __len__ = __iter__ = __lt__ = __eq__ = _fail
    __hash__ = object.__hash__
    __class__ = property(_fail)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        self._fail()


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no words")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.tied = self.fc


def digest(value: Any) -> str | None:
    return preview(value).digest


# ---------------------------------------------------------------------------------------------------------------------
# Plain values


@pytest.mark.parametrize(
    ("value", "type_", "text"),
    [
        (1, "int", "1"),
        (True, "bool", "True"),
        (0.1, "float", "0.1"),
        (math.inf, "float", "inf"),
        (1 + 2j, "complex", "(1+2j)"),
        ("it's", "str", '"it\'s"'),
        (b"\x00", "bytes", "b'\\x00'"),
        ([1, "a", None], "list", "[1, 'a', None]"),
        ({"a": (1, 2)}, "dict", "{'a': (1, 2)}"),
        ({3, 1, 2}, "set", "{1, 2, 3}"),
        ((), "tuple", "()"),
        (np.float32(0.5), "numpy.float32", "np.float32(0.5)"),
        (torch.Size([2, 3]), "torch.Size", "torch.Size([2, 3])"),
        (torch.float32, "torch.dtype", "torch.float32"),
    ],
)
def test_plain_values_show_as_python_shows_them(value: object, type_: str, text: str) -> None:
    shown = preview(value)
    assert (shown.kind, shown.type, shown.text, shown.truncated) == ("plain", type_, text, False)
    assert shown.digest is not None
    assert shown == preview(value)


def test_none_is_a_kind_of_its_own() -> None:
    assert (preview(None).kind, preview(None).text) == ("none", "None")


def test_a_list_that_holds_an_object_is_not_plain() -> None:
    assert preview([1, object()]).kind == "object"
    assert preview([1, object()]).digest is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (1, "1"),
        ("1", b"1"),
        ([1], (1,)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (0.0, -0.0),
        ("x" * 5000, "x" * 4999 + "y"),
        (list(range(3000)), [*range(2999), 0]),
        ([[1] * 100] * 100, [[1] * 100] * 99 + [[1] * 99 + [2]]),
        (["text"] * 999, ["text"] * 998 + ["test"]),
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.ones(4), torch.ones(2, 2)),
        (torch.ones(100, 100), torch.ones(100, 100).index_fill(0, torch.tensor([99]), 2)),
        (np.arange(5), np.arange(5.0)),
    ],
)
def test_different_content_has_different_digests_also_where_the_text_is_cut(one: object, other: object) -> None:
    assert digest(one) is not None
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


def test_sets_have_equal_digests_whatever_order_they_are_in() -> None:
    names = [f"name{i}" for i in range(200)]
    backwards = set()
    for name in reversed(names):
        backwards.add(name)
    assert list(backwards) != list(set(names))  # where names collide, the first one comes first
    assert digest(set(names)) == digest(backwards)
    assert digest(set(names)) != digest(set(names[1:]))


def test_numbers_in_equal_lists_have_equal_digests_whether_or_not_they_are_one_object() -> None:
    shared = [1000] * 3000
    apart = [int("1000") for _ in range(3000)]
    assert digest(shared) == digest(apart)


@pytest.mark.parametrize(
    "value",
    [
        list(range(10_000_000)),
        [[1] * 1000] * 1000,
        "x" * 100_000_000,
        b"x" * 100_000_000,
        10**100_000,
        {i: str(i) for i in range(100_000)},
        ["y" * 1_000_000] * 100,
        set(range(1_000_000)),
        collections.deque(range(1_000_000)),
        np.zeros((3000, 3000)),
        torch.zeros(3000, 3000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_large_values_are_shown_in_bounded_text_and_time(value: object) -> None:
    started = time.process_time()
    shown = preview(value)
    safe = preview(value, safe=True)
    assert time.process_time() - started < 1.0  # repr() of each takes seconds, or raises
    assert len(shown.text) <= 2000
    assert len(safe.text) <= 2000
    assert shown.truncated or isinstance(value, np.ndarray)  # numpy cuts by itself
    assert len(preview(value, text_limit=50).text) <= 50


def test_long_lists_of_numbers_fill_their_lines() -> None:
    lines = preview(list(range(40))).text.splitlines()
    assert lines[0].startswith("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,")
    assert all(len(line) <= 79 for line in lines)
    assert len(lines) == 2
    assert eval(" ".join(lines)) == list(range(40))


def test_a_list_within_itself_has_an_end() -> None:
    knot: list[Any] = [1]
    knot.append(knot)
    shown = preview(knot)
    assert "[...]" in shown.text
    msgspec.msgpack.encode(shown)


def test_lone_surrogates_can_travel() -> None:
    for value in ("\udc80", ["\udc80"], {"\udc80": 1}):
        msgspec.msgpack.encode(preview(value))


# ---------------------------------------------------------------------------------------------------------------------
# Objects


def test_the_same_kind_of_object_reads_the_same_on_every_rank() -> None:
    assert preview(object()).text == preview(object()).text == "<object>"
    assert preview(Net().fc.reset_parameters).text == preview(Net().fc.reset_parameters).text


def test_a_broken_repr_is_told_in_a_sentence() -> None:
    name = f"{__name__}.Broken"
    assert preview(Broken()).text == f"<{name}: showing it raised ValueError: no words>"
    assert f" <{name}: showing it raised ValueError: no words>,\n 2]" in preview([1, Broken(), 2]).text


def test_even_a_repr_that_exits_is_told() -> None:
    class Exiting:
        def __repr__(self) -> str:
            sys.exit(3)

    assert "raised SystemExit" in preview(Exiting()).text


def test_a_keyboard_interrupt_in_a_repr_is_not_swallowed() -> None:
    class Slow:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preview(Slow())
    with pytest.raises(KeyboardInterrupt):
        preview([Slow()])


def test_a_text_formatter_that_user_code_has_installed_is_used() -> None:
    class Shouting(BaseFormatter):  # what `rich.pretty.install()` does
        def __call__(self, value: object) -> str:
            return repr(value).upper()

    formatter = DisplayFormatter()
    formatter.formatters["text/plain"] = Shouting()
    assert preview({"k": [1]}, formatter=formatter).text == "{'K': [1]}"
    assert preview({"k": [1]}, formatter=formatter).digest == preview({"k": [1]}).digest
    assert preview(2.5, formatter=formatter).text == "2.5"
    assert len(preview(["long"] * 999, formatter=formatter, text_limit=100).text) == 100


def test_modules_and_optimizers_are_summed_up() -> None:
    net = Net()
    shown = preview(net)
    assert (shown.kind, shown.type) == ("object", f"{__name__}.Net")
    assert shown.text.startswith("Net: 16 parameters float32 cpu\nNet(\n  (fc): Linear(")  # the tied ones once
    assert preview([net]).text == "[<Net: 16 parameters float32 cpu>]"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    assert preview(optimizer).text == "SGD(lr=0.1, momentum=0.9, weight_decay=0): 1 group, 2 tensors"


def test_small_arrays_have_a_digest_and_large_ones_do_not() -> None:
    assert preview(np.arange(10)).digest == preview(np.arange(10)).digest is not None
    assert preview(np.zeros(100_000)).digest is None
    assert preview(np.array([object()])).digest is None


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor([[0.12, -1.3], [2, 3]]), "tensor float32 (2, 2) cpu  [[0.12, -1.3], [2, 3]]"),
        (torch.arange(100), "tensor int64 (100,) cpu  [0, 1, 2, 3, …]"),
        (torch.zeros(512, 64), "tensor float32 (512, 64) cpu  [[0, 0, 0, 0, …], [0, 0, 0, 0, …], …]"),
        (torch.zeros(2, 3, 4, 5), "tensor float32 (2, 3, 4, 5) cpu  [[[[0, 0, 0, 0, 0], …], …], …]"),
        (torch.tensor(1.5), "tensor float32 () cpu  1.5"),
        (torch.tensor([True]), "tensor bool (1,) cpu  [True]"),
        (torch.tensor([1 - 2j]), "tensor complex64 (1,) cpu  [1-2j]"),
        (torch.ones(2, dtype=torch.bfloat16), "tensor bfloat16 (2,) cpu  [1, 1]"),
        (torch.ones(2).to(torch.float8_e4m3fn), "tensor float8_e4m3fn (2,) cpu  [1, 1]"),
        (torch.empty(0, 3), "tensor float32 (0, 3) cpu  []"),
        (torch.ones(2, requires_grad=True), "tensor float32 (2,) cpu requires_grad  [1, 1]"),
        (nn.Parameter(torch.ones(2)), "Parameter float32 (2,) cpu  [1, 1]"),
        (torch.ones(2, device="meta"), "tensor float32 (2,) meta"),
        (torch.eye(2).to_sparse(), "tensor float32 (2, 2) cpu"),
    ],
)
def test_a_tensor_shows_its_shape_type_device_and_first_elements(tensor: torch.Tensor, text: str) -> None:
    shown = preview(tensor)
    assert (shown.kind, shown.text) == ("tensor", text)
    assert shown.tensor == TensorMeta(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype)[6:],
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
        stride=tensor.stride() if tensor.layout is torch.strided else None,  # by which it can be a remote tensor
    )
    assert shown.truncated == ("…" in text or not text.partition("  ")[2])
    assert preview(tensor, safe=True).text == text


def test_tensors_inside_other_things_are_short_and_single_numbers_are_read() -> None:
    shown = preview({"loss": torch.tensor(0.25), "w": torch.zeros(1000, 1000)})
    assert shown.text == "{'loss': tensor float32 ()  0.25, 'w': tensor float32 (1000, 1000)}"
    assert shown.kind == "object"
    assert preview([torch.tensor(1.0)] * 100).text.count("  1") == preview_printer.MAX_SCALARS_READ


def test_of_a_large_tensor_only_a_few_elements_are_touched() -> None:
    """More than this machine could hold: one element in memory, stretched."""
    huge = torch.ones(1).expand(1 << 20, 1 << 20)
    shown = preview(huge)
    assert shown.text.startswith("tensor float32 (1048576, 1048576) cpu  [[1, 1, 1, 1, …]")
    assert shown.digest is None


def test_a_tensor_that_needs_a_gradient_is_read_without_a_trace() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    before = y._version
    assert "[2, 2, 2]" in preview(y).text
    assert y._version == before
    y.sum().backward()


def test_a_dtensor_shows_the_whole_its_placements_and_the_local_part(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        for shown in (preview(sharded), preview(sharded, safe=True)):
            assert shown.text == "DTensor float32 (8, 3) cpu (Shard(dim=0),) local (2, 3)  [[1, 1, 1], [1, 1, 1]]"
            assert shown.type == "torch.distributed.tensor.DTensor"
            assert shown.tensor == TensorMeta(
                shape=(8, 3),
                dtype="float32",
                device="cpu",
                placements="(Shard(dim=0),)",
                local_shape=(2, 3),
                stride=(3, 1),
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_says_how_many_it_holds(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    assert preview(nested).text == "nested tensor float32, 2 tensors, cpu"


def test_a_subclass_that_denies_its_shape_is_told() -> None:
    class Denying(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("not for you")

    shown = preview(torch.ones(2).as_subclass(Denying))
    assert "not for you" in shown.text


# ---------------------------------------------------------------------------------------------------------------------
# Safe previews


def array_of(value: object) -> np.ndarray[Any, Any]:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


@pytest.mark.parametrize(
    "around",
    [
        lambda quiet: quiet,
        lambda quiet: [1, quiet],
        lambda quiet: {"a": quiet},
        lambda quiet: {quiet},
        lambda quiet: collections.OrderedDict(a=quiet),
        lambda quiet: collections.defaultdict(Quiet, a=quiet),
        lambda quiet: types.SimpleNamespace(q=quiet),
        lambda quiet: collections.deque([quiet]),
        array_of,
        lambda quiet: Quiet,
        lambda quiet: quiet._fail,
    ],
)
def test_a_safe_preview_runs_no_code_of_the_users(around: Callable[[object], object]) -> None:
    shown = preview(around(Quiet()), safe=True)
    assert "raised" not in shown.text
    assert shown.text


def test_a_safe_preview_of_an_object_names_it() -> None:
    assert preview(Quiet(), safe=True).text == f"<{__name__}.Quiet>"
    assert preview([1, Quiet()], safe=True).text == f"[1, <{__name__}.Quiet>]"
    assert preview(Net(), safe=True).text == "<Net: 16 parameters float32 cpu>"
    assert preview(np, safe=True).text == "<module numpy>"


def test_a_safe_preview_of_a_table_says_its_size() -> None:
    pandas = pytest.importorskip("pandas")
    assert preview(pandas.DataFrame({"a": [1, 2]}), safe=True).text == "<pandas.DataFrame 2 rows x 1 columns>"


def test_a_dict_that_another_thread_changes_is_no_error() -> None:
    table = {str(number): number for number in range(300)}
    over = threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            table[f"new{number % 50}"] = number
            table.pop(f"new{(number + 25) % 50}", None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            assert preview(table).text
            assert preview(table, safe=True).type == "dict"
    finally:
        over.set()
        thread.join(WAIT_S)


# ---------------------------------------------------------------------------------------------------------------------
# Rich displays


@pytest.fixture
def formatter() -> DisplayFormatter:
    return DisplayFormatter()


def test_html_and_images_of_a_value_come_along(formatter: DisplayFormatter) -> None:
    class Rich:
        def _repr_html_(self) -> str:
            return "<b>rich</b>"

        def _repr_png_(self) -> bytes:
            return b"\x89PNG"

        def __repr__(self) -> str:
            return "Rich()"

    shown = preview(Rich(), formatter=formatter)
    assert (shown.text, shown.html, shown.data) == ("Rich()", "<b>rich</b>", {"image/png": "iVBORw=="})
    assert preview(Rich(), formatter=formatter, rich=False).html is None
    assert preview(Rich()).html is None


def test_enormous_html_is_left_out(formatter: DisplayFormatter) -> None:
    class Rich:
        def _repr_html_(self) -> str:
            return "<b>" * module.MAX_HTML_CHARS

    shown = preview(Rich(), formatter=formatter)
    assert shown.html is None
    assert shown.truncated


def test_a_table_shows_as_text_and_html(formatter: DisplayFormatter) -> None:
    pandas = pytest.importorskip("pandas")
    shown = preview(pandas.DataFrame({"a": [1, 2]}), formatter=formatter)
    assert shown.text == "   a\n0  1\n1  2"
    assert shown.html is not None
    assert "<table" in shown.html


def test_an_object_that_displays_itself_has_done_so(formatter: DisplayFormatter) -> None:
    shown_by_itself: list[int] = []

    class Own:
        def _ipython_display_(self) -> None:
            shown_by_itself.append(1)

    shown = preview(Own(), formatter=formatter)
    assert shown_by_itself == [1]
    assert (shown.text, shown.metadata) == ("", {"displayed": True})


def test_the_users_own_printers_and_precision_are_used(formatter: DisplayFormatter) -> None:
    text: Any = formatter.formatters["text/plain"]
    text.for_type(Broken, lambda obj, printer, cycle: printer.text("mended"))
    text.float_precision = 3
    assert preview([Broken()], formatter=formatter).text == "[mended]"
    assert preview(1 / 3, formatter=formatter).text == "0.333"
    assert preview([1 / 3], formatter=formatter).text == "[0.333]"
    assert preview(1 / 3, formatter=formatter).digest == preview(1 / 3).digest


def test_every_preview_can_travel(formatter: DisplayFormatter) -> None:
    for value in (1, "a", [1], torch.ones(2), Net(), object(), np.ones(2), None, Broken(), {1: {2}}, os, len):
        for shown in (preview(value), preview(value, formatter=formatter), preview(value, safe=True)):
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(shown), type=Preview) == shown
            assert msgspec.convert(msgspec.to_builtins(shown), Preview) == shown


@pytest.mark.usefixtures("starts_processes")
def test_torch_is_not_imported_for_a_preview() -> None:
    import subprocess

    source = (
        "import sys; from meshbook.rank.previews import preview as p; p.preview([{}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, timeout=WAIT_S)
    assert done.stdout == b"False\n"
