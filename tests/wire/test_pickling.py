"""Objects on their way to a real second process and back, and what is said when they cannot go."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import threading
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from meshbook.errors import TransferError
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.messages import InlineBuffer, Payload, SharedBuffer
from meshbook.wire.pickler import dump_message
from meshbook.wire.pickling import INLINE_THRESHOLD, STREAM_THRESHOLD, dump, dump_small, load
from tests.wire.other_process import OtherProcess

LARGE = 40_000  # float32 items: well above the inline threshold


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    with SegmentPool() as pool:
        yield pool


@pytest.fixture
def reader() -> SegmentReader:
    return SegmentReader()


@pytest.fixture(scope="module")
def other(starts_processes: None) -> Iterator[OtherProcess]:
    with OtherProcess(OMP_NUM_THREADS="1") as other:
        other.evaluate("import torch, numpy as np")
        yield other


@pytest.fixture
def there_and_back(pool: SegmentPool, reader: SegmentReader, other: OtherProcess) -> Callable[[Any], Any]:
    """An object after a visit to the other process: pickled here, rebuilt and pickled there, rebuilt here."""

    def visit(obj: Any) -> Any:
        there = dump(obj, pool=pool)
        return load(other.evaluate("dump(load(payload, reader=reader), pool=pool)", payload=there), reader=reader)

    return visit


def a_module_like_a_notebook(source: str) -> dict[str, Any]:
    """What a cell's source leaves in `__main__`: functions and classes that travel by value."""
    module = types.ModuleType("__main__")
    exec(source, module.__dict__)
    return module.__dict__


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize(
    "obj",
    [
        None, 7, "text", b"bytes", 2.5, [1, [2, (3, {4})]], {"a": {"b": bytearray(b"c")}}, bytearray(200_000),
        "x" * 300_000, b"y" * 2_000_000, list(range(500_000)), slice(1, 2), ValueError("why"), range(3),
    ],
    ids=lambda obj: f"{type(obj).__name__}{len(repr(obj))}",
)  # fmt: skip
@pytest.mark.usefixtures("starts_processes")
def test_plain_objects_travel(there_and_back: Callable[[Any], Any], obj: Any) -> None:
    assert repr(there_and_back(obj)) == repr(obj)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(200_000.0), np.arange(200_000.0)[::2], np.arange(90_000).reshape(300, 300).T,
        np.arange(90_000).reshape(300, 300)[:, ::3], np.asfortranarray(np.ones((300, 300))), np.ones(3, bool),
        np.array(3.5), np.empty((0, 5)), np.array([1, "a", None], object), np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros(50_000, [("a", "i4"), ("b", "f8")]), np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)  # fmt: skip
def test_numpy_arrays_travel(there_and_back: Callable[[Any], Any], array: Any) -> None:
    back = there_and_back(array)
    assert type(back) is type(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_a_read_only_array_stays_read_only(there_and_back: Callable[[Any], Any]) -> None:
    for size in (10, 100_000):
        array = np.arange(float(size))
        array.flags.writeable = False
        assert not there_and_back(array).flags.writeable


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of a random 300 x 300 one
    "float32": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::3],
    "one row": lambda x: x[7],
    "column": lambda x: x[:, 3],
    "one item": lambda x: x[2, 3],
    "0-dim": lambda x: torch.tensor(2.5),
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(500, 300),
    "channels last": lambda x: x.reshape(1, 3, 100, 300).to(memory_format=torch.channels_last),
    "requires grad": lambda x: x.requires_grad_(),
    "from numpy": lambda x: torch.from_numpy(x.numpy()),
    "inference": lambda x: torch.inference_mode()(lambda: x + 1)(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "bool": lambda x: x > 0,
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces what will become of sparse and quantized tensors
def test_tensors_travel(there_and_back: Callable[[Any], Any], name: str) -> None:
    tensor = TENSORS[name](torch.randn(300, 300, generator=torch.Generator().manual_seed(0)))
    back = there_and_back(tensor)
    assert (type(back), back.dtype, back.layout, back.device) == (
        type(tensor), tensor.dtype, tensor.layout, tensor.device,
    )  # fmt: skip
    assert (back.shape, back.requires_grad) == (tensor.shape, tensor.requires_grad)
    assert (back.is_conj(), back.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if name == "quantized":
        tensor, back = tensor.int_repr(), back.int_repr()
    if tensor.layout is torch.strided and name not in ("one row", "column", "strided"):
        assert back.stride() == tensor.stride()
    if name != "meta":
        assert torch.equal(back.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_of_torch_travels(pool: SegmentPool, reader: SegmentReader) -> None:
    names = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    dtypes = {getattr(torch, name) for name in names if not name.startswith(("q", "bits", "uint1b", "int1b"))}
    for dtype in dtypes:
        try:
            tensor = torch.empty(LARGE, dtype=torch.uint8).random_(0, 2).view(dtype)
        except RuntimeError:  # a size that cannot be viewed so
            continue
        back = load(dump(tensor, pool=pool), reader=reader)
        assert back.dtype is dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_large_tensors_and_arrays_leave_the_pickle(pool: SegmentPool) -> None:
    payload = dump({"t": torch.ones(LARGE), "a": np.ones(LARGE), "strided": np.ones((LARGE, 2))[:, 0]}, pool=pool)
    assert len(payload.pickled) < 2_000
    assert all(isinstance(buffer, SharedBuffer) for buffer in payload.buffers)
    assert sorted(buffer.nbytes for buffer in payload.buffers) == [  # type: ignore[union-attr]
        4 * LARGE, 8 * LARGE, 8 * LARGE,
    ]  # fmt: skip


def test_small_ones_stay_in_it(pool: SegmentPool, reader: SegmentReader) -> None:
    payload = dump([torch.ones(3), np.ones(INLINE_THRESHOLD // 8 - 1)], pool=pool)
    assert payload.buffers == ()
    tensor, array = load(payload)
    tensor += 1
    tensor.resize_(100_000)  # torch's own memory
    array += 1
    assert dump(np.ones(10), pool=pool, inline_threshold=80).buffers != ()


def test_a_long_pickle_leaves_the_message_too(pool: SegmentPool, other: OtherProcess) -> None:
    numbers = list(range(STREAM_THRESHOLD // 2))
    payload = dump((numbers, np.ones(LARGE)), pool=pool)
    assert payload.pickled == b""
    other.evaluate("x, y = load(payload, reader=reader)", payload=payload)
    assert other.evaluate("len(x), y.sum()") == (len(numbers), LARGE)


def test_large_bytes_and_text_leave_the_pickle_wherever_they_are(
    pool: SegmentPool, there_and_back: Callable[[Any], Any]
) -> None:
    large = bytes(range(256)) * 20_000
    value = {"a": [large, 1, (bytearray(large), "\u00e9" * 400_000)], "same": large, large[:200_000]: np.ones(LARGE)}
    payload = dump(value, pool=pool)
    assert (len(payload.splice_offsets), len(payload.buffers), len(payload.pickled) < 1000) == (4, 5, True)
    back = there_and_back(value)
    assert back.pop(large[:200_000]).sum() == LARGE
    assert back.items() <= value.items()
    assert back["same"] is back["a"][0]
    back["a"][2][0].append(1)
    together = [list(range(STREAM_THRESHOLD // 2)), large]  # the rest of the pickle is large too
    assert dump(together, pool=pool).pickled == b""
    assert there_and_back(together) == together


def test_what_is_cut_out_of_a_pickle_goes_back_as_soon_as_it_is_rebuilt(
    pool: SegmentPool, reader: SegmentReader
) -> None:
    payload = dump([b"x" * 3_000_000], pool=pool)
    value = load(payload, reader=reader)
    for segment in reader.drain_released():
        pool.release(segment)
    assert (pool.used_bytes, value) == (0, [b"x" * 3_000_000])


def test_without_a_pool_everything_is_in_the_message(other: OtherProcess) -> None:
    x = torch.arange(LARGE)
    payload = dump([x, x[5:], np.ones(LARGE)], pool=None)
    assert {type(buffer) for buffer in payload.buffers} == {InlineBuffer}
    assert other.evaluate("a, b, c = load(payload); b += 1; a[5].item(), c.sum()", payload=payload) == (6, LARGE)


def test_views_of_one_storage_share_it_again(there_and_back: Callable[[Any], Any]) -> None:
    base = torch.arange(float(LARGE)).reshape(200, 200)
    whole, row, transposed, raw = there_and_back([base, base[3], base.t(), base.view(torch.uint8)])
    row += 1
    assert torch.equal(whole[3], base[3] + 1)
    assert torch.equal(transposed, whole.t())
    assert torch.equal(raw, whole.view(torch.uint8))


def test_views_share_again_whatever_their_order_and_whoever_else_owns_the_memory(
    there_and_back: Callable[[Any], Any],
) -> None:
    array = np.arange(float(LARGE))
    part, whole = there_and_back([torch.from_numpy(array)[10:20], torch.from_numpy(array)])
    part.zero_()
    assert whole[9:21].tolist() == [9.0, *[0.0] * 10, 20.0]


def test_memory_that_two_owners_give_in_different_lengths_arrives_whole(there_and_back: Callable[[Any], Any]) -> None:
    array = np.arange(float(LARGE))
    head, whole = there_and_back([torch.from_numpy(array[:100]), torch.from_numpy(array)])
    assert head.tolist() == array[:100].tolist()
    assert whole.tolist() == array.tolist()


def test_views_of_different_item_sizes_stay_where_they_were(there_and_back: Callable[[Any], Any]) -> None:
    base = torch.arange(LARGE)
    odd_bytes, rest = base.view(torch.uint8)[100_003:], base[13_000:]
    back_bytes, back = there_and_back([odd_bytes, rest])
    assert torch.equal(back_bytes, odd_bytes)
    assert torch.equal(back, rest)


def test_one_object_twice_is_one_object_again(there_and_back: Callable[[Any], Any]) -> None:
    tensor, array = torch.ones(LARGE), np.ones(LARGE)
    a, b, c, d = there_and_back([tensor, tensor, array, array])
    assert a is b
    assert c is d


def test_only_what_a_view_spans_is_sent(pool: SegmentPool) -> None:
    base = torch.zeros(1000, 1000)

    def sent(*views: torch.Tensor) -> int:
        payload = dump(list(views), pool=pool, inline_threshold=1)
        return sum(buffer.nbytes for buffer in payload.buffers if isinstance(buffer, SharedBuffer))

    assert sent(base) == 4_000_000
    assert sent(base[10]) <= 4_000 + 64
    assert sent(base[10], base[20]) <= 44_000 + 64
    assert sent(base[:, 5]) <= 4_000 + 64
    assert sent(base[::2]) <= 4_000_000
    assert sent(torch.ones(1).expand(1_000_000)) <= 64


def test_sending_does_not_change_the_tensor(pool: SegmentPool) -> None:
    base = torch.arange(1_000_000.0).reshape(1000, 1000)
    column = base[:, 5]
    dump([column], pool=pool)
    assert (column.stride(), column.storage_offset(), column.data_ptr() - base.data_ptr()) == ((1000,), 5, 20)


def test_modules_keep_tied_parameters_buffers_and_attributes(there_and_back: Callable[[Any], Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    setattr(model[0].weight, "note", "tied")  # noqa: B010  # torch's types know no attributes
    back = there_and_back(model)
    assert back[1].weight is back[0].weight
    assert back[0].weight.note == "tied"
    assert {type(parameter) for parameter in back.parameters()} == {torch.nn.Parameter}
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))
    torch.optim.SGD(back.parameters(), 0.1, momentum=0.9).zero_grad()
    x = torch.randn(4, 200)
    assert torch.equal(back(x), model(x))
    back(x).sum().backward()


def test_optimizers_still_move_the_parameters_they_came_with(there_and_back: Callable[[Any], Any]) -> None:
    layer = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1)
    layer(torch.ones(200)).sum().backward()
    optimizer.step()
    layer, optimizer = there_and_back((layer, optimizer))
    before = layer.weight.detach().clone()
    layer(torch.ones(200)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_what_autograd_computed_arrives_as_a_leaf(there_and_back: Callable[[Any], Any]) -> None:
    computed = torch.ones(LARGE, requires_grad=True) * 2
    back = there_and_back(computed)
    assert (back.requires_grad, back.is_leaf, back.grad_fn) == (True, True, None)


def test_storages_and_tensor_subclasses_travel_without_a_detour(pool: SegmentPool, reader: SegmentReader) -> None:
    module = a_module_like_a_notebook("import torch\nclass Mine(torch.Tensor): pass")
    mine = torch.ones(LARGE).as_subclass(module["Mine"])
    tensor = torch.ones(LARGE)
    payload = dump((mine, tensor, tensor.untyped_storage()), pool=pool)
    assert len(payload.pickled) < 10_000
    back, tensor_back, storage = load(payload, reader=reader)
    assert type(back).__name__ == "Mine"
    assert (torch.equal(back, mine), storage.nbytes()) == (True, 4 * LARGE)
    assert storage.data_ptr() == tensor_back.data_ptr()


@pytest.mark.usefixtures("starts_processes")
def test_a_rank_that_changes_its_copy_changes_nobody_elses(pool: SegmentPool, other: OtherProcess) -> None:
    tensor = torch.ones(1_000_000)
    payload = dump({"x": tensor}, pool=pool, readers=2)
    with OtherProcess(OMP_NUM_THREADS="1") as third:
        for process, add in ((other, 1), (third, 2)):
            process.evaluate(f"x = load(payload, reader=reader)['x']; x += {add}", payload=payload)
        sums = [process.evaluate("x.sum().item()") for process in (other, third)]
    assert sums == [2e6, 3e6]
    assert tensor.sum() == 1e6
    other.evaluate("x = None")


def test_memory_is_released_when_the_last_tensor_over_it_is_gone(pool: SegmentPool, reader: SegmentReader) -> None:
    payload = dump({"a": torch.ones(LARGE), "b": np.ones(LARGE)}, pool=pool)
    value = load(payload, reader=reader)
    view = value["a"][3:].t().untyped_storage()
    del value
    gc.collect()
    assert reader.drain_released() == ()
    del view
    (segment,) = reader.drain_released()
    pool.release(segment)
    assert pool.used_bytes == 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces what will become of sparse tensors
def test_memory_of_sparse_tensors_is_released_too(pool: SegmentPool, reader: SegmentReader) -> None:
    eye = torch.eye(20_000, 20)
    for tensor in (eye.to_sparse(), eye.to_sparse_csr()):
        assert load(dump(tensor, pool=pool, inline_threshold=64), reader=reader).layout is tensor.layout
        assert len(reader.drain_released()) == 1


def test_loading_that_fails_keeps_no_memory(pool: SegmentPool, reader: SegmentReader) -> None:
    module = a_module_like_a_notebook(
        "class Sour:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def __setstate__(self, state): raise ValueError('too sour')\n"
    )
    payload = dump(module["Sour"](torch.ones(LARGE)), pool=pool)
    with pytest.raises(TransferError, match=r"cannot be rebuilt here: ValueError: too sour; .* __setstate__") as raised:
        load(payload, reader=reader)
    assert isinstance(raised.value.__cause__, ValueError)
    del raised
    gc.collect()
    assert len(reader.drain_released()) == 1


def test_an_error_that_somebody_keeps_keeps_no_memory(pool: SegmentPool, reader: SegmentReader) -> None:
    value = [torch.ones(LARGE), np.ones(LARGE), len]
    payload = dump(value, pool=pool, persistent=lambda obj: "n" if obj is len else None)
    with pytest.raises(TransferError, match="the handle `n`") as raised:
        load(payload, reader=reader)
    assert len(reader.drain_released()) == 1
    assert raised.value.__traceback__ is not None


# ---------------------------------------------------------------------------------------------------------------------
# Code


def test_what_was_typed_into_a_notebook_travels_by_value(pool: SegmentPool, other: OtherProcess) -> None:
    cell = a_module_like_a_notebook(
        "import math\n"
        "scale = 3\n"
        "def outer(x): return inner(x) * scale\n"
        "def inner(x): return math.floor(x)\n"
        "class Model:\n"
        "    def __init__(self): self.weights = [1, 2]\n"
        "    def __call__(self, x): return outer(x) + sum(self.weights)\n"
    )
    payload = dump((cell["outer"], cell["Model"]()), pool=pool)
    assert other.evaluate("f, m = load(payload); f(2.5), m(2.5), type(m).__name__", payload=payload) == (6, 9, "Model")


def test_a_function_made_on_the_other_side_travels_back(other: OtherProcess) -> None:
    other.evaluate("__name__ = '__main__'\nbase = 10\ndef add(x): return x + base")
    payload = other.evaluate("dump((add, lambda x: -x), pool=None)")
    add, negate = load(payload)
    assert (add(1), negate(1)) == (11, -1)


def test_a_class_that_travels_twice_is_the_same_class(other: OtherProcess) -> None:
    cell = a_module_like_a_notebook("class Point: pass")
    first, second = (dump(cell["Point"](), pool=None) for _ in range(2))
    assert other.evaluate("type(load(a)) is type(load(b))", a=first, b=second)


def test_handles_arrive_as_the_other_sides_own_objects(pool: SegmentPool, other: OtherProcess) -> None:
    class Handle:
        def __init__(self, key: str) -> None:
            self.key = key

        def __reduce__(self) -> Any:
            raise AssertionError("a handle is not pickled")

    x = Handle("x")
    payload = dump(
        {"args": [x, {"again": x}, 3], "f": lambda: x},
        pool=pool,
        persistent=lambda obj: obj.key if isinstance(obj, Handle) else None,
    )
    other.evaluate("mine = {'x': object()}; v = load(payload, resolve=mine.__getitem__)", payload=payload)
    assert other.evaluate("v['args'][0] is v['args'][1]['again'] is v['f']() is mine['x'], v['args'][2]") == (True, 3)
    with pytest.raises(TransferError, match="the handle `x`, and nothing here knows"):
        load(payload)


# ---------------------------------------------------------------------------------------------------------------------
# Small ones


def test_a_small_object_comes_whole_and_without_buffers() -> None:
    value = {"a": torch.ones(10), "b": np.ones(10)}
    payload = dump_small(value, 10_000)
    assert payload is not None
    assert payload.buffers == ()
    back = load(payload)
    assert (back["a"].sum(), back["b"].sum()) == (10, 10)


def test_the_limit_is_exact() -> None:
    payload = dump_small(["x" * 100, torch.ones(9)], 1 << 20)
    assert payload is not None
    size = len(payload.pickled)
    assert dump_small(["x" * 100, torch.ones(9)], size) == payload
    assert dump_small(["x" * 100, torch.ones(9)], size - 1) is None


def test_too_large_is_known_early() -> None:
    class Counted:
        made = 0

        def __reduce__(self) -> Any:
            Counted.made += 1
            return bytes, (100_000,)

    huge = np.broadcast_to(np.ones(1), (10**6, 10**6))  # 8 TB, if anybody were to copy it
    for value in ([b"x" * 1_000_000, Counted()], [np.ones(1_000_000), Counted()], [huge, Counted()]):
        assert dump_small(value, 100_000) is None
    assert Counted.made == 0
    assert dump_small(torch.ones(1).expand(10**12), 10_000) is not None
    assert dump_small(torch.ones(100, 100), 10_000) is None


def test_a_small_object_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TransferError, match="a generator cannot be pickled: cannot pickle 'generator' object"):
        dump_small(iter_over_nothing(), 1000)


# ---------------------------------------------------------------------------------------------------------------------
# Whose fault it is


class Trainer:
    def __init__(self) -> None:
        self.itself = self
        self.friend = types.SimpleNamespace(back=self, steps=[1, 2])
        self.lock = threading.Lock()

    def step(self) -> None: ...


class Slotted:
    __slots__ = ("held", "name")

    def __init__(self) -> None:
        self.name, self.held = "s", threading.Lock()


class Careless:
    def __reduce__(self) -> Any:
        raise KeyError("forgot")


def closing_over(thing: object) -> Any:
    return a_module_like_a_notebook("def make(thing):\n    def use(): return thing\n    return use")["make"](thing)


def using_a_global() -> Any:
    return a_module_like_a_notebook("lock = __import__('threading').Lock()\ndef f(): return [lock for _ in '1']")["f"]


def iter_over_nothing() -> Iterator[object]:
    yield from ()


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("obj", "blamed"),
    [
        (LOCK, "`value` (a _thread.lock)"),
        (Trainer(), "`value.lock` (a _thread.lock) cannot be pickled: cannot pickle '_thread.lock' object; "
         "leave it out, or define __getstate__ on Trainer"),
        ({"a": [1, (2, {"b": LOCK})]}, "`value['a'][1][1]['b']` (a _thread.lock)"),
        ({LOCK: 1}, "`key <unlocked _thread.lock"),
        ([types.SimpleNamespace(x=LOCK)], "`value[0].x`"),
        (OrderedDict(a=1, b=LOCK), "`value['b']`"),
        (defaultdict(list, a=[LOCK]), "`value['a'][0]`"),
        (Slotted(), "`value.held`"),
        (Trainer().step, "`value.__self__.lock`"),
        (functools.partial(print, 1, end=LOCK), "`value.keywords['end']`"),
        (closing_over(LOCK), "`value -> thing`"),
        (using_a_global(), "`value -> lock`"),
        (lambda x=LOCK: x, "`value(x=...)`"),
        (type("Dynamic", (), {"guard": LOCK, "__module__": "__main__"})(), "`Dynamic.guard`"),
        ([Careless()], "`value[0]` (a tests.wire.test_pickling.Careless) cannot be pickled: 'forgot'"),
        (iter_over_nothing(), "send list(...) of it"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_the_part_that_cannot_be_pickled_is_named(obj: object, blamed: str) -> None:
    with pytest.raises(TransferError) as raised:
        dump(obj, pool=None)
    assert blamed in str(raised.value)
    assert raised.value.__cause__ is not None


def test_the_names_of_what_is_sent_are_used() -> None:
    with pytest.raises(TransferError, match=r"^`trainer.lock` "):
        dump((1, Trainer()), pool=None, name=("lr", "trainer"))
    with pytest.raises(TransferError, match=r"^`trainer.lock` "):
        dump(Trainer(), pool=None, name="trainer")


def test_an_open_file_is_to_be_opened_there(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file, pytest.raises(TransferError, match="send its path, and open it"):
        dump([file], pool=None)


def test_what_is_nested_too_deeply_is_said_to_be() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TransferError, match="`value` is nested too deeply"):
        dump(nested, pool=None)
    while nested:
        nested = nested.pop()  # type: ignore[assignment]  # a hundred thousand destructors in each other, otherwise


def test_the_search_for_the_culprit_pickles_what_is_fine_once_and_not_once_per_level() -> None:
    pickled: list[object] = []

    class Counted:
        def __reduce__(self) -> Any:
            pickled.append(self)
            return int, ()

    fine = [Counted() for _ in range(10)]
    deep: object = LOCK
    for _ in range(20):
        deep = [fine, deep]
    with pytest.raises(TransferError, match=r"`value(\[1\]){20}` \(a _thread.lock\)"):
        dump(deep, pool=None)
    assert len(pickled) <= 3 * len(fine)


def test_nothing_is_kept_of_what_could_not_be_sent(pool: SegmentPool) -> None:
    with pytest.raises(TransferError):
        dump([torch.ones(LARGE), LOCK], pool=pool)
    assert (pool.used_bytes, pool.free_bytes) == (0, 0)


@pytest.mark.filterwarnings("ignore")  # torch.distributed, formed and used in one process, has much to say
def test_a_sharded_dtensor_is_refused_and_a_whole_one_arrives_plain(other: OtherProcess) -> None:
    other.evaluate(
        """
import torch.distributed as dist, warnings
warnings.simplefilter("ignore")
dist.init_process_group("fake", rank=0, world_size=2, store=__import__(
    "torch.testing._internal.distributed.fake_pg", fromlist=["FakeStore"]).FakeStore())
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
mesh = init_device_mesh("cpu", (2, 1))
def place(*placements):
    return DTensor.from_local(torch.arange(4.0), mesh, placements, run_check=False)
"""
    )
    with pytest.raises(TransferError, match=r"`value\['w'\]` .* placements .*Shard\(dim=0\).* x.full_tensor\(\)"):
        other.evaluate("dump({'w': place(Shard(0), Replicate())}, pool=None)")
    for placements in ("Replicate(), Replicate()", "Replicate(), Shard(0)"):
        back = load(other.evaluate(f"dump(torch.nn.Parameter(place({placements})), pool=None)"))
        assert type(back) is torch.Tensor
        assert (back.tolist(), back.requires_grad) == ([0, 1, 2, 3], True)
    pending = "torch.distributed._functional_collectives.all_reduce(torch.ones(3), 'sum', mesh['dim_0'])"
    other.evaluate("mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('dim_0', 'dim_1'))")
    assert other.evaluate(f"type({pending}).__name__") == "AsyncCollectiveTensor"
    assert type(load(other.evaluate(f"dump({pending}, pool=None)"))) is torch.Tensor
    other.evaluate("dist.destroy_process_group()")


def test_a_freed_tensor_is_refused() -> None:
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TransferError, match=r"shape \(100,\) whose storage holds 0 bytes has been freed"):
        dump([freed], pool=None)


# ---------------------------------------------------------------------------------------------------------------------
# What arrives broken


def test_a_module_that_is_missing_there_is_named(other: OtherProcess, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("class Thing: pass\ndef old(): pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_here  # type: ignore[import-not-found]

        payload = dump([only_here.Thing()], pool=None)
        with pytest.raises(TransferError, match=r"`only_here`, .* cannot be imported .*register_pickle_by_value"):
            other.evaluate("load(payload)", payload=payload)
        cloudpickle.register_pickle_by_value(only_here)
        assert (
            other.evaluate("type(load(payload)[0]).__name__", payload=dump([only_here.Thing()], pool=None)) == "Thing"
        )
        cloudpickle.unregister_pickle_by_value(only_here)
        payload = dump(only_here.old, pool=None)
        del only_here.old
        with pytest.raises(TransferError, match="needs `old` from module `only_here`, which has none"):
            load(payload)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("only_here", None)


@pytest.mark.usefixtures("starts_processes")
def test_a_tensor_for_a_process_without_torch_says_what_is_missing() -> None:
    payload = dump(torch.ones(3), pool=None)
    with OtherProcess() as light:
        assert light.evaluate("load(payload)", payload=dump([1, "x"], pool=None)) == [1, "x"]
        assert light.evaluate("'torch' in sys.modules") is False
        light.evaluate("sys.modules['torch'] = None")  # as if it were not installed
        with pytest.raises(TransferError, match="module `torch`, which cannot be imported"):
            light.evaluate("load(payload)", payload=payload)


@pytest.mark.usefixtures("starts_processes")
def test_importing_it_does_not_import_torch() -> None:
    with OtherProcess() as light:
        assert light.evaluate("load(dump({'a': [1]}, pool=pool)), 'torch' in sys.modules") == ({"a": [1]}, False)


@pytest.mark.parametrize(
    "payload",
    [
        Payload(b""), Payload(b"garbage"), Payload(b"N."), Payload(b"N.\x80\x05."), Payload(b"N.cno.such\nmodule\n."),
        Payload(pickle.dumps(([5], [(0, "float32", 0, (3,), (1,), False, False)]), 5)),
        Payload(b"N.cmeshbook.wire.pickling\n_tensor\n(K\x05tR."), Payload(b"", (InlineBuffer(b"\x80"),)),
        Payload(b"N." + pickle.dumps(np.ones(9), 5, buffer_callback=lambda buffer: False)),
        Payload(b"N.\x80\x05B\xff\xff\x00\x00.", (InlineBuffer(b"too short"),), (9,)), Payload(b"N.", (), (1, 2)),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_damaged_payload_is_an_error_and_nothing_worse(payload: Payload) -> None:
    with pytest.raises(TransferError):
        load(payload)


def test_a_tensor_that_claims_more_than_its_memory_is_refused() -> None:
    payload = dump(torch.ones(LARGE), pool=None)
    table, rest = _first_pickle(payload.pickled)
    storages, [(storage, dtype, offset, size, stride, *flags)] = table
    for lie in ((storage, dtype, offset, (10 * LARGE,), stride, *flags), (storage, dtype, 10**9, size, stride, *flags)):
        with pytest.raises(TransferError, match="cannot be rebuilt"):
            load(Payload(pickle.dumps((storages, [lie]), 5) + rest, payload.buffers))


def _first_pickle(stream: bytes) -> tuple[Any, bytes]:
    length = len(pickle.dumps(pickle.loads(stream), 5))
    return pickle.loads(stream), stream[length:]


@pytest.mark.parametrize("constant", [torch.preserve_format, torch.float32, torch.strided], ids=str)
def test_constants_of_torch_are_torchs_whichever_module_was_imported_first(
    constant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = types.ModuleType("script_of_the_user")  # as __mp_main__ is, once multiprocessing was imported
    vars(script).update(torch=torch, float32=torch.float32)
    monkeypatch.setattr(sys, "modules", {"script_of_the_user": script, **sys.modules})
    for pickled in (dump_message({"constant": constant}), dump({"constant": constant}, pool=None).pickled):
        assert b"script_of_the_user" not in pickled
    assert pickle.loads(dump_message([constant])) == [constant]
    assert load(dump([constant], pool=None)) == [constant]


def test_shared_memory_needs_a_reader(pool: SegmentPool) -> None:
    with pytest.raises(TransferError, match="another process's memory"):
        load(dump(torch.ones(LARGE), pool=pool))


@pytest.mark.usefixtures("starts_processes")
def test_the_memory_of_a_killed_process_is_gone(reader: SegmentReader) -> None:
    with OtherProcess() as owner:
        payload = owner.evaluate("import numpy as np; dump(np.ones(100_000), pool=pool)")
        owner.kill()
        with pytest.raises(TransferError, match=f"process {owner.pid}, .* is gone"):
            load(payload, reader=reader)
