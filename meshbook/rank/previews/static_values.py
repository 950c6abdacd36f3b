"""The value of an expression of names, attributes and constant subscripts, found without running user code.

Through instance dictionaries, descriptors of C types and the built-in containers: the layers of a torch Module, for
example, which IPython's own guarded evaluation does not find, because its `__getattr__` is Python code.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any, Final

MISSING: Final = object()

# Python code in these packages may run: it is not the user's, and no attribute takes long to compute.
_TRUSTED_PACKAGES: Final = frozenset({"torch", "numpy"})
_C_DESCRIPTORS: Final = (types.GetSetDescriptorType, types.MemberDescriptorType)


def resolve_statically(namespace: Mapping[str, Any], expression: str | ast.expr) -> Any:
    """Return the value of an expression of names, attributes and constant subscripts.

    Returns `MISSING` if it cannot be determined without running user code.
    """
    try:
        node = expression if isinstance(expression, ast.expr) else ast.parse(expression.strip(), mode="eval").body
        return _resolve_node(node, namespace)
    # not an expression; a dictionary modified meanwhile, an unhashable key, a slot without a value
    except Exception:
        return MISSING


def _resolve_node(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            found = namespace.get(name, MISSING)
            return vars(builtins).get(name, MISSING) if found is MISSING else found
        case ast.Attribute(value=value, attr=name):
            obj = _resolve_node(value, namespace)
            return obj if obj is MISSING else _get_attribute(obj, name)
        case ast.Subscript(value=value, slice=key):
            obj = _resolve_node(value, namespace)
            try:
                constant = ast.literal_eval(key)
            except ValueError:
                return MISSING
            return obj if obj is MISSING else _get_item(obj, constant)
    return MISSING


def _get_attribute(obj: Any, name: str) -> Any:
    kind = type(obj)
    if issubclass(kind, types.ModuleType):
        return instance_dict(obj).get(name, MISSING)
    if is_torch_module(kind):
        for members in module_dicts(obj):
            if name in members:
                return members[name]
    static = inspect.getattr_static(obj, name, MISSING)
    if static is MISSING:
        return MISSING
    if issubclass(kind, type):
        return _bind_class_attribute(static, obj)
    if name in instance_dict(obj):
        return static
    return _bind_instance_attribute(static, obj, kind)


def _bind_class_attribute(static: Any, owner: type) -> Any:
    if isinstance(static, staticmethod):
        return static.__func__
    if isinstance(static, classmethod):
        function = static.__func__
        return types.MethodType(function, owner) if isinstance(function, types.FunctionType) else MISSING
    return static


def _bind_instance_attribute(static: Any, obj: Any, kind: type) -> Any:
    """Return what a class attribute evaluates to when it is read through an instance."""
    static_type = type(static)
    if static_type is types.FunctionType:
        return types.MethodType(static, obj)
    if static_type is staticmethod or static_type is classmethod:
        return _bind_class_attribute(static, kind)
    if static_type in _C_DESCRIPTORS:
        # On a user's tensor class, even reading the shape runs its code.
        if is_torch_tensor(kind) and kind.__module__.partition(".")[0] != "torch":
            return MISSING
        return static.__get__(obj, kind)
    if static_type is types.MethodDescriptorType or static_type is types.WrapperDescriptorType:
        return static.__get__(obj, kind)
    if static_type is property:
        function = static.fget
        root = getattr(function, "__module__", None) or ""
        return static.__get__(obj, kind) if root.partition(".")[0] in _TRUSTED_PACKAGES else MISSING
    return static if inspect.getattr_static(static_type, "__get__", MISSING) is MISSING else MISSING


def _get_item(obj: Any, key: Any) -> Any:
    kind = type(obj)
    if kind in (list, tuple):
        return obj[key] if isinstance(key, int) and -len(obj) <= key < len(obj) else MISSING
    if issubclass(kind, dict):
        return dict.get(obj, key, MISSING)
    if is_torch_module(kind):
        modules = instance_dict(obj).get("_modules") or {}
        if isinstance(key, int) and key < 0:
            key += len(modules)
        return modules.get(str(key), MISSING)
    return MISSING


def instance_dict(obj: Any) -> dict[str, Any]:
    """Return the object's own attributes, without calling the object: a class may define its own `__dict__`."""
    for owner in type(obj).__mro__:
        descriptor = vars(owner).get("__dict__")
        if descriptor is not None:
            attributes = descriptor.__get__(obj) if type(descriptor) in _C_DESCRIPTORS else None
            return attributes if type(attributes) is dict else {}
    return {}


def module_dicts(obj: Any) -> list[dict[str, Any]]:
    """Return the dictionaries that a torch Module's `__getattr__` searches."""
    attributes = instance_dict(obj)
    return [attributes.get(name) or {} for name in ("_parameters", "_buffers", "_modules")]


def is_torch_module(kind: type) -> bool:
    torch = sys.modules.get("torch.nn")
    return torch is not None and issubclass(kind, torch.Module)


def is_torch_tensor(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)
