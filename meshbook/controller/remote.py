"""A handle to an object on the ranks: it displays what they hold, and operations on it run there.

Its repr queries the ranks each time, also while a cell runs. Where one value is needed (`float(x)`, `if x:`, `len(x)`),
all ranks must agree on it; if they do not, the error shows what each holds.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshbook.controller import extensions, running
from meshbook.controller.agreed import AgreedOperators
from meshbook.controller.results import RankValues, mime_bundle
from meshbook.controller.session import Session
from meshbook.errors import CellError, CellInterrupted, MeshNameError, TransferError, ValuesDiffer
from meshbook.fold import rendering
from meshbook.ids import Ranks, name_ranks
from meshbook.marimo.page import marimo_mime
from meshbook.rank.previews.expressions import Expression, NameRef, ResultRef
from meshbook.wire import messages
from meshbook.wire.messages import Outcome, OutcomeGroup, Preview, TensorMeta, Value

# Attributes that libraries probe for on any object; a handle must not appear to have them.
PROBED_PREFIXES = ("_repr_", "_ipython_", "__")

# Attributes by which other libraries read a remote object.
_READS = ("get", "pull", "result", "value", "values")


class PreviewDisplay:
    """Displays one object per rank by its previews: as text, in a notebook, in marimo."""

    __slots__ = ()

    def _meshbook_previews(self) -> tuple[tuple[OutcomeGroup, ...], Ranks]:
        """Return the previews, and all ranks that could have one."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return rendering.render_values(*self._meshbook_previews(), colour=False)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return mime_bundle(*self._meshbook_previews())

    def _mime_(self) -> tuple[str, Any]:
        return marimo_mime(self._repr_mimebundle_())


class RemoteHandle(PreviewDisplay, AgreedOperators):
    """A handle to one object per rank or actor; all must agree on it where a single value is needed."""

    __slots__ = ("__weakref__",)

    def __index__(self) -> int:
        return operator.index(self._meshbook_same())

    def __len__(self) -> int:
        return int(self._meshbook_agreed("len"))

    def __contains__(self, thing: Any) -> bool:
        return bool(self._meshbook_agreed("contains", thing))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        try:
            value = self._meshbook_same()
        except ValuesDiffer as error:  # a ValueError, in whose place Matplotlib raises one of its own
            raise TransferError(str(error)) from None
        if isinstance(value, Mapping):
            raise TransferError(f"the ranks hold a {type(value).__name__} here, which is no array; pull it first")
        return numpy.asarray(value, dtype=dtype)

    def __hash__(self) -> int:
        return id(self)


class RemoteValue(RemoteHandle):
    """A value on every rank of a mesh, named by a path from one of the ranks' names: `x`, `model.fc`, `x.shape[0]`."""

    _meshbook_path: Expression
    _meshbook_ranks: Ranks
    _meshbook_session: Session
    _meshbook_values: RankValues | None

    __slots__ = ("_meshbook_path", "_meshbook_ranks", "_meshbook_session", "_meshbook_values")

    def __init__(self, session: Session, path: Expression, ranks: Ranks, *, values: RankValues | None = None) -> None:
        object.__setattr__(self, "_meshbook_session", session)
        object.__setattr__(self, "_meshbook_path", path)
        object.__setattr__(self, "_meshbook_ranks", ranks)
        # the values of a ResultRef; keeps the object alive on the ranks
        object.__setattr__(self, "_meshbook_values", values)

    # ---- attributes, items, calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PROBED_PREFIXES):
            raise AttributeError(name)
        path = self._meshbook_path.attr(name)
        if not path.is_lookup_only():
            with _raising(AttributeError):
                return _evaluate(self, path)
        replies = [
            answer for answer in peek(self._meshbook_session, (str(path),), self._meshbook_ranks).values() if answer
        ]
        if replies and all(answer.get(str(path)) is None for answer in replies):
            hint = f"; mesh.pull({self._meshbook_path}) brings the ranks' values" if name in _READS else ""
            raise AttributeError(
                f"{self._meshbook_path} has no attribute {name!r} on {name_ranks(self._meshbook_ranks)}{hint}"
            )
        return RemoteValue(self._meshbook_session, path, self._meshbook_ranks)

    def __setattr__(self, name: str, value: Any) -> None:
        _evaluate(self, self._meshbook_path.attr("__setattr__").call((name, value)))

    def __getitem__(self, key: Any) -> RemoteValue:
        return _evaluate(self, self._meshbook_path.item(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        _evaluate(self, self._meshbook_path.attr("__setitem__").call((key, value)))

    def __call__(self, *args: Any, **kwargs: Any) -> RemoteValue:
        return _evaluate(self, self._meshbook_path.call(args, kwargs))

    def __dir__(self) -> list[str]:
        return list_attributes(self)

    def __len__(self) -> int:
        with _raising(TypeError):
            return super().__len__()

    def __iter__(self) -> Iterator[RemoteValue]:
        return (self[index] for index in range(len(self)))

    def _meshbook_same(self) -> Any:
        return pull(self).same()

    def _meshbook_step(self, op: str, operands: tuple[Any, ...], reflected: bool) -> RemoteValue:
        path = self._meshbook_path
        return _evaluate(self, path.binary(op, *operands, reflected=reflected) if operands else path.unary(op))

    def _meshbook_agreed(self, op: str, *operands: Any, reflected: bool = False) -> Any:
        values = self._meshbook_step(op, operands, reflected)._meshbook_values
        assert values is not None  # `_evaluate` sets them
        return values.same()

    def _meshbook_operate(self, op: str, *operands: Any, reflected: bool = False) -> Any:
        """Return a handle to the result."""
        if any(getattr(type(operand), "_meshbook_is_tensor", False) for operand in operands):
            return NotImplemented  # torch handles the operation, so that autograd records it
        return self._meshbook_step(op, operands, reflected)

    def __copy__(self) -> RemoteValue:
        return self._meshbook_step("copy", (), False)

    def __round__(self, digits: int | None = None) -> RemoteValue:
        return _evaluate(self, self._meshbook_path.attr("__round__").call(() if digits is None else (digits,)))

    def _meshbook_previews(self) -> tuple[tuple[OutcomeGroup, ...], Ranks]:
        return fetch_previews(self), self._meshbook_ranks

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Treat a handle to a tensor as a remote tensor in torch functions: `torch.relu(w)`, `x @ w`."""
        return extensions.find("with_tensors")(func, args, kwargs or {})

    def __reduce__(self) -> Any:
        raise TransferError(
            f"{self._meshbook_path} lives on the ranks of {self._meshbook_session.name!r} and cannot be pickled or "
            "copied here; pull it first (mesh.pull(…)), or pass it to mesh.execute, where it arrives as the rank's own "
            "object"
        )

    def _meshbook_key(self, session: Session) -> str:
        """Return the key of this object for the ranks of `session`, used when pickling arguments."""
        if session is not self._meshbook_session:
            raise TransferError(
                f"{self._meshbook_path} lives on the mesh {self._meshbook_session.name!r}, not on {session.name!r}; "
                "pull it and push the values"
            )
        if self._meshbook_path.steps:
            result = _evaluate(self, self._meshbook_path)
            object.__setattr__(self, "_meshbook_values", result._meshbook_values)
            object.__setattr__(self, "_meshbook_path", result._meshbook_path)
        root = self._meshbook_path.root
        assert isinstance(root, NameRef | ResultRef)
        return root.key


# ---------------------------------------------------------------------------------------------------------------------
# Operations on handles. Functions, not methods: a method's name would hide the remote object's own attribute.


def handle_by_name(session: Session, name: str, ranks: Ranks) -> RemoteValue:
    """Return a handle to a name; whether the ranks have it is not asked."""
    return RemoteValue(session, Expression(NameRef(name)), ranks)


def name_tensor_meta(session: Session, name: str, ranks: Ranks) -> TensorMeta | None:
    """Return a name's metadata if it is a tensor of one shape, dtype and placement on all ranks; else None.

    Raises:
        MeshNameError: no rank has it.
    """
    replies = [reply for reply in peek(session, (name,), ranks).values() if reply is not None]
    if replies and all(reply.get(name) is None for reply in replies):
        raise MeshNameError(
            f"no rank of {session.name!r} has a name {name!r}; names there: {_format_names(session.status().names)}"
        )
    return common_tensor_meta([reply.get(name) for reply in replies], len(ranks))


def handle_tensor_meta(value: RemoteValue) -> TensorMeta | None:
    """Return a handle's metadata if it is a tensor of one shape, dtype and placement on all of its ranks; else None."""
    path = value._meshbook_path
    if not path.steps and isinstance(path.root, NameRef):
        return name_tensor_meta(value._meshbook_session, path.root.name, value._meshbook_ranks)
    previews = [
        part.outcome.value.preview
        for part in fetch_previews(value)
        for _ in part.ranks
        if part.outcome.value is not None
    ]
    return common_tensor_meta([msgspec.to_builtins(preview) for preview in previews], len(value._meshbook_ranks))


def common_tensor_meta(previews: Sequence[dict[str, Any] | None], num_ranks: int) -> TensorMeta | None:
    """Return the metadata shared by previews (plain data) of one tensor on `num_ranks` ranks; else None."""
    metas = [preview.get("tensor") for preview in previews if preview is not None]
    if len(metas) != num_ranks or any(meta is None for meta in metas):
        return None
    found = [msgspec.convert(meta, TensorMeta) for meta in metas]
    kinds = {(meta.shape, meta.dtype, meta.placements, meta.stride, meta.requires_grad) for meta in found}
    return found[0] if len(kinds) == 1 and found[0].stride is not None else None


def result_handle(session: Session, call: str, ranks: Ranks, values: RankValues, expression: str) -> RemoteValue:
    """Return a handle to the result of a call; the ranks retain the result while the handle lives."""
    return RemoteValue(session, Expression(ResultRef(call, expression)), ranks, values=values)


def pull(value: RemoteValue, ranks: Ranks | None = None) -> RankValues:
    """Return the objects themselves, from every rank (or from `ranks`)."""
    session = value._meshbook_session
    chosen = session.living(value._meshbook_ranks) if ranks is None else ranks
    return session.evaluate(value._meshbook_path, chosen, retain=False)


def pull_by_name(session: Session, name: str, chosen: Ranks, all_ranks: Ranks) -> RankValues:
    """Return the objects of a name, which may have attributes ("model.weight"), from the chosen ranks.

    Whether there is such a name is asked after the ranks have failed, not before: a cell ahead may be about to bind it.

    Raises:
        MeshNameError: none of all ranks has that name.
    """
    name, *attributes = name.split(".")
    path = Expression(NameRef(name))
    for attribute in attributes:
        path = path.attr(attribute)
    try:
        return session.evaluate(path, chosen, retain=False)
    except CellInterrupted:  # the cell that binds the name may still be at it
        raise
    except CellError as error:
        failed = error
    name_tensor_meta(session, name, all_ranks)
    raise failed


def fetch_previews(value: RemoteValue) -> tuple[OutcomeGroup, ...]:
    """Return previews of each rank's object. Does not wait for a running cell if the path is only a lookup."""
    session, path, ranks = value._meshbook_session, value._meshbook_path, value._meshbook_ranks
    if value._meshbook_values is not None and not path.steps:
        return value._meshbook_values.parts
    if not path.is_lookup_only():
        return session.evaluate(path, session.living(ranks)).parts
    previews = {}
    for rank, reply in peek(session, (str(path),), ranks).items():
        raw = None if reply is None else reply.get(str(path))
        text = "(no answer yet; %mesh why tells why)" if reply is None else f"({path} is not defined here)"
        previews[rank] = Preview(kind="none", type="", text=text) if raw is None else msgspec.convert(raw, Preview)
    return group_previews(previews)


def group_previews(previews: Mapping[int, Preview]) -> tuple[OutcomeGroup, ...]:
    """Return previews by rank as outcomes; equal ones are one, with its ranks."""
    ranks_by_preview: dict[bytes, list[int]] = {}
    for rank in sorted(previews):
        ranks_by_preview.setdefault(msgspec.msgpack.encode(previews[rank]), []).append(rank)
    return tuple(
        OutcomeGroup(tuple(ranks), Outcome(status="ok", value=Value(previews[ranks[0]])))
        for ranks in ranks_by_preview.values()
    )


def peek(session: Session, names: tuple[str, ...], ranks: Ranks) -> dict[int, dict[str, Any] | None]:
    """Query the ranks' service threads for names: rank -> {name: preview as plain data, or None}.

    The entry is None for a rank that did not reply.

    Raises:
        RankLost: none of the ranks is left.
    """
    living = running.require_living(session, ranks, None)
    command = messages.PreviewNames(call=session.connection.next_call_id(), ranks=living, names=names)
    return {rank: part.outcome.reply for part in session.query(command) for rank in part.ranks}


def list_attributes(value: RemoteValue) -> list[str]:
    """Return attribute names, as the first living rank completes them."""
    session = value._meshbook_session
    if not value._meshbook_path.is_lookup_only():
        return list(
            session.evaluate(
                value._meshbook_path.attr("__dir__").call(), session.living(value._meshbook_ranks)[:1]
            ).same()
        )
    code = f"{value._meshbook_path}."
    living = session.living(value._meshbook_ranks)[:1]
    command = messages.Complete(call=session.connection.next_call_id(), ranks=living, code=code, cursor=len(code))
    for part in session.query(command):
        matches = (part.outcome.reply or {}).get("matches", ())
        return [name for match in matches if (name := match.rpartition(".")[2]).isidentifier()]
    return []


def _evaluate(value: RemoteValue, path: Expression) -> RemoteValue:
    """Evaluate a path now; the result stays on the ranks, under a handle."""
    session = value._meshbook_session
    ranks = session.living(value._meshbook_ranks)
    command = messages.Evaluate(
        call=session.connection.next_call_id(),
        ranks=ranks,
        expression=session.transfer.dump(path, ranks),
        inline_limit=0,
        always_retain=True,
    )
    return result_handle(session, command.call, ranks, session.run_for_values(command, str(path)), str(path))


@contextlib.contextmanager
def _raising(kind: type[Exception]) -> Iterator[None]:
    """Raise an exception that all ranks have raised as one of that class, by which hasattr() and iter() go."""
    try:
        yield
    except CellError as error:
        if error.succeeded or {failure.ename for failure in error.failures} != {kind.__name__}:
            raise
        raise kind(error.failures[0].evalue) from None


def _format_names(names: tuple[str, ...]) -> str:
    """Return names for a sentence, the newest ones if there are many."""
    if not names:
        return "none yet"
    return ", ".join(names[-20:]) + (f" and {len(names) - 20} older ones" if len(names) > 20 else "")
