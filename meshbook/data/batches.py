"""Batches of any type as nested containers of arrays with rows along dim 0: what `mesh.feed` shards over an axis.

A batch is a torch tensor, a NumPy array, a table (Arrow table or record batch, Polars or pandas frame; it becomes a
dict of its columns), or tuples, lists, named tuples and dicts of them. Other objects in it go to every rank unchanged.
Tables are recognised by their type's module: none of these packages is imported here.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshbook.data.async_batches import AsyncBatches
from meshbook.errors import PlacementError, TransferError, UsageError
from meshbook.placement import shard_spans

_TORCH_DATASET = ("torch.utils.data.dataset", "Dataset")
_NUMERIC_KINDS = "biufc"  # NumPy dtype kinds that a tensor can hold: bool, ints, floats, complex


def iterate_batches(source: Any, batch_size: int | None) -> Iterator[Any]:
    """Iterate over the batches of an iterable, async or not; or over `batch_size` rows of one table, array or batch.

    Raises:
        UsageError: a single object without `batch_size`, or `batch_size` for a source that yields batches; a dataset,
            which yields samples.
    """
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size={batch_size}; a batch has at least one row")
    reader = _arrow_reader(source)
    if reader is not None:  # DuckDB: a query result, which is never in memory completely
        if batch_size is None:
            raise UsageError("a DuckDB result has no batches of its own; say how many rows: feed(result, batch_size=…)")
        return _rebatch(reader(batch_size), batch_size)
    if has_rows(source) or _is_table(source) or isinstance(source, Mapping):
        if batch_size is None:
            raise UsageError(f"a {type(source).__name__} is one batch; say how many rows to feed: batch_size=…")
        return _iterate_rows(normalize(source), batch_size)
    if any((base.__module__, base.__name__) == _TORCH_DATASET for base in type(source).__mro__):
        raise UsageError(
            f"a {type(source).__name__} gives one sample at a time; feed(torch.utils.data.DataLoader(dataset, "
            f"batch_size={batch_size or '…'}))"
        )
    if batch_size is not None:
        raise UsageError(f"a {type(source).__name__} comes in batches of its own; leave batch_size out")
    if isinstance(source, AsyncIterable):
        return AsyncBatches(source)
    if not isinstance(source, Iterable):
        raise UsageError(f"a {type(source).__name__} is neither batches nor a table; feed a DataLoader, a generator…")
    return iter(source)


def normalize(batch: Any) -> Any:
    """Return the batch with every table as a dict of columns; columns of fixed-size lists have two dims.

    Raises:
        TransferError: a column has a type that no tensor holds, or missing values; the message names it.
    """
    return map_leaves(batch, _normalize_leaf)


def _normalize_leaf(batch: Any) -> Any:
    if _is_table(batch):
        return {name: _column(name, column) for name, column in _columns(batch)}
    if _top_level_package(batch) in ("polars", "pandas") and hasattr(batch, "to_numpy"):  # a series
        return _array(str(getattr(batch, "name", None) or "the series"), batch.to_numpy())
    return batch


def materialize(batch: Any) -> Any:
    """Return `normalize(batch)`, also for a DuckDB result: all its rows. A list stays a sequence of its items."""
    reader = _arrow_reader(batch)
    if reader is not None:
        batch = reader().read_all()
    return batch if isinstance(batch, list) else normalize(batch)


def cut_lengths(batch: Any, dim: int) -> list[int]:
    """Return the length along `dim` of everything that is split: each array in a dict or tuple, or a sequence.

    Raises:
        UsageError: there is no such dim.
    """
    arrays = _arrays_to_cut(batch)
    if arrays is None:
        if not isinstance(batch, Sequence):
            raise UsageError(f"a {type(batch).__name__} without rows cannot be cut; mesh.push sends all of it to all")
        if dim != 0:
            raise UsageError(f"a {type(batch).__name__} has one dim and cannot be cut along dim {dim}")
        return [len(batch)]
    for array in arrays:
        if not -array.ndim <= dim < array.ndim:
            raise UsageError(f"an array of shape {tuple(array.shape)} has no dim {dim} to cut along")
    return [int(array.shape[dim]) for array in arrays]


def slice_batch(batch: Any, dim: int, spans: list[tuple[int, int]]) -> Any:
    """Return the batch with each of its arrays, in order, sliced to a span along `dim`."""
    if _arrays_to_cut(batch) is None:
        return batch[slice(*spans[0])]
    remaining = iter(spans)
    return map_leaves(
        batch,
        lambda leaf: leaf[(slice(None),) * (dim % leaf.ndim) + (slice(*next(remaining)),)] if has_rows(leaf) else leaf,
    )


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the nested batch with `change(leaf)` for everything that is not a container."""
    if isinstance(batch, Mapping):
        return {key: map_leaves(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_leaves(value, change) for value in batch)
    return change(batch)


def has_rows(leaf: Any) -> bool:
    """Whether it has rows to split: an array or a tensor of at least one dim."""
    return (
        _top_level_package(leaf) in ("torch", "numpy")
        and hasattr(leaf, "shape")
        and hasattr(leaf, "dtype")
        and leaf.ndim > 0
    )


def leaves(batch: Any) -> list[Any]:
    """Return the arrays of a nested batch that have rows, in order."""
    found: list[Any] = []
    map_leaves(batch, lambda leaf: found.append(leaf) if has_rows(leaf) else None)
    return found


def is_even(batch: Any, num_shards: int) -> bool:
    return all(len(leaf) % num_shards == 0 for leaf in leaves(batch))


def uneven_error(batch: Any, number: int, axis: str, num_shards: int, *, last: bool) -> PlacementError:
    """Return the error for batch `number`, with the calculation in its message."""
    rows = next(len(leaf) for leaf in leaves(batch) if len(leaf) % num_shards)
    sizes = " + ".join(str(stop - start) for start, stop in shard_spans(rows, num_shards))
    remedy = "drop_last=True leaves the last batch out when it is short" if last else "make its length divisible"
    return PlacementError(
        f"batch {number} has {rows} rows, and {rows} = {rows // num_shards} * {num_shards} + {rows % num_shards} "
        f"cannot be cut evenly over {axis}={num_shards}; {remedy}, and uneven=True cuts it as {sizes}"
    )


# ---------------------------------------------------------------------------------------------------------------------


def _arrays_to_cut(batch: Any) -> list[Any] | None:
    """Return the arrays of a batch that are split individually; None for a sequence, which is split by its items."""
    return None if isinstance(batch, list) else leaves(batch) or None


def _arrow_reader(source: Any) -> Callable[..., Any] | None:
    """Return the method that reads a DuckDB result in batches, or None for anything else."""
    found = getattr(source, "to_arrow_reader", None)
    if found is None and _top_level_package(source) in ("duckdb", "_duckdb"):
        found = getattr(source, "fetch_record_batch", None)
    return found


def _top_level_package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


def _is_table(thing: Any) -> bool:
    return type(thing).__name__ in ("Table", "RecordBatch", "DataFrame") and _top_level_package(thing) in (
        "pyarrow",
        "polars",
        "pandas",
    )


def _columns(table: Any) -> Iterator[tuple[str, Any]]:
    names = getattr(table, "column_names", None)  # Arrow
    if names is not None:
        return ((name, table.column(index)) for index, name in enumerate(names))
    return ((str(name), table[name]) for name in table.columns)


def _column(name: str, column: Any) -> Any:
    if _top_level_package(column) == "pyarrow":
        if hasattr(column, "combine_chunks"):
            column = column.combine_chunks()
        if column.null_count:
            raise TransferError(f"column {name!r} has {column.null_count} missing values; fill them first (fill_null)")
        if str(column.type).startswith("decimal"):  # the SQL type of 0.5
            column = column.cast("double")
        if hasattr(column.type, "list_size"):
            return _array(name, column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1))
        return _array(name, column.to_numpy(zero_copy_only=False))
    if _top_level_package(column) == "polars" and (missing := column.null_count()):
        raise TransferError(f"column {name!r} has {missing} missing values; fill them first (fill_null)")
    return _array(name, column.to_numpy())


def _array(name: str, array: Any) -> Any:
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise TransferError(
            f"column {name!r} holds {array.dtype} values, and a tensor holds numbers; encode it, or leave it "
            "out of the select"
        )
    return array if array.flags.writeable else array.view()


def _iterate_rows(table: Any, batch_size: int) -> Iterator[Any]:
    row_counts = {len(leaf) for leaf in leaves(table)}
    if len(row_counts) != 1:
        raise UsageError(f"rows of different number cannot be fed together: {', '.join(map(str, sorted(row_counts)))}")
    (length,) = row_counts
    for start in range(0, length, batch_size):

        def cut(leaf: Any, start: int = start) -> Any:
            return leaf[start : start + batch_size] if has_rows(leaf) else leaf

        yield map_leaves(table, cut)


def _rebatch(reader: Iterable[Any], batch_size: int) -> Iterator[Any]:
    """Yield batches of exactly `batch_size` rows from record batches of any size; the last may be shorter."""
    pending: list[Any] = []
    rows = 0
    for record_batch in reader:
        while len(record_batch):
            taken = record_batch.slice(0, batch_size - rows)
            record_batch = record_batch.slice(len(taken))
            pending.append(taken)
            rows += len(taken)
            if rows == batch_size:
                yield _concatenate(pending)
                pending, rows = [], 0
    if pending:
        yield _concatenate(pending)


def _concatenate(pieces: list[Any]) -> Any:
    """Return record batches as one dict of columns."""
    import numpy

    parts = [normalize(record_batch) for record_batch in pieces]
    if len(parts) == 1:
        return parts[0]
    return {name: numpy.concatenate([part[name] for part in parts]) for name in parts[0]}
