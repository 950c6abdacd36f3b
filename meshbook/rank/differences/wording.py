"""How modules and findings of the sentinel are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshbook.ids import name_ranks
from meshbook.rank.differences import numbers
from meshbook.rank.differences.skipped_steps import Skipped
from meshbook.rank.process_groups.ring import Collective
from meshbook.rank.state.kinds import clean_name
from meshbook.wire.messages import NumberFinding

_NOT_REPEATED = (
    "computed again it was not, so that an operation up to it gives other numbers each time. Run the step without "
    "meshbook.record, where the numbers themselves are looked at, to see which"
)


_OVERFLOW = (
    "each rank gave finite numbers, and their sum is too large for {dtype}. Divide before the sum, or reduce in a "
    "wider dtype"
)


_SKIPPED = (
    "a GradScaler has skipped {num} steps one after the other, the last with a scale of {scale:.2g}: no scale cures "
    "these gradients"
)


class ModuleNames:
    """Names modules by paths from the user's names: those of the namespace, and of functions that run."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace

    def name_module(self, module: nn.Module) -> str:
        """Return the shortest path to a module; its class, if no name leads to it."""
        names = [
            clean_name(f"{name}.{path}".rstrip("."))
            for name, top in self._tops()
            for path, inner in top.named_modules()
            if inner is module
        ]
        return min(names, key=lambda name: (name.count("."), len(name)), default=_class_of(module))

    def all_names(self) -> dict[int, str]:
        """Return the shortest path to each module that a name leads to, by its id."""
        names: dict[int, str] = {}
        for name, top in self._tops():
            for path, inner in top.named_modules():
                found = clean_name(f"{name}.{path}".rstrip("."))
                known = names.get(id(inner), found)
                names[id(inner)] = min(known, found, key=lambda each: (each.count("."), len(each)))
        return names

    def name_parameter(self, parameter: Any, called: Sequence[nn.Module]) -> str:
        """Return the path to a parameter, from one of the modules that were called if it has it; empty: no path."""
        for module in called:
            for path, each in module.named_parameters():
                if each is parameter:
                    return clean_name(f"{self.name_module(module)}.{path}")
        for name, top in self._tops():
            for path, each in top.named_parameters():
                if each is parameter:
                    return clean_name(f"{name}.{path}")
        return ""

    def _tops(self) -> Iterator[tuple[str, nn.Module]]:
        for namespace in (self._namespace, *numbers.user_namespaces()):
            for name, value in list(namespace.items()):
                if isinstance(value, nn.Module) and not name.startswith("_") and name != "self":
                    yield name, value.module if isinstance(value, DistributedDataParallel) else value


def _class_of(module: nn.Module) -> str:
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def with_text(found: NumberFinding, rank: int, carried: Collective | None) -> NumberFinding:
    """Return a finding with its text.

    Args:
        carried: the first collective that this rank gave bad numbers to, if the finding does not have it.
    """
    match found.phase:
        case "loss":
            where = f"the loss{f', {found.op}' if found.op else ''}"
        case "input":
            where = f"the input of {found.module}"
        case "remote":
            where = f"{found.op} (remote)"
        case "remote input":
            where = f"an input of {found.op} (remote), NaN before it"
        case "not repeated":
            where = f"a result of {found.op} (remote)"
        case _:
            where = f"{' '.join(filter(None, [found.module, found.op])) or 'outside of modules'} ({found.phase})"
    step = "" if found.step is None else f"step {found.step}"
    if found.phase == "sum over ranks":  # of which no rank is to blame
        where = f"{found.collective} of {name_ranks(found.reached)} ({found.phase})"
        parts = [step, where, found.line]
        text = f"first non-finite: {', '.join(filter(None, parts))}; {_OVERFLOW.format(dtype=found.dtype)}"
        return msgspec.structs.replace(found, text=text)
    text = f"first non-finite: {', '.join(filter(None, [step, f'rank {rank}', where, found.line]))}"
    if found.input_max is not None:
        text += f"; input max {found.input_max:.2g} in {found.dtype}"
    if found.phase == "not repeated":
        text += f"; {_NOT_REPEATED}"
    if found.num_skipped:
        text += f"; {_SKIPPED.format(num=found.num_skipped, scale=found.scale)}"
    if found.parameter:
        text += f"; first bad gradient: {found.parameter}"
    found = found if found.collective else with_carrier(found, carried)
    if found.collective:
        text += f"; reached {name_ranks(found.reached)} by {found.collective}"
    return msgspec.structs.replace(found, text=text)


def with_skipped(found: NumberFinding | None, skipped: Skipped) -> NumberFinding | None:
    """Return a finding, if there is one, with the steps that a scaler has skipped for it."""
    if found is None:
        return None
    return msgspec.structs.replace(found, num_skipped=skipped.num_steps, scale=skipped.scale)


def with_carrier(found: NumberFinding, carried: Collective | None) -> NumberFinding:
    """Return a finding with the first collective that this rank gave bad numbers to; None: there was none."""
    if carried is None:
        return found
    collective = f"{carried.op} #{carried.group_seq}"
    return msgspec.structs.replace(found, collective=collective, reached=tuple(carried.group_ranks))
