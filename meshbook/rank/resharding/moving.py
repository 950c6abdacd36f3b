"""Moves the parts of DTensors to where they belong when the mesh has other axes: rank to rank, all or nothing.

A resize asks for this in five steps. `find`: what there is, and whether it can be cut anew. `give`: ranks that leave
give the others what these need, while the former world lasts. `begin`: the former world ends; until the last step a
DTensor is not to be used, and says so. `move`: in the new world each rank gets what it lacks. `commit`: once all ranks
have everything, the tensors have it. A fault before `commit` leaves every rank with what it held, and the next `move`
goes on from there, whoever is left.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from meshbook.errors import UsageError
from meshbook.ids import name_ranks
from meshbook.rank.elastic import transfer
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.process_groups.live_objects import instances_of
from meshbook.rank.process_groups.memory_transfer import split_memory
from meshbook.rank.process_groups.resized_world import axes_of
from meshbook.rank.resharding import fsdp
from meshbook.rank.resharding.boxes import Box, Copy, Cut, box_of, find_gaps, plan_copies, shape_of, within
from meshbook.rank.resharding.catalog import Entry, Path, placements_of, read_catalog
from meshbook.wire.messages import FindSharded, MoveShards

# Bytes of tensors, per rank, that are sent at once; a tensor with more is sent alone.
_WINDOW_BYTES = 8 << 20

Sizes = Mapping[str, int]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its catalog.

    Attributes:
        found: of each tensor, where it is found and how it is cut; said by one rank.
        held: of each tensor, the parts that this rank holds; None: it is a new rank, and holds nothing.
    """

    found: list[tuple[list[Path], Cut]]
    held: list[list[Box]] | None


_encoder = msgspec.msgpack.Encoder()
_descriptions = msgspec.msgpack.Decoder(Description)


class Resharding:
    """The DTensors of this rank while the mesh is resized. One per rank; on the main thread.

    Attributes:
        is_begun: DTensors have no contents until `commit`.
    """

    def __init__(self, namespace: MutableMapping[str, Any], groups: ProcessGroups, rank: int) -> None:
        self._namespace, self._groups, self._rank = namespace, groups, rank
        self._entries: list[Entry] = []
        self._param_groups: list[Any] = []
        self.is_begun = False

    # ---- before anything is changed

    def find(self, command: FindSharded, names: Sequence[str]) -> dict[str, Any]:
        """Return what the reply says of sharded names. Changes nothing, but that FSDP2 frees whole parameters."""
        if self.is_begun:  # a resize was not completed: what there is is known
            for entry in self._entries:
                entry.target = entry.padded = None
            return self._describe_found(self._problems_of({}, command), command)
        root, names = self._groups.mesh, sorted(name for name in names if name in self._namespace)
        assert root is not None  # ranks without groups are not asked
        modules = {name: value for name in names if isinstance(value := self._namespace[name], torch.nn.Module)}
        problems: dict[str, str] = {}
        found: dict[int, Any] = {}
        for name, module in modules.items():
            for group in fsdp.param_groups_of(module):
                found[id(group)] = group
                if problem := fsdp.problem_of(group, axes_of(group.mesh_info.mesh, root)):
                    problems.setdefault(name, problem)
                else:
                    group._to_sharded()
        self._param_groups = list(found.values())
        params = {id(param.sharded_param): param for group in self._param_groups for param in group.fsdp_params}
        self._entries, others = read_catalog(self._namespace, names, root, self._rank, params)
        return self._describe_found(self._problems_of({**others, **problems}, command), command)

    def _problems_of(self, problems: dict[str, str], command: FindSharded) -> dict[str, str]:
        """Return by name why its tensors cannot be cut for the new axes, beside what is known."""
        for entry in self._entries:
            if problem := self._problem_of(entry, command):
                problems.setdefault(entry.paths[0][0], f"{'.'.join(entry.paths[0][1:]) or 'it'}: {problem}")
        return problems

    def _problem_of(self, entry: Entry, command: FindSharded) -> str:
        if lacking := [axis for axis in entry.cut.axes if axis and axis not in command.axes]:
            return f"it is spread over the axis {', '.join(lacking)}, which the mesh would not have"
        if entry.param is not None and (problem := fsdp.why_uneven(entry.param, entry.cut, command.axes)):
            return problem
        if self._has_gaps(entry, command.ranks):
            lost = sorted(set(range(math.prod(self._sizes.values()))) - set(command.ranks))
            return (
                f"parts of it were lost with {name_ranks(lost)}, and no replica holds them. %mesh heal and then %mesh "
                "restore, or the mesh.elastic loop that trains it, bring it back; resize then"
            )
        setup_names = command.setup_names if entry.param is not None else None
        if setup_names is not None and not any(path[0] in setup_names for path in entry.paths):
            return "new ranks would not have the model: build it in a %%mesh --setup cell"
        return ""

    def _has_gaps(self, entry: Entry, ranks: Sequence[int]) -> bool:
        """Whether none of these ranks holds some part; after a resize that was not completed it is not known."""
        return not self.is_begun and find_gaps(entry.tensor.shape, entry.cut, self._sizes, ranks)

    @property
    def _sizes(self) -> Sizes:
        """Of the mesh's axes, as its DeviceMesh has them."""
        root = self._groups.mesh
        assert root is not None  # formed
        assert root.mesh_dim_names is not None
        return dict(zip(root.mesh_dim_names, root.mesh.shape, strict=True))

    def _describe_found(self, problems: dict[str, str], command: FindSharded) -> dict[str, Any]:
        staying = [rank for rank in command.ranks if rank < math.prod(command.axes.values())]
        needs_leaving = self.is_begun or any(self._has_gaps(entry, staying) for entry in self._entries)
        shown = [
            (entry.paths, tuple(entry.tensor.shape), str(entry.tensor.dtype), entry.cut) for entry in self._entries
        ]
        digest = hashlib.blake2b(_encoder.encode(shown), digest_size=12).hexdigest()
        names = {path[0] for entry in self._entries for path in entry.paths}
        return {
            "sharded": sorted(names | problems.keys()),
            "problems": problems,
            "needs_leaving": needs_leaving,
            "catalog": digest,
        }

    def forget(self) -> None:
        """Let go of what was found; a no-op once DTensors have no contents."""
        if not self.is_begun:
            self._entries, self._param_groups = [], []

    # ---- the former world

    def give(self, command: MoveShards) -> dict[str, Any]:
        """Give ranks that stay their parts of the mesh of the new axes. Blocks until this rank has all of its own."""
        before = [list(entry.held) for entry in self._entries]
        try:
            return self._move(command, range(min(dist.get_world_size(), command.world_size)))
        except BaseException:
            for entry, held in zip(self._entries, before, strict=True):
                entry.held, entry.target, entry.padded = held, None, None
            raise

    def begin(self) -> None:
        """Take the contents out of all DTensors: their DeviceMeshes are about to have other ranks."""
        if self.is_begun:
            return
        self.is_begun = bool(self._entries)
        for entry in self._entries:
            _take_contents(
                entry.tensor,
                entry.param,
                "it is being cut for the mesh's new ranks, and that was not completed: %mesh heal completes it",
            )
        gc.collect()  # models that were built anew refer to themselves
        self._take_contents_of_others()

    def _take_contents_of_others(self) -> None:
        root = self._groups.mesh
        assert root is not None
        why = "no name led to it when the mesh was resized, so that it was not cut for the new ranks; make it anew"
        known = {id(entry.tensor) for entry in self._entries}
        groups = {id(group) for group in self._param_groups}
        for group in fsdp.all_param_groups():
            if id(group) not in groups:
                for param in group.fsdp_params:
                    _take_contents(param.sharded_param, param, why)
                    known.add(id(param.sharded_param))
        for tensor in list(instances_of(DTensor)):
            if id(tensor) not in known and axes_of(tensor.device_mesh, root) is not None:
                _take_contents(tensor, None, why)

    # ---- the new world

    def formed(self, sizes: Sizes) -> None:
        """The groups of the new world are formed: DTensors have its DeviceMeshes, and as yet no contents."""
        for entry in self._entries if self.is_begun else ():
            spec = entry.tensor._spec
            entry.tensor._spec = DTensorSpec(spec.mesh, placements_of(entry.cut, sizes), tensor_meta=spec.tensor_meta)

    def move(self, command: MoveShards, names: Sequence[str]) -> dict[str, Any]:
        """Get what this rank lacks of its parts, and give what others lack. Blocks.

        Returns:
            `{"lost": {name: why}, "num_bytes": received}`.
        """
        if self._rank in command.new_ranks:
            self._read_new(names)
        return self._move(command, range(command.world_size))

    def commit(self) -> None:
        """Give all DTensors their contents: every rank has its parts."""
        if self._param_groups and self.is_begun:
            fsdp.renew_mesh_infos(self._param_groups)
        for entry in self._entries if self.is_begun else ():
            assert entry.target is not None  # moved
            if entry.param is not None:
                assert entry.padded is not None
                fsdp.renew_param(entry.param, entry.padded)
            else:
                entry.tensor._local_tensor = entry.target
        self.is_begun = False
        self.forget()

    def _read_new(self, names: Sequence[str]) -> None:
        """Find the DTensors of a new rank, which cells that were run again and other ranks have made."""
        root = self._groups.mesh
        assert root is not None
        names = sorted(name for name in names if name in self._namespace)
        params = {
            id(param.sharded_param): param
            for name in names
            if isinstance(module := self._namespace[name], torch.nn.Module)
            for group in fsdp.param_groups_of(module)
            for param in group.fsdp_params
        }
        self._entries, _ = read_catalog(self._namespace, names, root, self._rank, params)
        for entry in self._entries:
            ((_, entry.target),), entry.held = entry.held, []

    # ---- moving

    def _move(self, command: MoveShards, needing: Sequence[int]) -> dict[str, Any]:
        is_new = self._rank in command.new_ranks
        first = min(rank for rank in range(dist.get_world_size()) if rank not in command.new_ranks)
        own = Description(
            [(entry.paths, entry.cut) for entry in self._entries] if self._rank == first else [],
            None if is_new else [[box for box, _ in entry.held] for entry in self._entries],
        )
        said = [_descriptions.decode(text) for text in transfer.gather(_encoder.encode(own))]
        entries, problem = self._match(said[first].found) if is_new else (self._entries, "")
        mover = _Mover(self._rank, needing, command.axes, [one.held for one in said])
        if is_new and not problem:
            problem = next(filter(None, map(mover.problem_of, entries)), "")
        texts = transfer.gather(problem.encode())
        if problems := {rank: text.decode() for rank, text in enumerate(texts) if text}:
            raise UsageError("; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))
        lost = mover.run(entries)
        transfer.wait_for_all()
        return {"lost": sorted({entry.paths[0][0] for entry in lost}), "num_bytes": mover.num_received}

    def _match(self, found: Sequence[tuple[Sequence[Path], Cut]]) -> tuple[list[Entry], str]:
        """Return this new rank's entries in the order of the others', and what it lacks."""
        own = {path: entry for entry in self._entries for path in entry.paths}
        entries, lacking = [], dict[str, None]()
        for paths, cut in found:
            entry = next((own[path] for path in paths if path in own), None)
            if entry is None and (
                of := next((own[path[:-1]] for path in paths if path[-1] == "grad" and path[:-1] in own), None)
            ):
                of.tensor.grad = torch.zeros_like(of.tensor)
                gradient: Any = of.tensor.grad
                entry = Entry(gradient, list(paths), cut, target=gradient._local_tensor)
            if entry is None:
                lacking[paths[0][0]] = None
            else:
                entry.cut = cut
                entries.append(entry)
        return entries, f"it lacks {', '.join(lacking)}, or parts of it" if lacking else ""


class _Mover:
    """Carries out the copies of one step.

    Args:
        needing: ranks that are to have their parts.
        held: by rank, of each tensor the parts that it holds; None: nothing.
    """

    def __init__(self, rank: int, needing: Sequence[int], sizes: Sizes, held: Sequence[list[list[Box]] | None]) -> None:
        self._rank, self._needing, self._sizes, self._held = rank, needing, sizes, held
        self._plans: dict[Any, tuple[list[Copy], dict[int, list[Box]]]] = {}  # layers of a model have equal ones
        self.num_received = 0

    def problem_of(self, entry: Entry) -> str:
        """Return why a new rank's tensor is not what it is to become; "" if it is."""
        box = box_of(entry.tensor.shape, entry.cut, self._sizes, self._rank)
        assert entry.target is not None
        if tuple(entry.target.shape) == shape_of(box):
            return ""
        return f"{'.'.join(entry.paths[0])} has parts of shape {tuple(entry.target.shape)}, not {shape_of(box)}"

    def run(self, entries: Sequence[Entry]) -> list[Entry]:
        """Move all; return the tensors of which parts are gone, which are NaN."""
        lost = []
        for window in self._windows(entries):
            plans = [self._plan(at, entry) for at, entry in window]
            if self._rank in self._needing:
                for _, entry in window:
                    self._allocate(entry)
            self._carry_out([entry for _, entry in window], [copies for copies, _ in plans])
            for (_, entry), (_, gone) in zip(window, plans, strict=True):
                if gone:
                    lost.append(entry)
                    self._mark_gone(entry, gone.get(self._rank, []))
        for entry in entries if self._rank in self._needing else ():
            assert entry.target is not None
            box = self._box(entry)
            if entry.held and all(have != box for have, _ in entry.held):
                entry.held.insert(0, (box, entry.target))
        return lost

    def _windows(self, entries: Sequence[Entry]) -> Iterator[list[tuple[int, Entry]]]:
        window, size = [], 0
        for at, entry in enumerate(entries):
            window.append((at, entry))
            size += entry.num_bytes // len(self._needing)
            if size >= _WINDOW_BYTES:
                yield window
                window, size = [], 0
        if window:
            yield window

    def _box(self, entry: Entry) -> Box:
        return box_of(entry.tensor.shape, entry.cut, self._sizes, self._rank)

    def _plan(self, at: int, entry: Entry) -> tuple[list[Copy], dict[int, list[Box]]]:
        held = {rank: boxes[at] for rank, boxes in enumerate(self._held) if boxes is not None}
        key = (
            tuple(entry.tensor.shape),
            entry.cut,
            tuple((rank, tuple(map(tuple, boxes))) for rank, boxes in held.items()),
        )
        if key not in self._plans:
            needed = {rank: box_of(entry.tensor.shape, entry.cut, self._sizes, rank) for rank in self._needing}
            self._plans[key] = plan_copies(needed, held)
        return self._plans[key]

    def _allocate(self, entry: Entry) -> None:
        """Give a tensor the memory of its new part, unless it has it."""
        if entry.target is not None:
            return
        box = self._box(entry)
        local = entry.held[0][1]
        shape = shape_of(box)
        if entry.param is None:
            same = next((memory for have, memory in entry.held if have == box), None)
            entry.target = same if same is not None else _empty_like(local, shape, entry.tensor.stride())
            return
        param = entry.param
        whole = fsdp.padded_shape(param, entry.cut, self._sizes, self._rank)
        entry.padded = torch.zeros(whole, dtype=local.dtype, device=local.device, pin_memory=param.pin_memory)
        dim = param.fsdp_placement.dim
        entry.target = entry.padded.narrow(dim, 0, shape[dim])

    def _carry_out(self, entries: Sequence[Entry], plans: Sequence[list[Copy]]) -> None:
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[torch.Tensor]] = {}
        for entry, copies in zip(entries, plans, strict=True):
            for copy in copies:
                if copy.source == self._rank:
                    piece = _find(entry, copy.box)
                    if copy.to != self._rank:
                        outgoing.setdefault(copy.to, []).append(piece)
                    elif (to := self._place(entry, copy.box)).data_ptr() != piece.data_ptr():
                        to.copy_(piece)
                elif copy.to == self._rank:
                    incoming.setdefault(copy.source, []).append(self._place(entry, copy.box))
        received = {
            source: torch.empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8)
            for source, pieces in incoming.items()
        }
        sent = {to: torch.cat([_bytes_of(piece) for piece in pieces]) for to, pieces in outgoing.items()}
        works = [dist.isend(piece, to) for to, memory in sent.items() for piece in split_memory([memory])]
        works += [dist.irecv(piece, source) for source, memory in received.items() for piece in split_memory([memory])]
        for work in works:
            assert work is not None  # this rank is a member of the world
            work.wait()
        for source, pieces in incoming.items():
            memory = received[source]
            self.num_received += len(memory)
            for piece in pieces:
                size = piece.nbytes
                piece.copy_(memory[:size].clone().view(piece.dtype).view(piece.shape))
                memory = memory[size:]

    def _place(self, entry: Entry, box: Box) -> torch.Tensor:
        assert entry.target is not None
        return entry.target[within(box, self._box(entry))]

    def _mark_gone(self, entry: Entry, gone: Sequence[Box]) -> None:
        for box in gone:
            place = self._place(entry, box)
            place.fill_(torch.nan if place.is_floating_point() or place.is_complex() else 0)


class _NoContents(torch.Tensor):
    """The part of a DTensor that must not be used: every operation on it says why."""

    why: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, shape: Sequence[int], why: str) -> _NoContents:
        found: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)
        found.why = why
        return found  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for one in args:
            for inner in one if isinstance(one, (list, tuple)) else [one]:
                if isinstance(inner, _NoContents):
                    raise UsageError(f"this DTensor has no contents: {inner.why}")
        raise UsageError("a DTensor has no contents")


def _take_contents(tensor: DTensor, param: Any, why: str) -> None:
    local = tensor._local_tensor
    if isinstance(local, _NoContents):
        return
    tensor._local_tensor = _NoContents(local, local.shape, why)
    if param is not None:
        param._sharded_param_data = _NoContents(local, (param._sharded_param_data.numel(),), why)


def _find(entry: Entry, box: Box) -> torch.Tensor:
    """Return this rank's memory of a part that it holds."""
    for have, memory in entry.held:
        if all(begin >= first and end <= last for (begin, end), (first, last) in zip(box, have, strict=True)):
            return memory[within(box, have)]
    raise AssertionError(f"{entry.paths[0]}: {box} is not held")


def _empty_like(local: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return memory of a shape whose dims lie in the order of these strides."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    memory = torch.empty([shape[dim] for dim in order], dtype=local.dtype, device=local.device)
    return memory.permute([order.index(dim) for dim in range(len(shape))])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
