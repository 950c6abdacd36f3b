"""What this rank holds under the user's names, described so that ranks can compare it without sending it."""

from __future__ import annotations

import hashlib
import secrets
import struct
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.rank.healing.choice import Held
from meshbook.rank.memory_digests import digest
from meshbook.rank.object_states import attributes_of, extra_states_of
from meshbook.rank.previews.digests import CONTAINER_TYPES, PLAIN_TYPES
from meshbook.rank.process_groups.watched_group import WatchedGroup

# What a digest may visit; more is not comparable. Tensors count once, whatever their size.
_MAX_ITEMS = 200_000
_MAX_DEPTH = 60
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a class statement has made
_POINTER_BYTES = struct.calcsize("P")
_DEFINITIONS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class _NotComparable(Exception):
    """Raised for content that has no digest; the text names its class."""


def describe_names(namespace: Mapping[str, Any], names: Iterable[str], *, with_shards: bool = True) -> dict[str, Held]:
    """Return what is held under each of these names. Reads all of it: about 0.3 s per GB on a CPU.

    Args:
        with_shards: read the contents of DTensors.
    """
    return {name: describe(namespace[name], with_shards=with_shards) for name in names if name in namespace}


def describe(value: Any, *, with_shards: bool = True) -> Held:
    kind = type(value)
    name = kind.__name__ + (_ddp_options(value) if isinstance(value, DistributedDataParallel) else "")
    if isinstance(value, WatchedGroup):
        return Held("group", "process group", groups=((value.label.name, value.label.ranks),))
    if isinstance(value, DeviceMesh):
        return _describe_mesh(value)
    if kind is int and value == dist.GroupMember.NON_GROUP_MEMBER:
        return Held("non-member", name)
    if _is_sampler_of_rank(value):
        return Held("opaque", name)  # that of another rank would deal that one's rows
    if isinstance(value, _DEFINITIONS):
        return Held("definition", name, _digest_or_none(value))
    try:
        if isinstance(value, torch.nn.Module):
            own = [(key, parameter) for key, parameter in value.named_parameters()]
            held = _describe_contents("state", name, [own, value.training], with_shards=with_shards)
            attributes = _digest(attributes_of(value))
            return structs.replace(held, rest_digest=_digest_rest(value), attributes_digest=attributes)
        if has_state(value):
            return _describe_contents("state", name, value.state_dict(), with_shards=with_shards)
        return _describe_contents("plain" if kind in PLAIN_TYPES else "value", name, value, with_shards=with_shards)
    except _NotComparable as error:
        opaque = isinstance(value, (types.GeneratorType, types.CoroutineType)) or hasattr(value, "fileno")
        return Held("opaque" if opaque else "value", str(error) or name)
    except Exception:  # a user's state_dict() may raise anything
        return Held("value", name)


def _describe_contents(kind: str, name: str, contents: Any, *, with_shards: bool) -> Held:
    digester = _Digester(with_shards=with_shards)
    digester.add(contents, 0)
    return Held(kind, name, digester.hash.hexdigest(), is_sharded=digester.is_sharded)


def _ddp_options(model: DistributedDataParallel) -> str:
    """Return what a DDP model was made with and its collectives depend on: one made otherwise is another type."""
    names = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view", "bucket_bytes_cap")
    return "".join(f" {name}={getattr(model, name, None)}" for name in names)


def _is_sampler_of_rank(value: Any) -> bool:
    """Whether a value deals the rows of a data set to ranks."""
    samplers: Any = sys.modules.get("torch.utils.data.distributed")
    return samplers is not None and isinstance(value, samplers.DistributedSampler)


def _describe_mesh(mesh: DeviceMesh) -> Held:
    try:
        found = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    except RuntimeError:  # without process groups
        return Held("opaque", "DeviceMesh")
    groups = [(group.label.name, group.label.ranks) for group in found if isinstance(group, WatchedGroup)]
    return (
        Held("mesh", "DeviceMesh", groups=tuple(groups)) if len(groups) == mesh.ndim else Held("opaque", "DeviceMesh")
    )


def has_state(value: Any) -> bool:
    """Whether the state of an object can be taken from it, and loaded into another one like it."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _digest_rest(module: torch.nn.Module) -> str:
    """Return a digest of what may differ between replicas of a module; one that equals no other where it has none."""
    try:
        return _digest([list(module.named_buffers()), extra_states_of(module)])
    except _NotComparable:
        return secrets.token_hex(8)


def _digest_or_none(value: Any) -> str | None:
    try:
        return _digest(value)
    except Exception:
        return None


def _digest(value: Any) -> str:
    """Return a digest that is equal for equal contents, in any process.

    Raises:
        _NotComparable: there is something in it whose content is not known.
    """
    digester = _Digester()
    digester.add(value, 0)
    return digester.hash.hexdigest()


class _Digester:
    """Walks a value, and hashes what it meets in an order that depends on the contents alone.

    Attributes:
        is_sharded: a DTensor was met that is cut over several ranks.
    """

    def __init__(self, *, with_shards: bool = True) -> None:
        self.is_sharded, self._with_shards = False, with_shards
        self.hash = hashlib.blake2b(digest_size=16)
        self._num_items = 0
        self._seen: dict[int, int] = {}  # objects that refer to others, by id: how many were met before

    def add(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._num_items += 1
        if self._num_items > _MAX_ITEMS or depth > _MAX_DEPTH:
            raise _NotComparable(f"a large {kind.__name__}")
        if kind in PLAIN_TYPES:
            self._put(f"{kind.__name__}:{value!r}")
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, _DEFINITIONS):
            self._add_definition(value, depth)
        elif (number := self._seen.get(id(value))) is not None:
            self._put(f"again:{number}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._add_object(value, kind, depth + 1)

    def _add_object(self, value: Any, kind: type, depth: int) -> None:
        if kind in (set, frozenset):
            self._put(f"{kind.__name__}:{sorted(_digest(item) for item in value)}")
        elif isinstance(value, dict) and (
            kind is dict or hasattr(kind, "__missing__") or kind.__module__ == "collections"
        ):
            self._put(f"{kind.__name__}:{len(value)}")
            for key, item in value.items():
                self.add(key, depth)
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
        elif isinstance(value, torch.nn.Module) or has_state(value):
            self.add(kind, depth)
            self.add(value.state_dict(), depth)
        elif "__dict__" in dir(value) and not hasattr(value, "fileno") and not hasattr(kind, "__next__"):
            self._add_attributes(value, kind, depth)
        else:
            raise _NotComparable(kind.__name__)

    def _add_attributes(self, value: Any, kind: type, depth: int) -> None:
        """Add an object that is no more than its attributes."""
        if isinstance(value, (dict, list, set, str, bytes, int, float)) or not is_made_of_attributes(kind):
            raise _NotComparable(kind.__name__)
        self.add(kind, depth)
        self.add(vars(value), depth)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        local = tensor
        if isinstance(tensor, DTensor):
            self._put(f"placements:{tensor.placements}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}")
            if not self._with_shards:
                return
            local = tensor.to_local()
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            self.is_sharded |= any(size > 1 and not placement.is_replicate() for placement, size in sizes)
        if local.layout is not torch.strided or local.is_meta or local.is_quantized:
            raise _NotComparable("Tensor without dense memory")
        self._put(f"tensor:{local.dtype}:{tuple(local.shape)}:{tensor.requires_grad}")
        flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.numel():
            self.hash.update(digest(numpy.from_dlpack(flat.view(torch.uint8)).view(numpy.uint8)))

    def _add_array(self, value: Any, kind: type) -> None:
        dtype = getattr(value, "dtype", None)
        if dtype is None or dtype.hasobject:
            raise _NotComparable(kind.__name__)
        self._put(f"array:{dtype.str}:{value.shape}")
        self.hash.update(value.tobytes())

    def _add_definition(self, value: Any, depth: int) -> None:
        self._put(f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', None) or value.__name__}")
        if isinstance(value, types.FunctionType):
            self._add_code(value.__code__)
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            self.add([value.__defaults__, value.__kwdefaults__, held], depth + 1)

    def _add_code(self, code: types.CodeType) -> None:
        self._put(f"{code.co_names}:{[one for one in code.co_consts if not isinstance(one, types.CodeType)]!r}")
        self.hash.update(code.co_code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._add_code(inner)

    def _put(self, text: str) -> None:
        self.hash.update(text.encode("utf-8", "surrogatepass") + b"\0")


def is_made_of_attributes(kind: type) -> bool:
    """Whether instances of a class are Python objects with nothing in C beside their attributes.

    `random.Random` and `functools.partial` are larger than what refers to attributes and to weak references.
    """
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_small = kind.__basicsize__ <= object.__basicsize__ + 2 * _POINTER_BYTES and not kind.__itemsize__
    return not has_slots and is_small and all(base.__flags__ & _HEAP_TYPE or base is object for base in kind.__mro__)
