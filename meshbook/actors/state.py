"""Remote access to actors' attributes as if they were local: `trainers.state.model.fc.weight`.

Reads run concurrently with the actor's messages, so they never wait for a long endpoint; they show previews, and no
large data is sent before `pull`. Assignments and calls are ordinary messages of the actor, in order.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from meshbook.actors.mesh import ActorMesh
from meshbook.actors.proc_backends import mesh_slice_of
from meshbook.actors.runtime import object_paths
from meshbook.actors.runtime.context import current_rank
from meshbook.actors.runtime.faults import ActorError
from meshbook.actors.values import ValueMesh
from meshbook.controller import extensions
from meshbook.controller.agreed import values_equal
from meshbook.controller.remote import PROBED_PREFIXES, RemoteHandle, common_tensor_meta, group_previews
from meshbook.errors import TransferError, ValuesDiffer, message_of
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import OutcomeGroup, Preview

PathStep = tuple[str, Any]  # ("attr", name) or ("item", key)

PREVIEW_CHARS = 400
# Seconds for an actor's process to return a preview. It runs on a separate thread.
_PREVIEW_TIMEOUT_S = 20.0


class ActorState(RemoteHandle):
    """A handle to an object that each actor of a mesh holds: an attribute, or a path of attributes and items.

    Where a single value is needed (`float(x)`, `if x:`, `x == 3`, `x + 1`), all actors must agree on it. `pull(x)`
    returns the objects.
    """

    __slots__ = ("_meshbook_mesh", "_meshbook_steps")

    _meshbook_mesh: ActorMesh[Any]
    _meshbook_steps: tuple[PathStep, ...]

    def __init__(self, mesh: ActorMesh[Any], steps: tuple[PathStep, ...] = ()) -> None:
        object.__setattr__(self, "_meshbook_mesh", mesh)
        object.__setattr__(self, "_meshbook_steps", steps)

    # ---- access
    def __getattr__(self, name: str) -> Any:
        if name.startswith(PROBED_PREFIXES):
            raise AttributeError(name)
        found = ActorState(self._meshbook_mesh, (*self._meshbook_steps, ("attr", name)))
        results = list(_get_previews(found).values())
        if all(preview is None for preview, _ in results):
            raise AttributeError(_no_such_attribute(self, name, results[0][1]))
        return _as_remote_tensor(found, [preview for preview, _ in results if preview is not None])

    def __setattr__(self, name: str, value: Any) -> None:
        _run_in_order(self, _assign, "attr", name, value)

    def __getitem__(self, key: Any) -> Any:
        found = ActorState(self._meshbook_mesh, (*self._meshbook_steps, ("item", key)))
        results = list(_get_previews(found).values())
        if all(preview is None for preview, _ in results):
            raise LookupError(f"{_format_path(found)} is on no rank: {'; '.join(results[0][1])}")
        return _as_remote_tensor(found, [preview for preview, _ in results if preview is not None])

    def __setitem__(self, key: Any, value: Any) -> None:
        _run_in_order(self, _assign, "item", key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> ValueMesh[Any]:
        """Call the object in each actor, on the actor's thread, in message order; return a ValueMesh. Blocks."""
        return _run_in_order(self, _call, args, kwargs)

    def __dir__(self) -> list[str]:
        return sorted({name for _, names in _get_previews(self, names=True).values() for name in names})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._meshbook_same())

    def _meshbook_each(self) -> Any:
        return pull(self).values()

    def _meshbook_same(self) -> Any:
        first, *others = self._meshbook_each()
        if not all(values_equal(first, other) for other in others):
            raise ValuesDiffer(
                f"{name_ranks(_ranks(self))} do not agree on {_format_path(self)}:\n{self!r}\n"
                f"slice the mesh first, or take them all: pull({_format_path(self)})"
            )
        return first

    def _meshbook_previews(self) -> tuple[tuple[OutcomeGroup, ...], Ranks]:
        missing = Preview(kind="none", type="", text=f"({_format_path(self)} is not there)")
        previews = {rank: shown or missing for rank, (shown, _) in _get_previews(self).items()}
        return group_previews(previews), _ranks(self)

    def __reduce__(self) -> Any:
        raise TransferError(
            f"{_format_path(self)} is in the actors and cannot be sent; pull(…) it, and send what that gives"
        )


def state_of(mesh: ActorMesh[Any]) -> ActorState:
    """Return `mesh.state`."""
    return ActorState(mesh)


def pull(what: ActorState) -> ValueMesh[Any]:
    """Return the objects of every actor. Blocks; runs concurrently with the actors' messages.

    Raises:
        AttributeError, LookupError: an actor has no such object.
        TransferError: it cannot be pickled.
    """
    what = getattr(what, "_meshbook_state", what) if not isinstance(what, ActorState) else what
    return _wait_result(what, what._meshbook_mesh._apply_concurrently(_resolve_path, what._meshbook_steps))


# ---------------------------------------------------------------------------------------------------------------------
# In the caller's process


def _get_previews(state: ActorState, *, names: bool = False) -> dict[int, tuple[Preview | None, list[str]]]:
    """Return each actor's preview of the path, by rank, and attribute names; without an object, None and the reason.

    Args:
        names: also return the names of the object's attributes.
    """
    mesh = state._meshbook_mesh
    replies = mesh._apply_concurrently(preview_path, state._meshbook_steps, names).get(_PREVIEW_TIMEOUT_S)
    return {
        rank: (None if raw is None else msgspec.convert(raw, Preview), names_or_reason)
        for rank, (raw, names_or_reason) in enumerate(replies.values())
    }


def _ranks(state: ActorState) -> Ranks:
    return tuple(range(len(state._meshbook_mesh)))


def _run_in_order(state: ActorState, function: Callable[..., Any], *args: Any) -> ValueMesh[Any]:
    """Run `function` in each actor as one of its ordinary messages. Blocks."""
    return _wait_result(state, state._meshbook_mesh._apply(function, state._meshbook_steps, *args))


def _wait_result(state: ActorState, future: Any) -> ValueMesh[Any]:
    try:
        return future.get()  # type: ignore[no-any-return]
    except ActorError as error:
        if isinstance(error.exception, AttributeError | LookupError | TransferError):
            raise type(error.exception)(f"{_format_path(state)}: {error.exception}") from None
        raise


def _as_remote_tensor(state: ActorState, previews: list[Preview]) -> Any:
    """Return a RemoteTensor of the same storage for a tensor that is alike on every actor; otherwise the handle.

    This requires that the actors live on ranks that can hold remote tensors.
    """
    if any(preview.kind != "tensor" for preview in previews):
        return state
    mesh = state._meshbook_mesh
    meta = common_tensor_meta([msgspec.to_builtins(preview) for preview in previews], len(mesh))
    key = object_paths.format_key(mesh._ref.id, state._meshbook_steps)
    ranks = None if meta is None or key is None else mesh_slice_of(mesh)
    if ranks is None:
        return state
    try:
        tensor = extensions.find("tensor_named")(ranks, f"{object_paths.REFERENCE_KIND}:{key}", meta)
    except ImportError:  # torch is not installed here
        return state
    if tensor is None:
        return state
    tensor._meshbook_state = state  # read by `pull`
    return tensor


def _format_path(state: ActorState) -> str:
    text = f"{state._meshbook_mesh._ref.name}.state"
    for kind, key in state._meshbook_steps:
        text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text


def _no_such_attribute(state: ActorState, name: str, known_names: list[str]) -> str:
    close = difflib.get_close_matches(name, known_names, n=1)
    public = [other for other in known_names if not other.startswith("_")]
    hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(public[:20]) or 'no attributes'}"
    return f"{_format_path(state)} has no attribute {name!r} on any rank; {hint}"


# ---------------------------------------------------------------------------------------------------------------------
# In the actors' processes


def preview_path(actor: Any, steps: tuple[PathStep, ...], names: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a preview as plain data, and attribute names if requested.

    Without an object at the path: None, and the attributes that exist instead or the error.
    """
    from meshbook.rank.previews.preview import preview  # lazy, because it imports IPython

    reached = actor
    for index, (kind, key) in enumerate(steps):
        try:
            reached = getattr(reached, key) if kind == "attr" else reached[key]
        except Exception as error:
            if kind == "attr" and index == len(steps) - 1:
                return None, _names_of(reached)
            return None, [f"{type(error).__name__}: {message_of(error)}"]
    shown = preview(reached, text_limit=PREVIEW_CHARS, rich=False, safe=True)
    return msgspec.to_builtins(shown), _names_of(reached) if names else []


def _names_of(thing: Any) -> list[str]:
    """Return attribute names, the object's own first; for a torch module also its submodules and parameters."""
    own = [*getattr(thing, "__dict__", ()), *getattr(thing, "_modules", ()), *getattr(thing, "_parameters", ())]
    return [*own, *(name for name in dir(thing) if name not in own)]


def _resolve_path(actor: Any, steps: tuple[PathStep, ...]) -> Any:
    for kind, key in steps:
        actor = getattr(actor, key) if kind == "attr" else actor[key]
    return actor


def _assign(actor: Any, steps: tuple[PathStep, ...], kind: str, key: Any, value: Any) -> None:
    if isinstance(value, ValueMesh):
        value = value.get(current_rank().rank)
    if kind == "attr":
        setattr(_resolve_path(actor, steps), key, value)
    else:
        _resolve_path(actor, steps)[key] = value


def _call(actor: Any, steps: tuple[PathStep, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _resolve_path(actor, steps)(*args, **kwargs)
