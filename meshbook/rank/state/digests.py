"""Digests of what objects hold, by which ranks compare it without sending it."""

from __future__ import annotations

import hashlib
import struct
import types
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from meshbook.rank.previews.digests import CONTAINER_TYPES, PLAIN_TYPES
from meshbook.rank.state.kinds import has_identity
from meshbook.rank.state.memory_digests import digest

# What a digest may visit; more is not comparable. Tensors count once, whatever their size.
_MAX_ITEMS = 200_000
_MAX_DEPTH = 60
# Bytes of tensors from which on two ranks do not hold the same by chance, if they are not all alike.
TELLING_BYTES = 64
LOOKED_AT_FIRST = 1 << 16
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a class statement has made
_POINTER_BYTES = struct.calcsize("P")
DEFINITIONS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class NotComparable(Exception):
    """Raised for content that has no digest; the text names its class."""


def digest_of(value: Any) -> str:
    """Return a digest that is equal for equal contents, in any process.

    Raises:
        NotComparable: there is something in it whose content is not known.
    """
    digester = Digester()
    digester.add(value, 0)
    return digester.hash.hexdigest()


class Digester:
    """Walks a value, and hashes what it meets in an order that depends on the contents alone.

    Attributes:
        is_sharded: a DTensor was met that is cut over several ranks.
        num_telling: bytes of tensors and arrays, without those that have one value everywhere.
        num_plain: how many numbers, words and the like were met; keys of dicts do not count.
    """

    def __init__(self, *, with_shards: bool = True) -> None:
        self.is_sharded, self._with_shards = False, with_shards
        self.num_telling = self.num_plain = 0
        self.hash = hashlib.blake2b(digest_size=16)
        self._num_items = 0
        self._seen: dict[int, int] = {}  # objects that refer to others, by id: how many were met before

    def add(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._num_items += 1
        if self._num_items > _MAX_ITEMS or depth > _MAX_DEPTH:
            raise NotComparable(f"a large {kind.__name__}")
        if kind in PLAIN_TYPES:
            self.num_plain += 1
            self._put(f"{kind.__name__}:{value!r}")
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, DEFINITIONS):
            self._add_definition(value, depth)
        elif (number := self._seen.get(id(value))) is not None:
            self._put(f"again:{number}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._add_object(value, kind, depth + 1)

    def _add_object(self, value: Any, kind: type, depth: int) -> None:
        if kind in (set, frozenset):
            self.num_plain += len(value)
            self._put(f"{kind.__name__}:{sorted(digest_of(item) for item in value)}")
        elif isinstance(value, dict) and (
            kind is dict or hasattr(kind, "__missing__") or kind.__module__ == "collections"
        ):
            self._put(f"{kind.__name__}:{len(value)}")
            for key, item in value.items():
                num_plain = self.num_plain
                self.add(key, depth)
                self.num_plain = num_plain
                self.add(item, depth)
        elif kind in CONTAINER_TYPES or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self._put(f"{kind.__name__}:{len(value)}")
            for item in value:
                self.add(item, depth)
        elif kind in (torch.dtype, torch.device, torch.Size):
            self._put(repr(value))
        elif kind is torch.Generator:
            self._put("generator")
            self._add_tensor(value.get_state())
        elif kind.__module__ == "numpy":
            self._add_array(value, kind)
        elif has_identity(value):
            self.add(kind, depth)
            self.add(value.state_dict(), depth)
        elif "__dict__" in dir(value) and not hasattr(value, "fileno") and not hasattr(kind, "__next__"):
            self._add_attributes(value, kind, depth)
        else:
            raise NotComparable(kind.__name__)

    def _add_attributes(self, value: Any, kind: type, depth: int) -> None:
        """Add an object that is no more than its attributes."""
        if isinstance(value, (dict, list, set, str, bytes, int, float)) or not is_made_of_attributes(kind):
            raise NotComparable(kind.__name__)
        self.add(kind, depth)
        self.add(vars(value), depth)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        local = tensor
        if isinstance(tensor, DTensor):
            self._put(f"placements:{tensor.placements}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}")
            if not self._with_shards:
                self.num_telling += TELLING_BYTES  # the placements are what ranks have to agree on
                return
            local = tensor.to_local()
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            self.is_sharded |= any(size > 1 and not placement.is_replicate() for placement, size in sizes)
        if local.layout is not torch.strided or local.is_meta or local.is_quantized:
            raise NotComparable("Tensor without dense memory")
        self._put(f"tensor:{local.dtype}:{tuple(local.shape)}:{tensor.requires_grad}")
        flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.numel():
            memory = numpy.from_dlpack(flat.view(torch.uint8)).view(numpy.uint8)
            self.num_telling += 0 if _is_constant(memory, flat.itemsize) else len(memory)
            self.hash.update(digest(memory))

    def _add_array(self, value: Any, kind: type) -> None:
        dtype = getattr(value, "dtype", None)
        if dtype is None or dtype.hasobject:
            raise NotComparable(kind.__name__)
        self._put(f"array:{dtype.str}:{value.shape}")
        contents = value.tobytes()
        self.num_plain += not isinstance(value, numpy.ndarray)
        if contents and not _is_constant(numpy.frombuffer(contents, numpy.uint8), dtype.itemsize):
            self.num_telling += len(contents)
        self.hash.update(contents)

    def _add_definition(self, value: Any, depth: int) -> None:
        self._put(f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', None) or value.__name__}")
        if isinstance(value, types.FunctionType):
            self._add_code(value.__code__)
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            self.add([value.__defaults__ or (), value.__kwdefaults__ or {}, held], depth + 1)

    def _add_code(self, code: types.CodeType) -> None:
        self._put(f"{code.co_names}:{[one for one in code.co_consts if not isinstance(one, types.CodeType)]!r}")
        self.hash.update(code.co_code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._add_code(inner)

    def _put(self, text: str) -> None:
        self.hash.update(text.encode("utf-8", "surrogatepass") + b"\0")


def _is_constant(memory: NDArray[numpy.uint8], item_bytes: int) -> bool:
    """Whether memory has one value everywhere."""
    items = memory.reshape(-1, item_bytes)
    first = items[: LOOKED_AT_FIRST // item_bytes + 1]
    return bool((first == items[0]).all() and (items == items[0]).all())


def is_made_of_attributes(kind: type) -> bool:
    """Whether instances of a class are Python objects with nothing in C beside their attributes.

    `random.Random` and `functools.partial` are larger than what refers to attributes and to weak references.
    """
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_small = kind.__basicsize__ <= object.__basicsize__ + 2 * _POINTER_BYTES and not kind.__itemsize__
    return not has_slots and is_small and all(base.__flags__ & _HEAP_TYPE or base is object for base in kind.__mro__)
