"""Records one cell of this rank: what it reads, before it runs; the results of its collectives, while it runs.

All of it is in this process's memory, within a bound, until the next cell is recorded. What does not fit is no record:
half of one cannot be replayed, so `RecordedCell.missing` says why there is none.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.diagnose.source_files import is_cell_file
from meshbook.errors import message_of
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.recording import bundle, copying
from meshbook.rank.recording.collective_log import CollectiveLog
from meshbook.rank.recording.entries import CollectiveEntry
from meshbook.rank.recording.names import names_bound_first, names_read
from meshbook.rank.recording.references import RecordedObjects
from meshbook.rank.state.random_states import random_states
from meshbook.version import __version__
from meshbook.wire import pickling
from meshbook.wire.messages import Payload, RankError, RunCell
from meshbook.wire.pickler import LimitExceeded

_MISSING = object()


@dataclass
class RecordedCell:
    """One recorded cell.

    Attributes:
        missing: why there is no record; "": there is one.
        nbytes: what it takes in memory.
    """

    cell: RunCell
    file: str
    missing: str = ""
    nbytes: int = 0
    payload: Payload | None = None
    names: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    groups: tuple[bundle.RecordedGroup, ...] = ()
    num_groups_created: int = 0
    entries: list[CollectiveEntry] = field(default_factory=list)
    end: bundle.RecordedEnd = field(default_factory=lambda: bundle.RecordedEnd("running"))


class CellRecorder:
    """Records one cell.

    Attributes:
        record: what there is of it.
    """

    def __init__(self, cell: RunCell, namespace: Mapping[str, Any], groups: ProcessGroups | None) -> None:
        """
        Args:
            namespace: in which the cell runs.
        """
        self.record = RecordedCell(cell, "")
        self._limit = cell.record_bytes
        self._namespace, self._groups = namespace, groups
        self._log = CollectiveLog(self.record.entries, self._count)

    # ---- the cell

    def begin(self, codes: Sequence[CodeType], file: str, user_names: Iterable[str], hidden: Mapping[str, Any]) -> None:
        """Take a copy of what the cell reads. Interruptible; what fails leaves no record, and the cell runs.

        Args:
            hidden: names that are not the user's as long as they have exactly these values. Every process has them.
        """
        read = {name: self._namespace[name] for name in names_read(codes, self._namespace, user_names)}
        own = {name: value for name, value in read.items() if not _is_in_every_process(name, value, hidden)}
        self._begin(own, file)
        for name in names_bound_first(codes):  # nobody misses these
            self.record.left_out.pop(name, None)

    def begin_call(self, function: Any, args: Any, kwargs: Any) -> None:
        """Take a copy of a function, of its arguments and of what it reads. As `begin`."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        values = {"_function": function, "_args": args, "_kwargs": kwargs}
        self._begin(values, "" if code is None else code.co_filename)

    def _begin(self, values: dict[str, Any], file: str) -> None:
        self.record.file = self._log.running_file = file
        try:
            self._snapshot(values)
        except (LimitExceeded, MemoryError):
            self._give_up(f"what the cell reads takes more than the {mib(self._limit)} that a record may take")
        except Exception as error:
            self._give_up(f"what the cell reads could not be copied: {type(error).__name__}: {message_of(error)}")
        if not self.record.missing and self._groups is not None:
            self._groups.observers.append(self._log)

    def end(self, status: str, error: RankError | None) -> None:
        """Note how the cell ended."""
        if self._groups is not None and self._log in self._groups.observers:
            self._groups.observers.remove(self._log)
        end = bundle.RecordedEnd(status)
        if error is not None:
            end = bundle.RecordedEnd(status, error.ename, error.evalue, *bundle.user_place(error.frames))
        self.record.end = end

    # ---- what is written

    def save(self, folder: Path, rank: int, world_size: int, device: str) -> tuple[Path, int]:
        """Write the record as a bundle; return its path and its size in bytes.

        Raises:
            BundleError: there is no record.
            OSError: the file cannot be written.
        """
        record = self.record
        if record.missing or record.payload is None:
            raise bundle.BundleError(record.missing or "the cell ended before it was recorded")
        cell = record.cell
        header = make_header(
            self._groups,
            rank=rank,
            world_size=world_size,
            device=device,
            label=cell.label or "the cell",
            source=cell.source,
            file=record.file,
            execution_count=cell.execution_count or 1,
            end=record.end,
            names=record.names,
            left_out=record.left_out,
            sources=record.sources,
            num_collectives=len(record.entries),
        )
        if record.groups:  # since then the cell may have made others, as its replay will
            header = msgspec.structs.replace(header, groups=record.groups, num_groups_created=record.num_groups_created)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank}{bundle.SUFFIX}"
        collectives = pickling.dump(record.entries, pool=None)
        return path, bundle.write(path, header, bundle.BundleBody(record.payload, collectives))

    # ----

    def _snapshot(self, values: dict[str, Any]) -> None:
        record, namespace = self.record, self._namespace
        random = random_states()
        while True:
            objects = RecordedObjects(namespace)
            content = {"values": values, "gradients": objects.gradients, "random": random}
            try:
                payload = copying.copy(content, objects, self._limit)
            except (LimitExceeded, MemoryError):
                raise
            except Exception:
                left_out = copying.find_unpicklable(values, lambda: RecordedObjects(namespace))
                if not left_out:
                    raise
                record.left_out |= left_out
                values = {name: value for name, value in values.items() if name not in left_out}
                continue
            unknown = [name for name in objects.names if name in namespace and name not in values]
            unknown = [name for name in unknown if name not in record.left_out]
            if not unknown:
                break
            values |= {name: namespace[name] for name in unknown}
        record.payload, record.names = payload, tuple(values)
        self._count(copying.num_bytes(payload))
        record.sources = sources_of(objects.files)
        record.groups, record.num_groups_created = groups_of(self._groups)

    def _count(self, nbytes: int) -> None:
        self.record.nbytes += nbytes
        if self.record.nbytes > self._limit and not self.record.missing:
            self._give_up(
                f"the cell and its collectives took more than the {mib(self._limit)} that a record may take; "
                "%mesh record on --limit 4G allows more, and a cell of fewer steps needs less"
            )

    def _give_up(self, why: str) -> None:
        self.record.missing, self.record.payload = why, None
        self._log.stop()


def _is_in_every_process(name: str, value: Any, hidden: Mapping[str, Any]) -> bool:
    return hidden.get(name, _MISSING) is value and not isinstance(value, DeviceMesh)


def make_header(groups: ProcessGroups | None, **fields: Any) -> bundle.BundleHeader:
    """Return the header of a bundle, with what it says of this process."""
    recorded, num_created = groups_of(groups)
    return bundle.BundleHeader(
        meshbook=__version__,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=str(torch.__version__),
        versions=bundle.describe_versions(dict(sys.modules)),
        environment=bundle.environment(),
        groups=recorded,
        num_groups_created=num_created,
        num_threads=torch.get_num_threads(),
        argv=tuple(sys.argv),
        **fields,
    )


def groups_of(groups: ProcessGroups | None) -> tuple[tuple[bundle.RecordedGroup, ...], int]:
    """Return this rank's process groups, the world's first, and how many torch has named."""
    if groups is None or groups.mesh is None:
        return (), 0
    world: Any = dist.group.WORLD
    every = (world, *(group for group in groups.table if group is not world))
    return tuple(
        bundle.RecordedGroup(group.label.name, group.label.ranks) for group in every
    ), groups.num_groups_created


def sources_of(files: Iterable[str]) -> dict[str, str]:
    """Return the texts of cells, by file name."""
    found = {file: "".join(linecache.getlines(file)) for file in files if is_cell_file(file)}
    return {file: text for file, text in found.items() if text}


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
