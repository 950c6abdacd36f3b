"""What a strategy is, in words: `Plan`, and the names that stand for one.

Knows axes by their names and sizes only: no DeviceMesh, no module.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from meshbook.errors import UsageError

NAMES = {
    "fsdp": "parameters, gradients and optimizer state sharded over the axis, gathered block by block (FSDP2)",
    "ddp": "whole parameters on every rank, gradients averaged while backward runs",
    "hsdp": "sharded over the second of two axes, whole copies over the first (FSDP2)",
    "tp": "layers cut over the axis: attention by heads, MLPs by their hidden width",
    "pp": "repeated blocks computed by stages, one rank of the axis after the other, in microbatches (GPipe)",
    "fsdp+tp": "layers cut over the axis tp, and what a rank holds of them sharded over the other (FSDP2)",
    "replicate": "whole parameters on every rank as DTensors; operations follow the placements of what comes in",
}

PRECISIONS = {
    None: None, "fp32": None, "float32": None, "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16",
}  # fmt: skip

_EVERY = re.compile(r"every (?:(\d+)(?:st|nd|rd|th) )?block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a module is distributed: which axis of the mesh does what. A strategy of `meshbook.distribute`.

        meshbook.Plan(fsdp="dp", tp="tp", ac="every 2nd block", precision="bf16")

    Batches are cut along dim 0 over `ddp` and `fsdp`.

    Attributes:
        ddp: axis over which ranks have copies and average their gradients. With `fsdp`: whole copies over this axis,
            each of them sharded over the other (HSDP).
        fsdp: axis over which parameters, gradients and optimizer state are sharded (FSDP2).
        tp: axis over which layers are cut.
        pp: axis whose ranks are stages: each computes some of the repeated blocks, and everything else alike.
        microbatches: how many parts a batch goes through the stages in; None: four for each stage.
        ac: activation checkpointing, "every block" or "every 2nd block": their forward runs again in backward.
        precision: "bf16" or "fp16" computes in it; parameters and gradients keep their dtype.
        compile: True compiles each repeated block by torch.compile (the module, if there are none); or its backend.
        tp_plan: how layers are cut, instead of the model's own table or what is recognised: names of submodules, with
            `*` for a part of one, and "colwise", "rowwise", "colwise_gather_output" or "embedding_rowwise", as in a
            Hugging Face model's `_tp_plan`.

    Raises:
        UsageError: no axis is named, or words that do not go together.
    """

    ddp: str | None = None
    fsdp: str | None = None
    tp: str | None = None
    pp: str | None = None
    microbatches: int | None = None
    ac: str | None = None
    precision: str | None = None
    compile: bool | str = False
    tp_plan: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        used = [axis for axis in (self.ddp, self.fsdp, self.tp, self.pp) if axis is not None]
        if not used:
            raise UsageError('this plan names no axis; say what the ranks do, as in Plan(fsdp="dp")')
        if len(set(used)) < len(used):
            raise UsageError(f"{self}: an axis can do one thing only; give each its own")
        if self.ddp is not None and self.tp is not None and self.fsdp is None:
            raise UsageError(
                f"{self}: DistributedDataParallel does not take layers that are cut; shard them, which also averages "
                f"gradients: Plan(fsdp={self.ddp!r}, tp={self.tp!r})"
            )
        if self.pp is not None and (self.fsdp is not None or self.tp is not None):
            raise UsageError(
                f"{self}: parameters of blocks are sharded over the stages already, and neither fsdp nor tp goes "
                f"together with pp; whole copies do: Plan(ddp=…, pp={self.pp!r})"
            )
        if self.microbatches is not None and (self.pp is None or self.microbatches < 1):
            raise UsageError(f"microbatches={self.microbatches}: how many parts a batch has for the stages of pp=…")
        if self.ac is not None and _EVERY.fullmatch(self.ac) is None:
            raise UsageError(
                f'there is no ac={self.ac!r}; known: "every block", "every 2nd block", "every 3rd block", …'
            )
        if self.checkpoint_interval == 0:
            raise UsageError(f'ac={self.ac!r} would be no block; leave it out, or say "every block"')
        if self.precision not in PRECISIONS:
            raise UsageError(precision_error(self.precision))
        if self.tp_plan is not None and self.tp is None:
            raise UsageError("tp_plan says how layers are cut, and this plan does not say over which axis: tp=…")

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in given.items() if value not in (None, False))})"

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which batches are cut."""
        return tuple(axis for axis in (self.ddp, self.fsdp) if axis is not None)

    @property
    def kind(self) -> str:
        """The name of what it does with parameters: "pp", "fsdp", "ddp" or "tp"."""
        return next(kind for kind in ("pp", "fsdp", "ddp", "tp") if getattr(self, kind) is not None)

    @property
    def compile_backend(self) -> str | None:
        """The backend of torch.compile; None: nothing is compiled."""
        return self.compile if isinstance(self.compile, str) else "inductor" if self.compile else None

    @property
    def checkpoint_interval(self) -> int | None:
        """2 if every second block is checkpointed; None: no block is."""
        found = None if self.ac is None else _EVERY.fullmatch(self.ac)
        return None if found is None else int(found[1] or 1)

    def check_axes(self, axes: Mapping[str, int]) -> None:
        """Check that a mesh with these axes has those of the plan, in an order in which they can be nested.

        Raises:
            UsageError: it has not.
        """
        used = [axis for axis in (self.ddp, self.fsdp, self.tp) if axis is not None]
        has = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        for axis in (*used, *([] if self.pp is None else [self.pp])):
            if axis not in axes:
                raise UsageError(f"{self}: this mesh has no axis {axis!r}; it has {has}")
        if [axis for axis in axes if axis in used] != used:
            raise UsageError(
                f"{self}: the axes of ddp, fsdp and tp must come in this order in the mesh, which has {has}; start "
                f"it with the axes {', '.join(used)}"
            )

    def describe(self, axes: Mapping[str, int]) -> str:
        """Return the plan in one line: `fsdp over dp=2, tp over tp=2, ac every block`."""
        data = "hsdp" if self.ddp is not None and self.fsdp is not None else "fsdp" if self.fsdp is not None else "ddp"
        parts = []
        if self.batch_axes:
            parts.append(f"{data} over {' x '.join(f'{axis}={axes[axis]}' for axis in self.batch_axes)}")
        if self.tp is not None:
            parts.append(f"tp over {self.tp}={axes[self.tp]}")
        if self.pp is not None:
            number = f" in {self.microbatches} microbatches" if self.microbatches else ""
            parts.append(f"pp over {self.pp}={axes[self.pp]}{number}")
        return ", ".join([*parts, *([f"ac {self.ac}"] if self.ac else []), *(["compiled"] if self.compile else [])])


def plan_named(name: str, axes: Mapping[str, int], axis: str | None) -> Plan:
    """Return the plan that a strategy's name stands for, on a mesh with these axes.

    Args:
        axis: the axis over which batches are cut, of "tp" the one over which layers are, of "pp" the one of the stages;
            None: what the names of the axes, or their number, say.

    Raises:
        UsageError: it takes other axes than these.
    """
    has = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    if name == "hsdp":
        if axis is not None or len(axes) != 2:
            raise UsageError(
                f"hsdp is over two axes, whole copies over the first of them, and this mesh has {has}; name them: "
                "strategy=meshbook.Plan(ddp=…, fsdp=…)"
            )
        outer, inner = axes
        return Plan(ddp=outer, fsdp=inner)
    if name in ("tp", "pp"):
        axis = axis or _axis_called(
            name, axes, "over which layers are cut" if name == "tp" else "whose ranks are stages"
        )
        return Plan(tp=axis) if name == "tp" else Plan(pp=axis)
    if name == "fsdp+tp":
        others = [other for other in axes if other != "tp"]
        if "tp" not in axes or (axis is None and len(others) != 1 and "dp" not in axes):
            raise UsageError(f"this mesh has the axes {has}; name them: strategy=meshbook.Plan(fsdp=…, tp=…)")
        return Plan(fsdp=axis or ("dp" if "dp" in axes else others[0]), tp="tp")
    axis = batch_axis(axes) if axis is None else axis
    return Plan(fsdp=axis) if name == "fsdp" else Plan(ddp=axis)


def _axis_called(name: str, axes: Mapping[str, int], what: str) -> str:
    if len(axes) > 1 and name not in axes:
        has = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise UsageError(f"this mesh has the axes {has}; say {what} with axis=…")
    return name if name in axes else next(iter(axes))


def batch_axis(axes: Mapping[str, Any]) -> str:
    """Return the axis over which batches are cut where nobody has said which.

    Raises:
        UsageError: there are several, and none is called dp.
    """
    if len(axes) == 1:
        return next(iter(axes))
    if "dp" in axes:
        return "dp"
    raise UsageError(f"this mesh has the axes {', '.join(axes)}; say over which batches are cut with axis=…")


def precision_error(precision: Any) -> str:
    return f"there is no precision {precision!r}; known: bf16, fp32, and fp16 (with torch.amp.GradScaler)"
