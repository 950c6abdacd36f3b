"""Which plan a module gets on this mesh: what the ranks count and measure is compared, and "auto" runs some steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from meshbook import clock
from meshbook.controller import remote as handles
from meshbook.controller.mesh import Mesh
from meshbook.errors import UsageError
from meshbook.rank.previews import expressions
from meshbook.rank.state.random_states import random_states, set_random_states
from meshbook.rank.tensors import footprints, mesh_speed
from meshbook.rank.tensors.cut_checks import copy_without_data
from meshbook.rank.tensors.footprints import Footprint, TensorShape
from meshbook.rank.tensors.mesh_speed import MeshSpeed
from meshbook.rank.tensors.strategies import PRECISIONS, Plan
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.creation import distribute
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.module_client import call_on_ranks
from meshbook.tensors.module_plan import size_text
from meshbook.tensors.plan_estimates import Estimate, estimate_plan, list_candidates

_MEASURED_STEPS = 3
_MOST_MEASURED = 3  # plans; a third is run where the first two show that the estimates favoured them


@dataclasses.dataclass
class PlanComparison:
    """What the plans for one module and sample cost on this mesh."""

    axes: Mapping[str, int]
    estimates: list[Estimate]
    footprints: dict[Any, Footprint]
    speeds: list[MeshSpeed]
    free_bytes: int

    def fitting(self) -> list[Estimate]:
        """Return the estimates of the plans that fit, fastest first. Blocks are computed again only if need be."""
        fitting = [one for one in self.estimates if one.error is None and one.memory_bytes <= self.free_bytes]
        plain = [one.plan for one in fitting if one.plan.ac is None]
        needed = [one for one in fitting if one.plan.ac is None or dataclasses.replace(one.plan, ac=None) not in plain]
        return sorted(needed, key=lambda one: one.step_s)

    def what_would_fit(self) -> str:
        """Return how many ranks would do: the first plan that fits when an axis is doubled, again and again."""
        for factor in (2, 4, 8, 16, 32, 64):
            for one in self.estimates:
                if one.error is not None or one.plan.fsdp is None:
                    continue
                axes = {**self.axes, one.plan.fsdp: self.axes[one.plan.fsdp] * factor}
                fewer_rows = _with_fewer_rows(self.footprints[_kind(one.plan, self.axes)], factor)
                larger = estimate_plan(one.plan, axes, fewer_rows, self.speeds, overlaps=False)
                if larger.memory_bytes <= self.free_bytes:
                    return f"{one.plan.describe(axes)} would take {size_text(larger.memory_bytes)}"
        return "no number of ranks up to 64 times as many would do: the sample's batch is too large for a rank"


def compare_plans(
    source: Any,
    mesh: Mesh,
    engine: TensorEngine,
    sample: Any,
    precision: str | None,
    given: Plan | None,
    free: int | None,
) -> PlanComparison:
    """Return what the candidates for this mesh, and the plan that was given, cost.

    Args:
        free: bytes that a rank may use; None: what is free on its device.

    Raises:
        CellError: the module raises an error for the sample.
    """
    axes = mesh.axes
    speeds = _speeds(mesh, engine)
    bare = copy_without_data(source) if isinstance(source, nn.Module) else source
    shapes = pytree.tree_map(_shape_of, call_arguments(sample))
    counted: dict[Any, Footprint | str] = {}

    def footprint_of(plan: Plan) -> Footprint | str:
        key = _kind(plan, axes)
        if key not in counted:
            num_shards, tp, _, casts = key
            args = (bare, shapes, num_shards, tp, plan.tp_plan, PRECISIONS[plan.precision], casts)
            counted[key] = call_on_ranks(engine, footprints.footprint_or_reason, *args, ranks=engine.ranks[:1])[0]
        return counted[key]

    simplest = list_candidates(axes, precision, has_blocks=False)
    first = given or (simplest[0] if simplest else None)
    if first is None:
        raise UsageError(f"there are no plans to compare on a mesh with {len(axes)} axes; give one: meshbook.Plan(…)")
    whole = footprint_of(first)
    has_blocks = isinstance(whole, Footprint) and bool(whole.blocks)
    plans = list_candidates(axes, precision, has_blocks=has_blocks)
    estimates = []
    for plan in plans if given is None or given in plans else [given, *plans]:
        found = footprint_of(plan) if plan.pp is None else "not estimated: what its stages take"
        if isinstance(found, str):
            estimates.append(Estimate(plan, error=found))
        else:
            estimates.append(estimate_plan(plan, axes, found, speeds, overlaps=speeds[0].device == "cuda"))
    known = {key: found for key, found in counted.items() if isinstance(found, Footprint)}
    return PlanComparison(
        axes, estimates, known, speeds, min(speed.free_bytes for speed in speeds) if free is None else free
    )


def _kind(plan: Plan, axes: Mapping[str, int]) -> tuple[int, int, Any, bool]:
    """Return what a plan's footprint depends on."""
    num_shards = 1
    for axis in plan.batch_axes:
        num_shards *= axes[axis]
    table = None if plan.tp_plan is None else tuple(sorted(plan.tp_plan.items()))
    return num_shards, 1 if plan.tp is None else axes[plan.tp], table, plan.fsdp is not None


def _with_fewer_rows(footprint: Footprint, factor: int) -> Footprint:
    blocks = [
        dataclasses.replace(
            block, activation_bytes=block.activation_bytes // factor, input_bytes=block.input_bytes // factor
        )
        for block in footprint.blocks
    ]
    return dataclasses.replace(
        footprint,
        blocks=blocks,
        activation_bytes=footprint.activation_bytes // factor,
        output_bytes=footprint.output_bytes // factor,
    )


def _speeds(mesh: Mesh, engine: TensorEngine) -> list[MeshSpeed]:
    """Return how fast the mesh is, as each rank measures it; once for a mesh with these axes."""
    session = engine.session
    known: dict[Any, list[MeshSpeed]] = session.extras.setdefault("speeds", {})
    key = tuple(mesh.axes.items())
    if key not in known:
        rank_mesh = handles.RemoteValue(session, expressions.Expression(expressions.NameRef("mesh")), engine.ranks)
        known[key] = call_on_ranks(engine, mesh_speed.measure_speed, rank_mesh)
    return known[key]


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the module is called with: a tuple has its arguments, a dict those by keyword, else it is the one."""
    if isinstance(sample, tuple):
        return sample, {}
    if isinstance(sample, dict):
        return (), sample
    return (sample,), {}


def _shape_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorShape(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))


# ---------------------------------------------------------------------------------------------------------------------
# strategy="auto"


def choose_and_build(comparison: PlanComparison, mesh: Mesh, sample: Any, build: Callable[[Plan], Any]) -> Any:
    """Build the module by the fastest plan that fits: the best two are run, and the table is corrected by that.

    Args:
        build: of a plan; gives a RemoteModule. It draws random numbers.

    Returns:
        the module; its parameters and buffers, and the generator here, are as if nothing had been run.

    Raises:
        UsageError: no plan fits.
    """
    if not comparison.fitting():
        raise UsageError(_nothing_fits(comparison))
    states = random_states()
    model = built = None
    for _ in range(_MOST_MEASURED):
        ahead = [one for one in comparison.fitting()[:2] if one.measured_s is None]
        if not ahead:
            break
        model = None  # its memory is free before the next one is built
        set_random_states(states)
        built = ahead[-1]
        model = build(built.plan)
        states_after = random_states()
        _measure(built, comparison, model, mesh, sample)
        set_random_states(states_after)
    chosen = min((one for one in comparison.fitting() if one.measured_s is not None), key=lambda one: one.step_s)
    if model is None or chosen is not built or model._client.mutated_buffers:
        model = None
        set_random_states(states)
        model = build(chosen.plan)
    return model


def _measure(estimate: Estimate, comparison: PlanComparison, model: Any, mesh: Mesh, sample: Any) -> None:
    """Run some steps without an optimizer, and correct the estimates of plans that have not been run."""
    expected = estimate.step_s
    times = []
    args, kwargs = pytree.tree_map(lambda leaf: _rows_on_mesh(leaf, mesh, estimate.plan), call_arguments(sample))
    for _ in range(1 + _MEASURED_STEPS):  # the first one sets up what later ones use
        began = clock.perf_counter()
        outputs = [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        loss = sum(output.float().mean() for output in outputs if output.is_floating_point())
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            torch.autograd.backward(loss)
        for parameter in model.parameters():
            parameter.grad = None
        if isinstance(loss, torch.Tensor):
            loss.item()
        times.append(clock.perf_counter() - began)
    estimate.measured_s = min(times[1:]) + estimate.seconds["optimizer"]
    # What is missing is mostly Python and small operations, which every plan has.
    for other in comparison.estimates:
        if other.measured_s is None and other.error is None:
            other.seconds["compute"] = max(0.0, other.seconds["compute"] + estimate.measured_s - expected)


def _rows_on_mesh(leaf: Any, mesh: Mesh, plan: Plan) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, MeshTensor):
        return leaf
    cut = plan.batch_axes if leaf.dim() else ()
    return distribute(leaf, mesh, [Shard(0) if axis in cut else Replicate() for axis in mesh.axes])


def _nothing_fits(comparison: PlanComparison) -> str:
    lines = []
    for one in sorted(comparison.estimates, key=lambda one: (one.error is not None, one.memory_bytes)):
        name = one.plan.describe(comparison.axes)
        if one.error is not None:
            lines.append(f"  {name}: {one.error}")
            continue
        missing = one.memory_bytes - comparison.free_bytes
        lines.append(f"  {name}: {size_text(one.memory_bytes)}, {size_text(missing)} are missing")
    is_bf16 = any(PRECISIONS[one.plan.precision] for one in comparison.estimates)
    also = "" if is_bf16 else '; or precision="bf16", which halves activations'
    return (
        f"no plan fits into the {size_text(comparison.free_bytes)} that a rank may use:\n"
        + "\n".join(lines)
        + f"\nWhat would: {comparison.what_would_fit()}{also}; or a smaller batch"
    )
