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
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.rank.healing.choice import Held
from meshbook.rank.healing.replicas import Replicas, parameters_of
from meshbook.rank.memory_digests import digest
from meshbook.rank.object_states import attributes_of, extra_states_of, local_part
from meshbook.rank.previews.digests import CONTAINER_TYPES, PLAIN_TYPES
from meshbook.rank.process_groups.watched_group import WatchedGroup

# What a digest may visit; more is not comparable. Tensors count once, whatever their size.
_MAX_ITEMS = 200_000
_MAX_DEPTH = 60
# Bytes of tensors from which on two ranks do not hold the same by chance, if they are not all alike.
_TELLING_BYTES = 64
_LOOKED_AT_FIRST = 1 << 16
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
    replicas = Replicas(namespace.values())
    return {name: describe(namespace[name], replicas, with_shards=with_shards) for name in names if name in namespace}


def describe(value: Any, replicas: Replicas | None = None, *, with_shards: bool = True) -> Held:
    """Return what a name holds.

    Args:
        replicas: what is known of models.
    """
    held = _describe(value, with_shards=with_shards)
    if held.digest is None:
        return held
    try:
        is_telling = held.is_telling or _are_telling(parameters_of(value))
        return structs.replace(held, replicas=(replicas or Replicas()).of(value), is_telling=is_telling)
    except Exception:  # a user's parameters() may raise anything, too
        return held


def _describe(value: Any, *, with_shards: bool) -> Held:
    kind, name = type(value), name_of_class(value)
    if isinstance(value, WatchedGroup):
        return Held("group", "process group", groups=((value.label.name, value.label.ranks),))
    if isinstance(value, DeviceMesh):
        return _describe_mesh(value)
    if kind is int and value == dist.GroupMember.NON_GROUP_MEMBER:
        return Held("non-member", name)
    if _is_sampler_of_rank(value):
        return Held("opaque", name)  # that of another rank would deal that one's rows
    if isinstance(value, _DEFINITIONS):
        return _describe_definition(value, name)
    try:
        if isinstance(value, torch.nn.Module):
            own = [(key, parameter) for key, parameter in value.named_parameters()]
            held = _describe_contents(
                "state", name, [own, value.training], with_shards=with_shards, may_have_plain=True
            )
            attributes = _digest(attributes_of(value))
            return structs.replace(held, rest_digest=_digest_rest(value), attributes_digest=attributes)
        if has_state(value):
            is_optimizer = isinstance(value, torch.optim.Optimizer)
            contents = value.state_dict()
            return _describe_contents("state", name, contents, with_shards=with_shards, may_have_plain=is_optimizer)
        return _describe_contents("plain" if kind in PLAIN_TYPES else "value", name, value, with_shards=with_shards)
    except _NotComparable as error:
        opaque = isinstance(value, (types.GeneratorType, types.CoroutineType)) or hasattr(value, "fileno")
        return Held("opaque" if opaque else "value", str(error) or name)
    except Exception:  # a user's state_dict() may raise anything
        return Held("value", name)


def _describe_contents(kind: str, name: str, contents: Any, *, with_shards: bool, may_have_plain: bool = False) -> Held:
    """Describe contents.

    Args:
        may_have_plain: numbers and words in it are of models and optimizers, and no flags of the user's.
    """
    digester = _Digester(with_shards=with_shards)
    digester.add(contents, 0)
    is_telling = digester.num_telling >= _TELLING_BYTES and (may_have_plain or not digester.num_plain)
    return Held(kind, name, digester.hash.hexdigest(), is_sharded=digester.is_sharded, is_telling=is_telling)


def _describe_definition(value: Any, name: str) -> Held:
    """Return what a module, function or class is. Code that is alike is the same; what a function holds may be not."""
    digester = _Digester()
    try:
        digester.add(value, 0)
    except Exception:
        return Held("definition", name)
    return Held("definition", name, digester.hash.hexdigest(), is_telling=not digester.num_plain)


def name_of_class(value: Any) -> str:
    """Return the class of a value; of a DDP model with what it was made with, on which its collectives depend."""
    options = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view", "bucket_bytes_cap")
    is_ddp = isinstance(value, DistributedDataParallel)
    return type(value).__name__ + "".join(f" {name}={getattr(value, name, None)}" for name in options if is_ddp)


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
            raise _NotComparable(f"a large {kind.__name__}")
        if kind in PLAIN_TYPES:
            self.num_plain += 1
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
            self.num_plain += len(value)
            self._put(f"{kind.__name__}:{sorted(_digest(item) for item in value)}")
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
                self.num_telling += _TELLING_BYTES  # the placements are what ranks have to agree on
                return
            local = tensor.to_local()
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            self.is_sharded |= any(size > 1 and not placement.is_replicate() for placement, size in sizes)
        if local.layout is not torch.strided or local.is_meta or local.is_quantized:
            raise _NotComparable("Tensor without dense memory")
        self._put(f"tensor:{local.dtype}:{tuple(local.shape)}:{tensor.requires_grad}")
        flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.numel():
            memory = numpy.from_dlpack(flat.view(torch.uint8)).view(numpy.uint8)
            self.num_telling += 0 if _is_constant(memory, flat.itemsize) else len(memory)
            self.hash.update(digest(memory))

    def _add_array(self, value: Any, kind: type) -> None:
        dtype = getattr(value, "dtype", None)
        if dtype is None or dtype.hasobject:
            raise _NotComparable(kind.__name__)
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


def _are_telling(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors cannot be alike on two ranks by chance, as far as their first values show."""
    num_bytes = 0
    for tensor in tensors:
        local = local_part(tensor)
        if local.layout is torch.strided and not local.is_meta and local.numel():
            first = local.reshape(-1)[: _LOOKED_AT_FIRST // local.itemsize]
            num_bytes += local.nbytes if bool((first != first[0]).any()) else 0
            if num_bytes >= _TELLING_BYTES:
                return True
    return False


def _is_constant(memory: NDArray[numpy.uint8], item_bytes: int) -> bool:
    """Whether memory has one value everywhere."""
    items = memory.reshape(-1, item_bytes)
    first = items[: _LOOKED_AT_FIRST // item_bytes + 1]
    return bool((first == items[0]).all() and (items == items[0]).all())


def is_made_of_attributes(kind: type) -> bool:
    """Whether instances of a class are Python objects with nothing in C beside their attributes.

    `random.Random` and `functools.partial` are larger than what refers to attributes and to weak references.
    """
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_small = kind.__basicsize__ <= object.__basicsize__ + 2 * _POINTER_BYTES and not kind.__itemsize__
    return not has_slots and is_small and all(base.__flags__ & _HEAP_TYPE or base is object for base in kind.__mro__)
