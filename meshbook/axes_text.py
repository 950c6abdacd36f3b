"""Axes and selections of ranks as they are typed: `dp=2,tp=2`, `0,2-3`, `dp=0,tp=0-1`."""

from __future__ import annotations

import re

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


def parse_selection(text: str, axes: MeshAxes) -> Ranks:
    """Return the ranks of a selection, sorted: `0,2-3`, `dp=0`, `dp=0,tp=0-1`, `all`.

    A list after an axis belongs to that axis: `dp=0,2-3` selects three coordinates along dp. Spaces may separate
    words too.

    Raises:
        MeshShapeError: the text is not a selection, or it is outside this mesh.
    """
    if text.strip() in ("", "all", "*"):
        return tuple(sorted(axes.ranks))
    if "=" not in text:
        return axes.check_ranks(_parse_ranks(",".join(_split_words(text)), axes))
    spans: dict[str, list[str]] = {}
    axis = ""
    for word in _split_words(text):
        name, equals, span = word.partition("=")
        if equals:
            axis, word = name.strip(), span
            axes.size_of(axis)
            if axis in spans:
                raise MeshShapeError(f"axis {axis} is chosen twice in {text!r}; write {axis}=0,1 for two places")
        elif not axis:
            raise MeshShapeError(f"{text!r} mixes ranks and axes; write 0,2-3 for ranks or dp=0 for an axis")
        spans.setdefault(axis, []).append(word.strip())
    chosen = {
        axis: _parse_coordinates(",".join(words), axes, axis)
        for axis, words in spans.items()
        if words not in (["all"], ["*"])
    }
    return tuple(sorted(axes.ranks_at(chosen)))


def _parse_ranks(text: str, axes: MeshAxes) -> Ranks:
    for number in map(int, _NUMBER.findall(text)):
        if number > max(axes.ranks):  # rejected before a range is expanded
            axes.check_ranks((number,))
    try:
        return parse_ranks(text)
    except ValueError as error:
        raise MeshShapeError(str(error)) from error


def _parse_coordinates(text: str, axes: MeshAxes, axis: str) -> Ranks:
    for number in map(int, _NUMBER.findall(text)):
        if number > axes.size_of(axis):  # rejected before a range is expanded
            axes.ranks_at({axis: (number,)})
    try:
        return parse_ranks(text)
    except ValueError as error:
        raise MeshShapeError(
            f"{axis}={text} does not name places on an axis; write it like {axis}=0 or {axis}=0,2-3"
        ) from error


def _split_words(text: str) -> list[str]:
    """Split at commas or spaces; spaces around `=` do not split."""
    return re.sub(r"\s*=\s*", "=", text).replace(",", " ").split()
