"""One rank's memory of a snapshot: its own part, and copies of what another rank holds alone.

The memory is used again for later snapshots. On CUDA it is pinned memory of the host: a copy on the device would take
the room of the model a second and a third time. No collectives here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshbook.rank.elastic.agreement import HeldSnapshot, Manifest, Unit, byte_ranges, keepers, offsets, units_to_copy
from meshbook.rank.elastic.contents import Part
from meshbook.rank.state.memory_digests import digest
from meshbook.wire.regions import machine_id


class Snapshot:
    """
    Attributes:
        held: which snapshot it is; None while it is being filled.
        manifests: of all ranks, by rank.
        own: memory of this rank's part: the units one after the other, at `offsets`.
        copies: of the rank whose keeper this one is, the memory of `units_to_copy`, without gaps between them.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.held: HeldSnapshot | None = None
        self.manifests: list[Manifest] = []
        self.own = self.copies = torch.empty(0, dtype=torch.uint8)

    def fill(self, parts: Mapping[str, Part]) -> Manifest:
        """Copy the state of this rank, and return what it consists of. Waits for the device."""
        self.held, self.manifests = None, []
        pickles = {name: torch.frombuffer(bytearray(part.pickled), dtype=torch.uint8) for name, part in parts.items()}
        tensors = [tensor for name, part in parts.items() for tensor in (pickles[name], *part.tensors)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        starts = offsets(sizes)
        self.own = _memory(self.own, starts[-1], tensors)
        for tensor, start, size in zip(tensors, starts, sizes, strict=False):
            target = self.own[start : start + size].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        memory = self.own.numpy()
        units = [Unit(digest(memory[start : start + size]), size) for start, size in zip(starts, sizes, strict=False)]
        return Manifest({name: 1 + len(part.tensors) for name, part in parts.items()}, units, machine_id())

    def contents(self, units: Sequence[Unit], wanted: Sequence[int]) -> list[bytes]:
        """Return the bytes of some of this rank's units."""
        starts = offsets([unit.size for unit in units])
        return [self.own[starts[at] : starts[at] + units[at].size].numpy().tobytes() for at in wanted]

    # ---- copies of another rank

    @property
    def keeper(self) -> int:
        """The rank that keeps copies of this one's part."""
        return keepers(self.manifests)[self._rank]

    @property
    def kept(self) -> int:
        """The rank whose copies this one keeps."""
        return keepers(self.manifests).index(self._rank)

    def to_send(self) -> list[torch.Tensor]:
        """Return the memory that the keeper is to have copies of, in pieces."""
        part, keepers_part = self.manifests[self._rank], self.manifests[self.keeper]
        return [self.own[begin:end] for begin, end in byte_ranges(part, units_to_copy(part, keepers_part))]

    def to_receive(self) -> list[torch.Tensor]:
        """Return the memory for the copies that `kept` sends, in the pieces in which it sends them."""
        kept, part = self.manifests[self.kept], self.manifests[self._rank]
        sizes = [end - begin for begin, end in byte_ranges(kept, units_to_copy(kept, part))]
        self.copies = _memory(self.copies, sum(sizes), ())
        pieces, at = [], 0
        for size in sizes:
            pieces.append(self.copies[at : at + size])
            at += size
        return pieces

    # ---- reading

    def parts(self, names: Sequence[str]) -> dict[str, Part]:
        """Return this rank's own parts of these names; their tensors are bytes, in the memory of the snapshot.

        Names that it does not have are left out.
        """
        manifest = self.manifests[self._rank]
        starts = offsets([unit.size for unit in manifest.units])
        found, at = {}, 0
        for name, count in manifest.parts.items():
            memory = [self.own[starts[i] : starts[i] + manifest.units[i].size] for i in range(at, at + count)]
            if name in names:
                found[name] = Part(memory[0].numpy().tobytes(), memory[1:])
            at += count
        return found

    def memory_of_units(self) -> dict[bytes, torch.Tensor]:
        """Return by digest the memory of each unit that is here: the copies, and this rank's own part."""
        kept, part = self.manifests[self.kept], self.manifests[self._rank]
        found, start = {}, 0
        for at in units_to_copy(kept, part):
            unit = kept.units[at]
            found[unit.digest] = self.copies[start : start + unit.size]
            start += offsets([unit.size])[-1]
        starts = offsets([unit.size for unit in part.units])
        for start, unit in zip(starts, part.units, strict=False):
            found[unit.digest] = self.own[start : start + unit.size]
        return found

    def allocate(self, manifests: list[Manifest]) -> list[torch.Tensor]:
        """Return memory for the units of this rank's own part, which other ranks send; small ones are filled in."""
        self.held, self.manifests = None, manifests
        units = manifests[self._rank].units
        starts = offsets([unit.size for unit in units])
        self.own = _memory(self.own, starts[-1], ())
        found = [self.own[start : start + unit.size] for start, unit in zip(starts, units, strict=False)]
        for memory, unit in zip(found, units, strict=True):
            if unit.data:
                memory.copy_(torch.frombuffer(bytearray(unit.data), dtype=torch.uint8))
        return found


def _memory(present: torch.Tensor, size: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return memory of at least this size: the present one if it is large enough."""
    if len(present) >= size:
        return present
    # an eighth more, because optimizers and lists of losses grow in the first steps
    return torch.empty(size + size // 8, dtype=torch.uint8, pin_memory=any(tensor.is_cuda for tensor in tensors))
