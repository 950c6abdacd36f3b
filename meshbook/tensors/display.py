"""Draws a tensor on a mesh: which rank holds which part, in colours. Pure except `stats`, which queries the ranks.

A drawing needs shape, placements and the mesh, never the data. Ranks that hold the same part share a colour.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshbook.controller.tables import format_bytes
from meshbook.ids import format_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors.shards import is_sharded, spans_of
from meshbook.rank.tensors.summary import summarize

# Distinct for most colour-blind readers, light enough for dark text on them (after Okabe and Ito), then shades.
COLOURS = ("#8ecae6", "#ffb703", "#95d5b2", "#f4a6c0", "#c9b6e4", "#f0e68c", "#d9c2a7", "#b8c0cc")

_WIDTH, _HEIGHT = 220, 120  # of a tensor's drawing, in pixels
_MAX_BOXES_DRAWN = 64  # of a larger mesh only the first ranks are drawn


@dataclass(frozen=True)
class ShardBox:
    """A box of the tensor and the ranks that hold it.

    Attributes:
        spans: start and stop along each dim.
        colour: index into COLOURS, which repeat.
    """

    spans: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    colour: int

    def __str__(self) -> str:
        inside = ", ".join(f"{start}:{stop}" for start, stop in self.spans)
        return f"[{inside}]"


def shard_boxes(shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes) -> list[ShardBox]:
    """Return the distinct boxes of a tensor, in the order of the first rank that holds each."""
    ranks_by_box: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in axes.ranks:
        ranks_by_box.setdefault(spans_of(shape, placements, axes, rank), []).append(rank)
    return [
        ShardBox(spans, tuple(ranks), index % len(COLOURS)) for index, (spans, ranks) in enumerate(ranks_by_box.items())
    ]


def title_of(shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Any] | None, axes: MeshAxes) -> str:
    """Return one line: shape, dtype, the placement over each axis, and the size in bytes."""
    size = math.prod(shape, start=dtype.itemsize)
    if placements is None:
        layout = f"one on each of {axes.size} ranks"
    else:
        layout = ", ".join(
            f"{name}={axes.size_of(name)}: {_placement_text(placement)}"
            for name, placement in zip(axes.names, placements, strict=True)
        )
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} · {layout} · {format_bytes(size)}"


def html_of(shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Any] | None, axes: MeshAxes) -> str:
    """Return the drawing: the tensor split into coloured boxes, beside it the mesh in the same colours."""
    title = html.escape(title_of(shape, dtype, placements, axes))
    if placements is None:
        boxes = [ShardBox((), (rank,), index % len(COLOURS)) for index, rank in enumerate(axes.ranks)]
        drawing = ""
    else:
        boxes = shard_boxes(shape, placements, axes)
        drawing = _tensor_svg(shape, placements, boxes[:_MAX_BOXES_DRAWN])
    return (
        '<div class="meshbook-tensor" style="font-family:sans-serif;font-size:12px">'
        f'<div style="margin-bottom:4px">{title}</div>'
        f'<div style="display:flex;gap:24px;align-items:center">{drawing}{_mesh_svg(axes, boxes)}</div></div>'
    )


def _tensor_svg(shape: Sequence[int], placements: Sequence[Any], boxes: Sequence[ShardBox]) -> str:
    down, across = _drawn_dims(shape, placements)
    rows = shape[down] if down is not None else 1
    columns = shape[across] if across is not None else 1
    drawn = []
    for box in boxes:
        top, bottom = box.spans[down] if down is not None else (0, 1)
        left, right = box.spans[across] if across is not None else (0, 1)
        if bottom <= top or right <= left:
            continue  # a rank with an empty shard
        x, width = _WIDTH * left / max(columns, 1), _WIDTH * (right - left) / max(columns, 1)
        y, height = _HEIGHT * top / max(rows, 1), _HEIGHT * (bottom - top) / max(rows, 1)
        label = f"{'+' if _is_partial(placements) else ''}{format_ranks(box.ranks)}"
        drawn.append(
            f"<g><title>rank {html.escape(format_ranks(box.ranks))}: {html.escape(str(box))}</title>"
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{COLOURS[box.colour]}" '
            f'stroke="#444"{_stroke_style(placements)}/>'
            f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" font-size="11" '
            f'fill="#222">{html.escape(label)}</text></g>'
        )
    names = " x ".join(f"dim {dim} ({shape[dim]})" for dim in (down, across) if dim is not None)
    return (
        f'<svg role="img" aria-label="which ranks hold which part" width="{_WIDTH + 2}" height="{_HEIGHT + 18}" '
        f'viewBox="-1 -1 {_WIDTH + 2} {_HEIGHT + 18}">{"".join(drawn)}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 13}" text-anchor="middle" font-size="10" fill="currentColor">'
        f"{names or 'one number'}</text></svg>"
    )


def _mesh_svg(axes: MeshAxes, boxes: Sequence[ShardBox]) -> str:
    """Draw the mesh: its last axis across, all others down, each rank in the colour of its box."""
    colour = {rank: COLOURS[box.colour] for box in boxes for rank in box.ranks}
    columns = axes.shape[-1]
    ranks = list(axes.ranks)[: _MAX_BOXES_DRAWN * 4]
    cell = 26
    drawn = []
    for position, rank in enumerate(ranks):
        x, y = position % columns * cell, position // columns * cell
        drawn.append(
            f'<rect x="{x}" y="{y}" width="{cell - 4}" height="{cell - 4}" rx="4" fill="{colour.get(rank, "#eee")}" '
            f'stroke="#444"/><text x="{x + cell / 2 - 2}" y="{y + cell / 2 + 2}" text-anchor="middle" font-size="10" '
            f'fill="#222">{rank}</text>'
        )
    width, height = columns * cell, -(-len(ranks) // columns) * cell + 14
    names = html.escape(" x ".join(f"{name}={size}" for name, size in axes.axes.items()))
    return (
        f'<svg role="img" aria-label="the mesh" width="{max(width, 80)}" height="{height}">{"".join(drawn)}'
        f'<text x="0" y="{height - 3}" font-size="10" fill="currentColor">{names}</text></svg>'
    )


def _drawn_dims(shape: Sequence[int], placements: Sequence[Any]) -> tuple[int | None, int | None]:
    """Return the two dims to draw, down and across: sharded ones first, then others."""
    if not shape:
        return None, None
    cut = list(dict.fromkeys(placement.dim for placement in placements if is_sharded(placement)))
    others = [dim for dim in (*range(len(shape) - 2, len(shape)), *range(len(shape))) if dim >= 0 and dim not in cut]
    chosen = sorted(dict.fromkeys([*cut, *others]), key=lambda dim: dim not in cut)[:2]
    first, *remaining = sorted(chosen)
    return first, remaining[0] if remaining else None


def _is_partial(placements: Sequence[Any]) -> bool:
    return any(placement.is_partial() for placement in placements)


def _stroke_style(placements: Sequence[Any]) -> str:
    return ' stroke-dasharray="4 3"' if _is_partial(placements) else ""


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "whole"
    if placement.is_partial():
        return f"parts of a {placement.reduce_op}"
    return f"dim {placement.dim} cut"


# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorStats:
    """Statistics of a tensor; min, max and mean are of the elements that are not NaN."""

    min: float
    max: float
    mean: float
    num_nan: int
    num_elements: int

    def __str__(self) -> str:
        return (
            f"min {self.min:.6g}, max {self.max:.6g}, mean {self.mean:.6g}, "
            f"{self.num_nan:,} NaN of {self.num_elements:,} elements"
        )


def stats(tensor: Any) -> TensorStats:
    """Compute statistics on the ranks; each sends five numbers. Blocks."""
    engine, spec = tensor.engine, tensor._spec
    session = engine.session
    command = session.call_command(summarize, (tensor.detach(),), {}, engine.ranks, label="stats")
    finished = session.foreground.run(command)
    session.raise_for_status(finished, engine.ranks, label="stats")
    summaries = session.rank_values(finished.outcomes)
    if spec.placements is None:
        ranks = engine.ranks
    else:
        ranks = tuple(box.ranks[0] for box in shard_boxes(spec.shape, spec.placements, engine.axes))
    count, num_nan, total = (sum(summaries[rank][at] for rank in ranks) for at in range(3))
    num_valid = count - num_nan
    return TensorStats(
        min=min(summaries[rank][3] for rank in ranks),
        max=max(summaries[rank][4] for rank in ranks),
        mean=total / num_valid if num_valid else float("nan"),
        num_nan=num_nan,
        num_elements=count,
    )
