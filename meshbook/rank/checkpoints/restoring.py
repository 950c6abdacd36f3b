"""Restores a checkpoint into the names of a rank: everything is compared and checked before anything is changed.

1. What the names hold is compared with `.metadata`, by every rank; one error lists what does not fit, on all ranks.
2. The files' digests are checked, each file by one rank; then values are unpickled and compared.
3. Tensors are read into place, as DCP reshards them, and objects are given their state.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshbook.errors import CheckpointError, message_of
from meshbook.rank.checkpoints.exchange import Answer, Exchange, attempt
from meshbook.rank.checkpoints.named_state import RANK_SUFFIX, Path, key_of
from meshbook.rank.checkpoints.targets import Problem, Target, make_target
from meshbook.wire import checkpoint_folders
from meshbook.wire.checkpoint_folders import CheckpointEntry
from meshbook.wire.messages import SavedName

_MAX_LISTED = 8
_DIFFERENT = "different on each rank"


@dataclass
class SavedState:
    """What a checkpoint has of one name.

    Attributes:
        entries: metadata by path, of tensors; None for values.
        variants: for paths whose values differ between ranks, the ranks that have their own and their keys.
    """

    saved: SavedName
    entries: dict[Path, TensorStorageMetadata | None] = field(default_factory=dict)
    variants: dict[Path, dict[int, str]] = field(default_factory=dict)

    def key_for(self, path: Path, rank: int) -> str:
        """Return the key under which this rank's value is saved."""
        return self.variants.get(path, {}).get(rank, key_of(path))


class Restore:
    """One restore on one rank; call `run` once."""

    def __init__(
        self,
        folder: str,
        names: tuple[str, ...],
        namespace: MutableMapping[str, Any],
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """
        Args:
            names: (): all that the checkpoint has.
            exchange: with the ranks that restore too.
        """
        self._folder, self._names, self._namespace = FilePath(folder), names, namespace
        self._exchange, self._rank, self._world_size = exchange, rank, world_size
        self._entry: CheckpointEntry
        self._metadata: Metadata
        self._saved: list[SavedState] = []
        self._targets: list[Target] = []
        self._values: dict[str, Any] = {}  # by key

    def run(self, device: torch.device) -> dict[str, Any]:
        """Restore. Starts collectives if other ranks restore too.

        Args:
            device: for tensors whose names are not bound yet.

        Raises:
            CheckpointError: nothing was changed, on any rank; unless the message says that reading stopped half-way.
        """
        exchange = self._exchange
        exchange.all_gather(attempt(self._open))
        self._agree(attempt(lambda: self._compare_structure(device)), compare_keys=exchange.world_size > 1)
        exchange.all_gather(attempt(self._check_digests))
        self._agree(attempt(self._compare_values), compare_keys=False)
        exchange.all_gather(attempt(self._load))
        bound = [name for target in self._targets for name in target.bound_names]
        return {"names": [target.name for target in self._targets], "bound": bound}

    # ---- before anything is changed

    def _open(self) -> None:
        folder = self._folder
        try:
            manifest = checkpoint_folders.read_manifest(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} is no checkpoint that this rank can read: {error.strerror}") from None
        self._entry = CheckpointEntry(folder, manifest)
        by_name = {saved.name: saved for saved in manifest.names}
        if unknown := [name for name in self._names if name not in by_name]:
            raise CheckpointError(f"{folder} has {', '.join(by_name)}, and not {', '.join(unknown)}")
        checkpoint_folders.check_sizes(self._entry)
        try:
            self._metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:
            raise CheckpointError(
                f"{folder}/.metadata cannot be read by torch {torch.__version__}: {message_of(error)}; it was "
                f"saved with torch {manifest.torch}"
            ) from error
        self._saved = [_saved_state(by_name[name], self._metadata) for name in self._names or by_name]

    def _compare_structure(self, device: torch.device) -> tuple[list[Problem], set[str], set[str]]:
        """Return what does not fit, and the keys that this rank has and that the checkpoint has."""
        problems: list[Problem] = []
        own: set[str] = set()
        saved: set[str] = set()
        for state in self._saved:
            try:
                target = make_target(state.saved, self._namespace, state.entries, device)
            except CheckpointError as error:
                problems.append(Problem("not to be restored", f"`{state.saved.name}`: {error}"))
                continue
            self._targets.append(target)
            problems += target.problems + target.find_unwritable()
            own |= {key_of(path) for path in target.own_paths}
            saved |= {key_of(path) for path in target.saved_paths}
            problems += self._compare_ranks(state, target)
        if self._exchange.world_size == 1:
            problems += _extra(own, saved) if self._world_size == 1 else []
        return problems, own, saved

    def _compare_ranks(self, state: SavedState, target: Target) -> list[Problem]:
        """Return what was saved per rank and cannot be given to another number of ranks."""
        before, name = self._entry.manifest.world_size, state.saved.name
        if before == self._world_size:
            return []
        differing = [key_of(path) for path in state.variants if path in target.tensors]
        if state.saved.kind == "rng":
            differing.append(name)
        return [
            Problem(_DIFFERENT, f"{key} was saved by {before} ranks, and here are {self._world_size}")
            for key in differing
        ]

    def _check_digests(self) -> None:
        names = [file.name for file in self._entry.manifest.files]
        exchange = self._exchange
        checkpoint_folders.check_digests(self._entry, names[exchange.rank :: exchange.world_size])

    def _compare_values(self) -> tuple[list[Problem], set[str], set[str]]:
        """Read the values, and return what does not fit."""
        problems: list[Problem] = []
        states = {state.saved.name: state for state in self._saved}
        keys: dict[str, tuple[Target, Path]] = {}
        for target in self._targets:
            state = states[target.name]
            for path in target.value_paths:
                keys[state.key_for(path, self._rank)] = target, path
        reshards = self._entry.manifest.world_size != self._world_size
        variants = {
            path: [key_of(path), *ranks.values()]
            for state in self._saved
            for path, ranks in state.variants.items()
            if reshards and state.entries[path] is None
        }
        loaded = self._read(dict.fromkeys([*keys, *(key for each in variants.values() for key in each)]))
        for path, each in variants.items():
            if not all(_are_equal(loaded[each[0]], loaded[key]) for key in each[1:]):
                text = f"{key_of(path)} was saved by {self._entry.manifest.world_size} ranks, and here are"
                problems.append(Problem(_DIFFERENT, f"{text} {self._world_size}"))
        for key, (target, path) in keys.items():
            target.values[path] = loaded[key]
        for target in self._targets:
            problems += target.compare_values()
        return problems, set(), set()

    def _agree(self, answer: Answer[tuple[list[Problem], set[str], set[str]]], *, compare_keys: bool) -> None:
        """Raise one CheckpointError on all ranks if something does not fit on any of them."""
        answers = self._exchange.all_gather(answer)
        problems = list(dict.fromkeys(problem for found, _, _ in answers for problem in found))
        if compare_keys:
            problems += _extra({key for _, own, _ in answers for key in own}, answers[0][2])
        if problems:
            raise CheckpointError(
                f"{self._folder} does not fit what the ranks hold; nothing was changed.\n{_describe(problems)}"
            )

    # ---- and then

    def _load(self) -> None:
        states = {state.saved.name: state for state in self._saved}
        done: list[str] = []
        try:
            self._read(
                {
                    states[target.name].key_for(path, self._rank): tensor
                    for target in self._targets
                    for path, tensor in target.tensors.items()
                }
            )
            for target in self._targets:
                target.apply()
                done.append(target.name)
        except BaseException as error:
            names = ", ".join(target.name for target in self._targets if target.name not in done)
            why = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
            raise CheckpointError(
                f"reading {self._folder} stopped half-way ({why}), and {names} may hold a part of it; restore "
                "again before you use them"
            ) from error

    def _read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read keys of the checkpoint: into the tensors given, and values, given as None, into the result."""
        state = dict(wanted)
        if not state:
            return state
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._metadata, is_coordinator=False)
        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()
        return state


def _saved_state(saved: SavedName, metadata: Metadata) -> SavedState:
    state = SavedState(saved)
    for key, path in metadata.planner_data.items():
        found = RANK_SUFFIX.search(path[-1])
        base = path if found is None else (*path[:-1], path[-1][: found.start()])
        if base[0] != saved.name:
            continue
        if found is not None:
            state.variants.setdefault(base, {})[int(found[1])] = key
        else:
            entry = metadata.state_dict_metadata[key]
            state.entries[path] = entry if isinstance(entry, TensorStorageMetadata) else None
    return state


def _extra(own: set[str], saved: set[str]) -> list[Problem]:
    return [Problem("in the checkpoint only", key) for key in sorted(saved - own)]


def _are_equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.equal(one, other)
        return bool(one == other)
    except Exception:  # a user's `__eq__`, or an array's: not known to be equal
        return False


def _describe(problems: list[Problem]) -> str:
    texts: dict[str, list[str]] = {}
    for problem in problems:
        texts.setdefault(problem.category, []).append(problem.text)
    lines = []
    for category, found in texts.items():
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        lines.append(f"  {category}: {'; '.join(found[:_MAX_LISTED])}{more}")
    if _DIFFERENT in texts:
        lines.append("  What differs on each rank goes back to as many ranks only: restore the others by their names.")
    return "\n".join(lines)
