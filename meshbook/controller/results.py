"""Results of calls: values by rank, and the result of a cell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, NoReturn

from meshbook.controller.agreed import AgreedOperators, values_equal
from meshbook.errors import Failure, MeshShapeError, ValuesDiffer
from meshbook.fold import rendering
from meshbook.ids import format_ranks, name_ranks
from meshbook.marimo.page import marimo_mime
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages
from meshbook.wire.messages import OutcomeGroup, Value

# Fetches values that are still on the ranks: ranks and their reference -> {rank: object}.
Fetch = Callable[[tuple[int, ...], str], dict[int, Any]]


class RankValues(AgreedOperators):
    """One value per rank: `values[0]`, `values.items()`, `dict(values)`.

    It is no Mapping: iterating it would yield ranks, and `sum(values)` would add these up. `values.values()` yields the
    values, in rank order.

    Values that were too large to send along are fetched on first access, from their rank only; displaying them needs no
    fetch.

    `values[0]` is rank 0's value; `values.item(dp=0, tp=1)` the one at that point of the mesh; `values.same()` the one
    value that all ranks agree on, which operators take too: `float(values)`, `if values:`, `values > 1`.
    """

    def __init__(
        self,
        axes: MeshAxes,
        parts: Sequence[OutcomeGroup],
        load: Callable[[messages.Payload], Any],
        fetch: Fetch,
        release: Callable[[str], None] | None = None,
    ) -> None:
        self._axes = axes
        self.parts = tuple(part for part in parts if part.outcome.value is not None)
        self._ranks = tuple(sorted(rank for part in parts for rank in part.ranks))
        self._value_of: dict[int, Value] = {}
        for part in self.parts:
            for rank in part.ranks:
                assert part.outcome.value is not None
                self._value_of[rank] = part.outcome.value
        self._load, self._fetch = load, fetch
        self._loaded: dict[int, Any] = {}
        refs = {value.ref for value in self._value_of.values() if value.ref}
        if refs and release is not None:
            for ref in refs:
                weakref.finalize(self, release, ref).atexit = False

    # ---- by rank

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._value_of:
            have = format_ranks(self._value_of)
            if rank in self._axes.ranks:
                raise KeyError(f"rank {rank} has no value here; ranks with one: {have}")
            raise MeshShapeError(f"rank {rank} is not in this mesh of ranks {format_ranks(self._axes.ranks)}")
        if rank not in self._loaded:
            self._load_values((rank,))
        return self._loaded[rank]

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") else "; these are values by rank: values[0] is rank 0's, values.stack() all"
        raise AttributeError(f"'RankValues' object has no attribute {name!r}{hint}", name=name, obj=self)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "values by rank do not say whether their ranks or their values are meant here: values.values() are the "
            "values, values.keys() the ranks, values.items() both"
        )

    __contains__ = _refuse

    def __iter__(self) -> Iterator[NoReturn]:
        self._refuse()
        yield  # a generator: where iter() itself raises a TypeError, torch.tensor() says "not a sequence" instead

    def __len__(self) -> int:
        return len(self._value_of)

    def keys(self) -> KeysView[int]:
        return dict.fromkeys(sorted(self._value_of)).keys()

    def values(self) -> ValuesView[Any]:
        return self._by_rank().values()

    def items(self) -> ItemsView[int, Any]:
        return self._by_rank().items()

    def get(self, rank: int, default: Any = None) -> Any:
        return self[rank] if rank in self._value_of else default

    # ---- selecting and combining

    def item(self, **point: int) -> Any:
        """Return the value at a point of the mesh: `item(dp=0, tp=1)`; with one rank, `item()`.

        Raises:
            MeshShapeError: no such point, or it selects several ranks.
        """
        if not point and len(self._value_of) == 1:
            return self[min(self._value_of)]
        return self[self._axes.rank_at(**point)]

    def same(self) -> Any:
        """Return the value that all ranks agree on.

        Raises:
            ValuesDiffer: the values differ; the message shows them.
        """
        distinct = {value.preview.digest or value.preview.text for value in self._value_of.values()}
        known = all(value.preview.digest is not None or value.payload is not None for value in self._value_of.values())
        if not self._value_of:
            raise ValuesDiffer("no rank has a value here")
        if len(distinct) > 1 or (not known and not self._all_equal()):
            raise ValuesDiffer(
                f"{name_ranks(self.keys())} do not agree:\n{self}\n"
                "take one rank's: values[0], values.item(dp=0); of a name on the ranks mesh.pull(name)[0]"
            )
        return self[min(self._value_of)]

    def stack(self, dim: int = 0) -> Any:
        """Stack all ranks' tensors (or arrays, or numbers) along a new dim, in rank order.

        Returns:
            `torch.Tensor` of shape (ranks, …) for tensors and numbers; `numpy.ndarray` for arrays.

        Raises:
            ValueError, RuntimeError: from torch or numpy, if shapes differ.
        """
        every = [self[rank] for rank in self.keys()]
        if every and type(every[0]).__module__ == "numpy" and hasattr(every[0], "shape"):
            import numpy

            return numpy.stack(every, axis=dim)
        import torch

        return torch.stack([torch.as_tensor(value) for value in every], dim)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return an array with a row per rank, for NumPy, Matplotlib and `pandas.DataFrame`.

        Raises:
            TypeError: these ranks do not begin with 0, and rows of an array have no names; or the values are dicts.
        """
        import numpy

        ways = "values.stack() has a row per rank, pandas.DataFrame(dict(values)) a column with the rank's name"
        if tuple(self.keys()) != tuple(range(len(self))):
            raise TypeError(
                f"these are the values of {name_ranks(self.keys())}, whose rows would be numbered from 0; {ways}"
            )
        if any(isinstance(value, Mapping) for value in self.values()):
            raise TypeError("each rank's value is a dict; pandas.DataFrame(values.values()) has a row per rank")
        return numpy.asarray([numpy.asarray(value) for value in self.values()], dtype=dtype)

    def _meshbook_same(self) -> Any:
        return self.same()

    def _meshbook_each(self) -> Any:
        return self.values()

    def __bool__(self) -> bool:
        return len(self) > 0 and super().__bool__()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankValues | Mapping):
            return self._by_rank() == dict(other)
        return bool(self._meshbook_agreed("eq", other))

    __ne__ = object.__ne__
    __hash__ = None  # type: ignore[assignment]

    def _all_equal(self) -> bool:
        first, *others = self.values()
        return all(values_equal(first, other) for other in others)

    def _by_rank(self) -> dict[int, Any]:
        """Return all values, in rank order. Loads or fetches them at once."""
        ranks = tuple(self.keys())
        self._load_values(ranks)
        return {rank: self._loaded[rank] for rank in ranks}

    def _load_values(self, ranks: tuple[int, ...]) -> None:
        """Load or fetch these ranks' values."""
        by_ref: dict[str, list[int]] = {}
        for rank in ranks:
            if rank in self._loaded:
                continue
            value = self._value_of[rank]
            if value.payload is not None:
                self._loaded[rank] = self._load(value.payload)
            elif value.ref is not None:
                by_ref.setdefault(value.ref, []).append(rank)
        for ref, wanted in by_ref.items():
            self._loaded.update(self._fetch(tuple(wanted), ref))

    # ---- display

    def __repr__(self) -> str:
        return rendering.render_values(self.parts, self._ranks, colour=False)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return mime_bundle(self.parts, self._ranks)

    def _mime_(self) -> tuple[str, Any]:
        return marimo_mime(self._repr_mimebundle_())


def mime_bundle(parts: Sequence[OutcomeGroup], ranks: Sequence[int]) -> dict[str, Any]:
    """Return values by rank as a MIME bundle: always text, HTML if a value has it.

    One value that all ranks agree on contributes all of its MIME types.
    """
    bundle: dict[str, Any] = {"text/plain": rendering.render_values(parts, tuple(ranks))}
    if page := rendering.render_values_html(parts, tuple(ranks)):
        bundle["text/html"] = page
    if len(parts) == 1 and parts[0].outcome.value is not None:
        bundle.update(parts[0].outcome.value.preview.data)
    return bundle


@dataclass(frozen=True)
class CellResult:
    """The result of a cell, or a call, on the ranks.

    Attributes:
        values: of the last expression, by rank; empty if there was none.
        output: what the ranks printed, folded, as text.
        seconds: duration on the slowest rank.
        rank_seconds: duration by rank, on meshes of at most 64.
        bound: names that the cell bound on the ranks.
        unbound: names that the cell deleted on the ranks.
        errors: distinct failures; empty, because a cell that failed raises CellError, which has them.
    """

    values: RankValues
    output: str
    seconds: float
    rank_seconds: dict[int, float]
    bound: tuple[str, ...] = ()
    unbound: tuple[str, ...] = ()
    errors: tuple[Failure, ...] = ()

    def __repr__(self) -> str:
        return repr(self.values) if len(self.values) else f"<CellResult: no value, {self.seconds:.3f} s>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.values._repr_mimebundle_() if len(self.values) else {"text/plain": repr(self)}

    def _mime_(self) -> tuple[str, Any]:
        return marimo_mime(self._repr_mimebundle_())
