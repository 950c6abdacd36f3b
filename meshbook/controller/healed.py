"""What `mesh.heal()` and `mesh.resize()` return: what new ranks have, and what could not be had. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from meshbook.controller.tables import count_of, format_age, format_bytes, format_seconds, format_some
from meshbook.ids import Ranks, name_ranks
from meshbook.wire import messages

Said = TypeVar("Said")

_MAX_NAMES_SHOWN = 8
_MAX_REASONS_SHOWN = 6


@dataclass(frozen=True)
class Healed:
    """How a mesh was healed. Its text says it in a few lines.

    Attributes:
        ranks: with new processes; none if all ranks were alive.
        seconds: that it took.
        replayed: labels of the setup cells that the new ranks ran.
        num_defined: other cells whose imports and definitions they ran.
        failed: cells that could not be replayed, and why.
        restored: by new rank, names and the ranks that their values came from.
        missing: by new rank, names that others have and it has not, or not as they have them, and why.
        kept: by new rank, names that it has as its setup cells made them, and why.
        alike: names that `mesh.heal(copy=...)` copies: the others hold them alike, which is no proof.
        checkpoint: folder of the last checkpoint of this mesh that has such names; None: there is none.
        restored_from: folder of the checkpoint that all ranks were then restored to; None: they were not.
    """

    ranks: Ranks
    seconds: float
    replayed: tuple[str, ...]
    num_defined: int
    failed: dict[str, str]
    restored: dict[int, dict[str, int]]
    missing: dict[int, dict[str, str]]
    text: str
    kept: dict[int, dict[str, str]] = field(default_factory=dict)
    alike: tuple[str, ...] = ()
    checkpoint: str | None = None
    restored_from: str | None = None

    @classmethod
    def of(cls, healed: messages.MeshHealed, *, has_checkpoint: bool = True) -> Healed:
        """has_checkpoint: the folder of `healed.checkpoint` is there."""
        return cls(
            ranks=healed.ranks,
            seconds=healed.seconds,
            replayed=healed.ran,
            num_defined=healed.num_defined,
            failed=dict(healed.failed),
            restored={
                rank: {name: source for name, (source, _) in found.items()} for rank, found in healed.restored.items()
            },
            missing=dict(healed.missing),
            kept=dict(healed.kept),
            alike=healed.alike,
            text=_describe(healed, has_checkpoint=has_checkpoint),
            checkpoint=healed.checkpoint.folder if healed.checkpoint is not None else None,
        )

    @property
    def missing_names(self) -> set[str]:
        """The names that cells have bound and some new rank has not."""
        return {name for names in self.missing.values() for name in names if name.isidentifier()}

    def after_restore(self, folder: str, names: Iterable[str]) -> Healed:
        """Return the same after all ranks were restored to a checkpoint that has these names."""
        loaded = set(names)
        missing = {
            rank: {name: why for name, why in of_rank.items() if name.partition(".")[0] not in loaded}
            for rank, of_rank in self.missing.items()
        }
        text = f"{self.text}\nrestored on all ranks from {folder}: {_names(sorted(loaded))}"
        return replace(self, missing=missing, text=text, restored_from=folder)

    @property
    def complete(self) -> bool:
        """Whether the new ranks have everything that the others have."""
        return not self.failed and not any(self.missing.values())

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Resized(Healed):
    """How a mesh was resized. Its text says it in a few lines.

    Attributes:
        ranks: those with new processes: that have joined, and that were lost before.
        before, after: axes and their sizes.
        left: ranks that are no more.
        stale: names whose values cells have computed from the former number of ranks.
        moved: names of DTensors, and of what is made of them, that were cut anew.
        num_bytes: that went from rank to rank for it.
    """

    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    left: Ranks = ()
    stale: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of(cls, healed: messages.MeshHealed, *, has_checkpoint: bool = True) -> Resized:
        resized, spec = healed.resized, healed.info.spec
        assert resized is not None  # in the reply to a resize
        assert spec is not None
        return cls(
            **vars(Healed.of(healed, has_checkpoint=has_checkpoint)),
            before=resized.before,
            after=dict(spec.axes),
            left=resized.left,
            stale=resized.stale,
            moved=resized.moved,
            num_bytes=resized.num_bytes,
        )


def _describe_resized(healed: messages.MeshHealed, resized: messages.ResizeChanges) -> str:
    axes = dict(healed.info.spec.axes) if healed.info.spec is not None else {}
    if list(axes) == list(resized.before) == ["rank"]:  # the axis of a mesh that was given none
        what = f"{resized.before['rank']} → {axes['rank']} ranks"
    elif list(axes) == list(resized.before):
        changed = [
            f"{name} {resized.before[name]} → {size}" for name, size in axes.items() if size != resized.before[name]
        ]
        what = ", ".join(changed)
    else:
        what = " → ".join(", ".join(f"{name}={size}" for name, size in one.items()) for one in (resized.before, axes))
    parts = [f"{what} ({format_seconds(healed.seconds)})"]
    if resized.left:
        parts.append(f"{name_ranks(resized.left)} left")
    if healed.ranks:
        parts.append(f"{name_ranks(healed.ranks)} {'are' if len(healed.ranks) > 1 else 'is'} new")
    if resized.moved:
        parts.append(f"{_names(resized.moved)} cut anew ({format_bytes(resized.num_bytes)} moved)")
    lines = _describe_new(healed, parts)
    if resized.stale:
        lines.append(f"computed from the former number of ranks: {_names(resized.stale)} (run their cells again)")
    return "\n".join(lines)


def _describe(healed: messages.MeshHealed, *, has_checkpoint: bool) -> str:
    if healed.resized is not None:
        return _describe_resized(healed, healed.resized)
    if healed.copied_to:
        what = " · ".join(_describe_restored(healed.restored))
        to = name_ranks(healed.copied_to)
        first = f"{what}, copied to {to}" if what else f"nothing was copied to {to}"
        return "\n".join([first, *_describe_lacking(healed)])
    if not healed.ranks:
        took = f" ({format_seconds(healed.seconds)})" if healed.seconds else ""
        every = f"all {len(healed.info.ranks)} ranks are alive"
        return f"{every}; their process groups were formed anew{took}" if took else f"nothing to heal: {every}"
    are = "are" if len(healed.ranks) > 1 else "is"
    fresh = "fresh processes" if len(healed.ranks) > 1 else "fresh process"
    parts = [f"{name_ranks(healed.ranks)} {are} back ({fresh}, {format_seconds(healed.seconds)})"]
    return "\n".join(_describe_new(healed, parts) + _describe_checkpoint(healed, has_checkpoint=has_checkpoint))


def _describe_new(healed: messages.MeshHealed, parts: list[str]) -> list[str]:
    """Return the lines that say what new ranks have, of which the first begins with these parts."""
    if healed.ran:
        parts.append(f"setup replayed ({count_of(len(healed.ran), 'cell')})")
    if healed.num_defined:
        parts.append(f"imports and definitions of {count_of(healed.num_defined, 'cell')}")
    parts += _describe_restored(healed.restored)
    if healed.info.groups == "ready":
        parts.append("groups formed anew")
    lines = [" · ".join(parts)]
    lines += [f"not replayed: {label}: {why}" for label, why in healed.failed]
    if len(healed.ranks) == len(healed.info.ranks) and (healed.ran or healed.num_defined):
        lines.append(
            "all ranks were lost: names have what these cells gave them, and not what later cells made of them"
        )
    return lines + _describe_lacking(healed)


def _describe_restored(restored: Mapping[int, Mapping[str, tuple[int, str]]]) -> list[str]:
    """Return a phrase for each source and reason: `model, opt from rank 0 (replica on dp)`."""
    return [
        f"{_names(names)} from rank {source} ({why})"
        + (f" on {name_ranks(ranks)}" if len(ranks) < len(restored) else "")
        for ((source, why), ranks), names in _fold(restored).items()
    ]


def _describe_lacking(healed: messages.MeshHealed) -> list[str]:
    absent = {
        rank: {name: why for name, why in found.items() if name not in healed.kept.get(rank, {})}
        for rank, found in healed.missing.items()
    }
    lines = _describe_names(absent, "not on", "missing")
    lines += _describe_names(healed.kept, "as setup cells made it on", "kept")
    if healed.alike:
        is_few = len(healed.alike) <= _MAX_NAMES_SHOWN
        names = f" {' '.join(healed.alike)}" if is_few else f", which copies these {len(healed.alike)}, or some by name"
        lines.append(f"flags and counters may differ by rank; if these do not: %mesh heal --copy{names}")
    return lines


def _describe_names(names: Mapping[int, Mapping[str, str]], what: str, attribute: str) -> list[str]:
    names_of = _fold(names)
    lines = [
        f"{what} {name_ranks(ranks)}: {_names(of_reason)} ({why})"
        for (why, ranks), of_reason in list(names_of.items())[:_MAX_REASONS_SHOWN]
    ]
    if len(names_of) > _MAX_REASONS_SHOWN:
        lines.append(f"... and more: mesh.heal() returns all of it as .{attribute}")
    return lines


def _fold(said: Mapping[int, Mapping[str, Said]]) -> dict[tuple[Said, Ranks], list[str]]:
    """Return names by what is said of them and the ranks of which it is said, from what is said by rank and name."""
    ranks_of: dict[tuple[str, Said], list[int]] = defaultdict(list)
    for rank, of_rank in said.items():
        for name, about in of_rank.items():
            ranks_of[name, about].append(rank)
    names_of: dict[tuple[Said, Ranks], list[str]] = defaultdict(list)
    for (name, about), ranks in ranks_of.items():
        names_of[about, tuple(ranks)].append(name)
    return names_of


def _describe_checkpoint(healed: messages.MeshHealed, *, has_checkpoint: bool) -> list[str]:
    saved = healed.checkpoint
    if saved is None:
        return []
    missing = {name for names in healed.missing.values() for name in names}
    there = [name for name in saved.names if name in missing]
    step = "" if saved.step is None else f", step {saved.step}"
    path = saved.folder.rpartition("/")[0]
    if not has_checkpoint:
        return [f"{_names(there)}: the checkpoint {saved.folder} had it, and is no longer there"]
    return [
        f"{_names(there)}: in the checkpoint {path.rpartition('/')[2]}{step} ({format_age(healed.checkpoint_age_s)} "
        f"ago): %mesh restore {saved.folder} brings all ranks back to it"
    ]


def _names(names: Sequence[str]) -> str:
    return format_some(names, _MAX_NAMES_SHOWN)
