"""`model.plan`: how a module on the ranks is distributed, what other plans would cost, and torch code for the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshbook.errors import UsageError
from meshbook.rank.tensors.cut_styles import STYLES
from meshbook.rank.tensors.strategies import PRECISIONS, Plan
from meshbook.tensors.plan_estimates import Estimate

_GIB, _MIB = 1 << 30, 1 << 20


@dataclass
class ModulePlan:
    """How a module is distributed. Its text is one line, and with a sample a table of the plans that were compared.

    Attributes:
        strategy: the Plan; None: "replicate", or a function of the user's.
        estimates: what plans cost on each rank, the chosen one among them; empty without `sample=`.
        free_bytes: memory that a rank may use; None without a sample.
    """

    text: str
    strategy: Plan | None
    axes: Mapping[str, int]
    device: str
    # By parameter: its shape, and how each axis of the mesh has it.
    parameters: Mapping[str, tuple[tuple[int, ...], tuple[Any, ...]]]
    blocks: Sequence[str]
    styles: Mapping[str, str]  # of layers that are cut
    heads: Mapping[str, Mapping[str, int]]
    whole: Mapping[str, str]  # why layers are not cut
    cut_source: str | None
    estimates: list[Estimate] = field(default_factory=list)
    free_bytes: int | None = None

    def __str__(self) -> str:
        return self.text if not self.estimates else f"{self.text}\n{_aligned(self._rows())}"

    __repr__ = __str__

    def __contains__(self, words: str) -> bool:
        return words in str(self)

    def _repr_markdown_(self) -> str:
        if not self.estimates:
            return f"`{self.text}`"
        header, *rows = self._rows()
        lines = [header, ["---"] * len(header), *rows]
        return f"`{self.text}`\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def _rows(self) -> list[list[str]]:
        fitting = [estimate for estimate in self.estimates if self._fits(estimate)]
        fastest = min((estimate.step_s for estimate in fitting), default=0.0)
        rows = [["plan", "memory/rank", "step", ""]]
        for estimate in sorted(
            self.estimates, key=lambda one: (one.error is not None, not self._fits(one), one.step_s)
        ):
            name = estimate.plan.describe(self.axes)
            if estimate.error is not None:
                rows.append([name, "", "", estimate.error])
                continue
            fits = self._fits(estimate)
            step = f"{_duration_text(estimate.step_s)}{'' if estimate.measured_s is None else ' measured'}"
            rows.append(
                [
                    name,
                    size_text(estimate.memory_bytes),
                    step if fits else "does not fit",
                    self._reason(estimate, fastest),
                ]
            )
        return rows

    def _order(self, estimate: Estimate) -> tuple[bool, bool, float]:
        return estimate.error is not None, not self._fits(estimate), estimate.step_s

    def _fits(self, estimate: Estimate) -> bool:
        return estimate.error is None and (self.free_bytes is None or estimate.memory_bytes <= self.free_bytes)

    def _reason(self, estimate: Estimate, fastest: float) -> str:
        words = []
        if self.strategy is not None and estimate.plan == replace(self.strategy, compile=False):
            words.append("← chosen")
        if self.free_bytes is not None and not self._fits(estimate):
            name, largest = max(estimate.memory.items(), key=lambda item: item[1])
            missing = estimate.memory_bytes - self.free_bytes
            return "; ".join([*words, f"{size_text(missing)} are missing; {size_text(largest)} for {name}"])
        if estimate.step_s > fastest > 0:
            words.append(f"{estimate.step_s / fastest - 1:.0%} slower")
        name, longest = max(estimate.seconds.items(), key=lambda item: item[1])
        words.append(f"{name} {longest / (sum(estimate.seconds.values()) or 1.0):.0%} of the step")
        return "; ".join(words)

    def explain(self, name: str) -> str:
        """Return what is done with a submodule or parameter, and why.

        Raises:
            UsageError: the module has none of this name.
        """
        inside = {full: found for full, found in self.parameters.items() if full == name or full.startswith(f"{name}.")}
        if not inside:
            known = ", ".join(dict.fromkeys(full.rpartition(".")[0] for full in self.parameters))
            raise UsageError(f"there are no parameters of {name!r}; there are those of {known}")
        lines = [name]
        if name in self.blocks and self.strategy is not None:
            interval = self.strategy.checkpoint_interval
            if interval is not None and self.blocks.index(name) % interval == interval - 1:
                lines.append(f"  its forward runs again in backward (ac={self.strategy.ac!r})")
            if self.strategy.pp is not None:
                lines.append(f"  is computed by a stage of {self.strategy.pp}, which gathers its parameters for that")
            if self.strategy.fsdp is not None:
                lines.append(
                    "  is a block: gathered for its forward and for its backward, and sharded again after each"
                )
        for full, (shape, placements) in inside.items():
            ways = [self._way(axis, placement) for axis, placement in zip(self.axes, placements, strict=True)]
            lines.append(f"  {full} {list(shape)}: {', '.join(ways)}")
        for layer, style in self.styles.items():
            if layer == name or layer.startswith(f"{name}."):
                lines.append(f"  {layer} is cut {style} ({self.cut_source})")
        for layer, reason in self.whole.items():
            if layer == name or layer.startswith(f"{name}.") or name.startswith(f"{layer}."):
                lines.append(f"  {layer} is whole over tp: {reason}")
        return "\n".join(lines)

    def _way(self, axis: str, placement: Any) -> str:
        size = self.axes[axis]
        return f"1/{size} over {axis} (dim {placement.dim})" if placement.is_shard() else f"whole over {axis}"

    def code(self) -> str:
        """Return torch code that distributes the module in the same way, to be run with torchrun.

        Raises:
            UsageError: it is distributed by a function of the user's.
        """
        plan = self.strategy
        if plan is None:
            raise UsageError(f"{self.text}: there is no plan to write down")
        shape, names = tuple(self.axes.values()), tuple(self.axes)
        lines = [
            "import torch",
            "from torch.distributed.device_mesh import init_device_mesh",
            "",
            "",
            "def distribute(model, mesh=None):",
            f'    """{self.text}."""',
            "    if mesh is None:",
            f"        mesh = init_device_mesh({self.device!r}, {shape}, mesh_dim_names={names})",
        ]
        if plan.tp is not None:
            lines += self._tensor_parallel_lines(plan.tp)
        if plan.checkpoint_interval is not None and plan.pp is None:
            checkpointed = self.blocks[plan.checkpoint_interval - 1 :: plan.checkpoint_interval]
            lines += [
                "    from torch.distributed._composable.checkpoint_activation import checkpoint",
                *_loop("name", checkpointed, ["checkpoint(model.get_submodule(name))"]),
            ]
        if (backend := plan.compile_backend) is not None:
            compiled = "model.get_submodule(name)" if self.blocks else "model"
            line = f"{compiled}.forward = torch.compile({compiled}.forward, backend={backend!r})"
            lines += _loop("name", self.blocks, [line]) if self.blocks else [f"    {line}"]
        dtype = PRECISIONS[plan.precision]
        if plan.fsdp is not None:
            axes = plan.batch_axes if len(plan.batch_axes) > 1 else plan.batch_axes[0]
            lines += ["    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"]
            policy = f"param_dtype=torch.{dtype}, reduce_dtype=torch.float32" if dtype else ""
            lines += [f"    options = {{'mesh': mesh[{axes!r}], 'mp_policy': MixedPrecisionPolicy({policy})}}"]
            lines += _loop("name", self.blocks, ["fully_shard(model.get_submodule(name), **options)"])
            lines += ["    fully_shard(model, **options)"]
        elif plan.pp is not None:
            lines += self._pipeline_lines(plan)
        elif plan.ddp is not None:
            lines += [
                "    from torch.nn.parallel import DistributedDataParallel",
                f"    model = DistributedDataParallel(model, process_group=mesh.get_group({plan.ddp!r}))",
            ]
        if dtype and plan.fsdp is None:
            lines += [f"    # compute under torch.autocast({self.device!r}, dtype=torch.{dtype})"]
        return "\n".join([*lines, "    return model", ""])

    def _pipeline_lines(self, plan: Plan) -> list[str]:
        lines = [
            "    from meshbook.rank.tensors.pipeline import average_gradients, pipeline_blocks",
            f"    pipeline_blocks(model, mesh[{plan.pp!r}], microbatches={plan.microbatches}, "
            f"checkpoint_interval={plan.checkpoint_interval})",
        ]
        if plan.ddp is not None:
            lines += [
                f"    # after backward: average_gradients(list(model.parameters()), mesh.get_group({plan.ddp!r}))"
            ]
        return lines

    def _has_own_styles(self) -> bool:
        return any("cut_styles" in STYLES[style].code for style in self.styles.values())

    def _tensor_parallel_lines(self, axis: str) -> list[str]:
        lines = [
            "    from torch.distributed.tensor import Replicate",
            "    from torch.distributed.tensor.parallel import (",
            "        ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,",
            "    )",
            *(["    from meshbook.rank.tensors import cut_styles"] if self._has_own_styles() else []),
            "    styles = {}",
        ]
        for style in dict.fromkeys(self.styles.values()):
            named = [name for name, other in self.styles.items() if other == style]
            lines += _loop("name", named, [f"styles[name] = {STYLES[style].code}"])
        lines += [f"    parallelize_module(model, mesh[{axis!r}], styles)"]
        counts: dict[tuple[str, int], list[str]] = {}
        for name, attributes in self.heads.items():
            for attribute, value in attributes.items():
                counts.setdefault((attribute, value), []).append(name)
        for (attribute, value), names in counts.items():
            lines += _loop("name", names, [f"model.get_submodule(name).{attribute} = {value}"])
        return lines


def _loop(variable: str, names: Sequence[str], body: Sequence[str]) -> list[str]:
    """Return lines that do something for each name; names that differ in one number are a pattern."""
    patterns: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"(?<![^.])\d+(?![^.])", name)
        pattern = name if number is None else f"{name[: number.start()]}{{i}}{name[number.end() :]}"
        patterns.setdefault(pattern, []).append(-1 if number is None else int(number[0]))
    lines = []
    for pattern, numbers in patterns.items():
        if numbers == [-1]:
            lines += [f"    for {variable} in [{pattern!r}]:"]
        else:
            step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
            counted = range(numbers[0], numbers[-1] + 1, step or 1)
            which = repr(counted) if list(counted) == numbers else repr(numbers)
            lines += [f"    for {variable} in [f{pattern!r} for i in {which}]:"]
        lines += [f"        {line}" for line in body]
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _duration_text(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 0.01
        else f"{1e3 * seconds:.1f} ms"
    )


def size_text(num_bytes: float) -> str:
    """Return `12.1 GiB`, or `8.3 MiB` of less than a tenth of one."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / _MIB:.2f} MiB"
