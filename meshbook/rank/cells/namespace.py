"""Detects which names a cell bound, and which it deleted.

Values are compared by identity, before and after. The stored state must not keep a value alive: a cell that deletes a
tensor to free memory for the next one must get that memory while it runs. So small immutable values are stored, other
values are weakly referenced, and values without weak references (lists, dicts) are identified by their address. Because
an address may be reused, the latter also count as changed only if the cell's code stores the name.
"""

from __future__ import annotations

import opcode
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

_MISSING = object()
_IMMUTABLE_TYPES = frozenset({int, float, complex, bool, type(None), str, bytes})
_MAX_HELD_LENGTH = 4096  # of a str or bytes that is stored; a longer one is identified by its address

_EXTENDED_ARG = opcode.opmap["EXTENDED_ARG"]
_GLOBAL_STORE_OPS = frozenset({opcode.opmap["STORE_GLOBAL"], opcode.opmap["DELETE_GLOBAL"]})
_STORE_OPS = _GLOBAL_STORE_OPS | {opcode.opmap["STORE_NAME"], opcode.opmap["DELETE_NAME"]}


class _ObjectAddress(int):
    """id() of a value that can be neither stored nor weakly referenced."""


class NamespaceTracker:
    """The state of a namespace at its last inspection."""

    def __init__(self, namespace: dict[str, Any], hidden: Mapping[str, Any]) -> None:
        """
        Args:
            hidden: names that are not the user's as long as they have exactly these values.
        """
        self._namespace = namespace
        self._hidden = hidden
        self._fingerprints: dict[str, Any] = {}

    def snapshot(self) -> None:
        """Store the current state, so that earlier bindings are not reported as changes."""
        self._update(())

    def pop_changes(self, codes: Iterable[CodeType] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what was bound (or rebound) and deleted since the last call, in the namespace's order.

        Underscored names, `In`, `Out` and hidden ones are left out. Binding a name to the object that it has is no
        change, except perhaps for lists and other objects without weak references.

        Args:
            codes: the code that ran meanwhile.
        """
        bound, unbound = self._update(codes)
        hidden = self._hidden
        return (
            tuple(name for name in bound if hidden.get(name, _MISSING) is not self._namespace.get(name)),
            tuple(unbound),
        )

    def _update(self, codes: Iterable[CodeType]) -> tuple[list[str], list[str]]:
        fingerprints = self._fingerprints
        get = fingerprints.get
        bound: list[str] = []
        stored_names: set[str] | None = None
        items = list(self._namespace.items())  # copied at once: a user thread may bind names meanwhile
        for name, value in items:
            fingerprint = get(name, _MISSING)
            if fingerprint is value:
                continue
            kind = type(fingerprint)
            if kind is weakref.ref:
                if fingerprint() is value:
                    continue
            elif kind is _ObjectAddress and fingerprint == id(value):
                if stored_names is None:
                    stored_names = set(_iter_stored_names(codes))
                if name not in stored_names:
                    continue
            fingerprints[name] = _fingerprint(value)
            if is_user_name(name):
                bound.append(name)
        unbound: list[str] = []
        if len(fingerprints) != len(items):
            for name in fingerprints.keys() - dict(items).keys():
                del fingerprints[name]
                if is_user_name(name):
                    unbound.append(name)
            unbound.sort()
        return bound, unbound


def is_user_name(name: object) -> bool:
    return isinstance(name, str) and name[:1] != "_" and name not in ("In", "Out")


def _fingerprint(value: object) -> object:
    if type(value) in _IMMUTABLE_TYPES and (not isinstance(value, (str, bytes)) or len(value) <= _MAX_HELD_LENGTH):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return _ObjectAddress(id(value))


def _iter_stored_names(codes: Iterable[CodeType]) -> Iterator[str]:
    """Yield the global names that the code stores or deletes, itself or in the functions that it defines."""
    pending = [(code, _STORE_OPS) for code in codes]
    while pending:
        code, store_ops = pending.pop()
        extended = 0
        raw = code.co_code
        for i in range(0, len(raw), 2):
            op, arg = raw[i], raw[i + 1] | extended
            if op == _EXTENDED_ARG:
                extended = arg << 8
                continue
            extended = 0
            if op in store_ops:
                yield code.co_names[arg]
        pending.extend((inner, _GLOBAL_STORE_OPS) for inner in code.co_consts if isinstance(inner, CodeType))
