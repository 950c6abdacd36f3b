"""Descriptions of objects that call none of their code."""

from __future__ import annotations

import sys
import types
from typing import Any, Final

from meshbook.errors import escape_surrogates, message_of

_FUNCTION_TYPES: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# torch types that are values: shown in full, and equal if their texts are.
_TORCH_VALUES: Final = frozenset({"Size", "dtype", "device"})


def type_name(kind: type) -> str:
    """Return the name of a type: `int`, `torch.Tensor`, `__main__.Model`."""
    module, name = kind.__module__, kind.__qualname__
    if not isinstance(module, str) or module == "builtins":
        return name
    if module == "torch.nn.parameter":  # the usual import path
        module = "torch.nn"
    return f"{module}.{name}"


def is_value_type(kind: type) -> bool:
    """Whether a class that is not built in is a plain value: numpy's scalars, torch's sizes, dtypes and devices."""
    if kind.__module__ == "torch":
        return kind.__name__ in _TORCH_VALUES
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def describe_statically(obj: Any, kind: type) -> str:
    """Describe an object without calling it; only numpy's and torch's own values use their repr."""
    if issubclass(kind, type):
        return f"<class {type_name(obj)}>"
    if kind in _FUNCTION_TYPES:
        return f"<function {obj.__qualname__}>"
    if kind is types.ModuleType:
        return f"<module {obj.__dict__.get('__name__', '')}>"
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return f"<numpy.ndarray {obj.shape} of objects>" if obj.dtype.hasobject else repr(obj)
    if is_value_type(kind):
        return repr(obj)
    return f"<{type_name(kind)}{_dataframe_shape(obj, kind)}>"


def _dataframe_shape(obj: Any, kind: type) -> str:
    """Return ` 100 rows x 3 columns` for a pandas table."""
    pandas = sys.modules.get("pandas")
    if pandas is None or kind not in (getattr(pandas, "DataFrame", None), getattr(pandas, "Series", None)):
        return ""
    shape = obj.shape
    return f" {shape[0]} rows" + (f" x {shape[1]} columns" if len(shape) == 2 else "")


def describe_repr_error(kind: type, error: BaseException) -> str:
    return escape_surrogates(
        f"<{type_name(kind)}: showing it raised {type(error).__name__}: {message_of(error)[:200]}>"
    )
