"""Meshes and ranks as they are typed: the axes `dp=2,tp=2`, the ranks `0,2-3`, the places `dp=0`.

Every error is a `MeshShapeError` whose message shows what to type next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshbook.errors import MeshShapeError
from meshbook.ids import Ranks, parse_ranks
from meshbook.mesh_axes import MeshAxes

_NUMBER = re.compile(r"\d+")


def parse_axes(text: str) -> MeshAxes:
    """Parse `dp=2,tp=2`, or a bare number of ranks, as typed after `--axes` and `-n`.

    Raises:
        MeshShapeError: the text is neither.
    """
    words = _split_words(text)
    if len(words) == 1 and words[0].isdecimal():
        return MeshAxes.of(int(words[0]))
    axes: dict[str, int] = {}
    for word in words:
        name, equals, size = (part.strip() for part in word.partition("="))
        if not equals or not name or not size.isdecimal():
            raise MeshShapeError(f"{text!r} does not name the axes of a mesh; write them like dp=2,tp=2")
        if name in axes:
            raise MeshShapeError(f"axis {name} is there twice in {text!r}; give each its own name")
        axes[name] = int(size)
    if not axes:
        raise MeshShapeError("no axes are named; write them like dp=2,tp=2")
    return MeshAxes.of(axes)


def parse_selection(mesh: MeshAxes, text: str) -> Ranks:
    """Return the ranks of a selection, sorted: `0,2-3`, `dp=0`, `dp=0,tp=0-1`, `all`.

    A list after an axis belongs to that axis: `dp=0,2-3` selects three coordinates along dp. Spaces may separate
    words too.

    Raises:
        MeshShapeError: the text is not a selection, or it is outside this mesh.
    """
    if text.strip() in ("", "all", "*"):
        return tuple(sorted(mesh.ranks))
    if "=" not in text:
        return mesh.check_ranks(_parse_numbers(mesh, ",".join(_split_words(text)), max(mesh.ranks)))
    spans: dict[str, list[str]] = {}
    axis = ""
    for word in _split_words(text):
        name, equals, span = word.partition("=")
        if equals:
            axis, word = name.strip(), span
            mesh.axis_index(axis)
            if axis in spans:
                raise MeshShapeError(f"axis {axis} is chosen twice in {text!r}; write {axis}=0,1 for two places")
        elif not axis:
            raise MeshShapeError(f"{text!r} mixes ranks and axes; write 0,2-3 for ranks or dp=0 for an axis")
        spans.setdefault(axis, []).append(word.strip())
    chosen: list[Sequence[int]] = [range(size) for size in mesh.shape]
    for axis, span_words in spans.items():
        at = mesh.axis_index(axis)
        if span_words in (["all"], ["*"]):
            continue
        coordinates = _parse_numbers(mesh, ",".join(span_words), mesh.shape[at], axis)
        chosen[at] = [mesh.normalize_coordinate(axis, coordinate) for coordinate in coordinates]
    return tuple(sorted(mesh.submesh(chosen, range(len(mesh.shape))).ranks))


def _parse_numbers(mesh: MeshAxes, text: str, limit: int, axis: str = "") -> Ranks:
    """Parse `0,2-3` as numbers. Rejects numbers above `limit` before a range is expanded."""
    for number in map(int, _NUMBER.findall(text)):
        if number > limit:
            if axis:
                mesh.normalize_coordinate(axis, number)
            mesh.check_ranks((number,))
    try:
        return parse_ranks(text)
    except ValueError as error:
        if axis:
            raise MeshShapeError(
                f"{axis}={text} does not name places on an axis; write it like {axis}=0 or {axis}=0,2-3"
            ) from error
        raise MeshShapeError(str(error)) from error


def _split_words(text: str) -> list[str]:
    """Split at commas or spaces; spaces around `=` do not split."""
    return re.sub(r"\s*=\s*", "=", text).replace(",", " ").split()
