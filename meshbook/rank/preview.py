"""The preview of a value: a bounded text, rich data for a front end, and a digest to compare ranks.

Cheap for any value: of a tensor a few elements are read, of a list of millions its beginning. On the main thread the
user's own `__repr__`s and formatters are used. With `safe`, for the service thread, no user code runs and no device is
waited for. torch is never imported here, only detected.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import hashlib
import itertools
import marshal
import re
import struct
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from IPython.lib import pretty

from meshbook.rank.mime import WIDGET_VIEW, encode_mime, to_json_data
from meshbook.rank.text import escape_surrogates, truncate
from meshbook.wire.messages import Preview, TensorMeta

if TYPE_CHECKING:
    from IPython.core.formatters import DisplayFormatter

MAX_HTML_CHARS: Final = 100_000
# Content up to this size is hashed, in 0.1 ms; beyond it, a comparison costs more than it is worth.
MAX_DIGEST_BYTES: Final = 64 << 10
# Limit for nested lists, dicts and sets, 3 ms at most; a flat list of numbers is hashed at once and counts a 50th.
MAX_DIGEST_ITEMS: Final = 4_000
# Single elements are read from a device one by one, and each read waits for the device.
MAX_SCALARS_READ: Final = 16

_ADDRESS_PATTERN: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN_TYPES: Final = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis)})
_CONTAINER_TYPES: Final = frozenset({list, tuple, dict, set, frozenset})
# IPython's printers print these without calling methods of other classes.
_SAFE_TYPES: Final = (
    _PLAIN_TYPES | _CONTAINER_TYPES | {OrderedDict, defaultdict, deque, range, bytearray, types.SimpleNamespace}
)
_NUMBER_TYPES: Final = frozenset({int, float, complex, bool, type(None)})
_FUNCTION_TYPES: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# torch types that are values: shown in full, and equal if their texts are.
_TORCH_VALUES: Final = frozenset({"Size", "dtype", "device"})


def preview(
    obj: Any,
    *,
    text_limit: int = 2000,
    rich: bool = True,
    formatter: DisplayFormatter | None = None,
    safe: bool = False,
) -> Preview:
    """Return the preview of a value.

    Classes are tested with `issubclass(type(obj), ...)`, because isinstance() runs code of the object.

    Args:
        text_limit: characters of text at most.
        rich: HTML, images and other MIME types as well, if a formatter is given.
        formatter: the shell's; also has the user's own printers and `%precision`.
        safe: do nothing that could run user code, wait for a device, or take long.

    Returns:
        A preview of kind "plain" if the value consists of numbers, strings and built-in containers only. An object that
            displays itself (`_ipython_display_`) has then done so, and its preview has no text.

    Raises:
        KeyboardInterrupt: during the user's own code. Nothing else.
    """
    kind = type(obj)
    if obj is None:
        return _NONE_PREVIEW
    if kind in _PLAIN_TYPES:
        return _preview_plain(obj, kind, text_limit, None if safe else formatter)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _preview_tensor(obj, text_limit, safe)
    try:
        return _preview_object(obj, kind, text_limit, formatter if rich and not safe else None, formatter, safe)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Preview(kind="object", type=type_name(kind), text=_describe_repr_error(kind, error))


def type_name(kind: type) -> str:
    """Return the name of a type: `int`, `torch.Tensor`, `__main__.Model`."""
    module, name = kind.__module__, kind.__qualname__
    if not isinstance(module, str) or module == "builtins":
        return name
    if module == "torch.nn.parameter":  # the usual import path
        module = "torch.nn"
    return f"{module}.{name}"


# ---------------------------------------------------------------------------------------------------------------------
# Plain values


_NONE_PREVIEW: Final = Preview(kind="none", type="NoneType", text="None", digest="none")


def _preview_plain(obj: Any, kind: type, limit: int, formatter: DisplayFormatter | None) -> Preview:
    name = kind.__name__
    if kind is str or kind is bytes:
        if len(obj) > limit:
            text, cut = truncate(repr(obj[:limit]), limit), True
        else:
            text = repr(obj)
            cut = len(text) > limit
            if cut:
                text = truncate(text, limit)
            elif kind is str and not text.isascii():
                text = escape_surrogates(text)
        if not cut:
            return Preview(kind="plain", type=name, text=text, digest=_digest_text(name, text))
        data = obj.encode("utf-8", "surrogatepass") if kind is str and len(obj) <= MAX_DIGEST_BYTES else obj
        digest = _digest(name, data) if len(obj) <= MAX_DIGEST_BYTES else None
        return Preview(kind="plain", type=name, text=text, digest=digest, truncated=True)
    if kind is int and obj.bit_length() > 4 * limit:
        text = f"<int of {obj.bit_length():,} bits>"
        return Preview(kind="plain", type=name, text=text, digest=None, truncated=True)
    if kind is float and formatter is not None:
        text = formatter.formatters["text/plain"].float_format % obj
        return Preview(kind="plain", type=name, text=text, digest=_digest_text(name, repr(obj)))
    text = repr(obj)
    return Preview(kind="plain", type=name, text=text, digest=_digest_text(name, text))


def _digest(name: str, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8, key=name.encode()[:64]).hexdigest()


def _digest_text(name: str, text: str) -> str:
    return hashlib.blake2b(f"{name}:{text}".encode(), digest_size=8).hexdigest()


class _NotDigestible(Exception):
    """Raised for content that is too large to hash, or not plain."""


def _digest_plain(obj: Any) -> str | None:
    """Return a hash of the complete value if it consists of plain values; None if it does not, or is large."""
    budget = [MAX_DIGEST_ITEMS, 16 * MAX_DIGEST_BYTES]
    try:
        return _hash_content(obj, budget, ()).hex()
    except (_NotDigestible, RuntimeError):  # RuntimeError: a user thread modifies it meanwhile
        return None


def _hash_content(obj: Any, budget: list[int], ancestors: tuple[int, ...]) -> bytes:
    kind = type(obj)
    budget[0] -= 1
    if budget[0] < 0 or id(obj) in ancestors:
        raise _NotDigestible
    flat = kind in (list, tuple) and len(obj) > 20 and _NUMBER_TYPES.issuperset(map(type, obj[:20]))
    if kind in _CONTAINER_TYPES and len(obj) > (50 if flat else 1) * budget[0]:
        raise _NotDigestible
    if kind in _PLAIN_TYPES:
        if kind is str:
            data = obj.encode("utf-8", "surrogatepass")
        elif kind is bytes:
            data = obj
        elif kind is int:
            data = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        elif kind is float:
            data = struct.pack("<d", obj)
        else:
            data = repr(obj).encode()
        budget[1] -= len(data)
        if budget[1] < 0:
            raise _NotDigestible
        return hashlib.blake2b(kind.__name__.encode() + b":" + data, digest_size=8).digest()
    if kind not in _CONTAINER_TYPES:
        raise _NotDigestible
    if flat and _NUMBER_TYPES.issuperset(map(type, obj)):
        budget[0] -= len(obj) // 50
        # Version 2 of the format encodes equal numbers equally; later ones depend on which objects are shared.
        return hashlib.blake2b(kind.__name__.encode() + b"!" + marshal.dumps(obj, 2), digest_size=8).digest()
    ancestors = (*ancestors, id(obj))
    if kind is dict:
        parts = [
            _hash_content(key, budget, ancestors) + _hash_content(value, budget, ancestors)
            for key, value in obj.items()
        ]
    else:
        parts = [_hash_content(item, budget, ancestors) for item in obj]
    if kind in (set, frozenset):
        parts.sort()  # the order of a set differs between processes
    return hashlib.blake2b(kind.__name__.encode() + b":" + b"".join(parts), digest_size=8).digest()


# ---------------------------------------------------------------------------------------------------------------------
# Objects and containers


def _preview_object(
    obj: Any,
    kind: type,
    limit: int,
    rich: DisplayFormatter | None,
    printers: DisplayFormatter | None,
    safe: bool,
) -> Preview:
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if rich is not None and kind not in _CONTAINER_TYPES:
        data, metadata = rich.format(obj, exclude=("text/plain",))
        if not data and _has_displayed_itself(obj, rich):
            return Preview(kind="object", type=type_name(kind), text="", metadata={"displayed": True})
    html = data.pop("text/html", None)
    data.pop("text/plain", None)
    data.pop(WIDGET_VIEW, None)
    truncated = False
    if html is not None and (not isinstance(html, str) or len(html) > MAX_HTML_CHARS):
        html, truncated = None, True
    text, cut, plain = _pretty_print(obj, limit, printers, safe)
    digest = None
    if plain:
        digest = _digest_plain(obj) if cut or kind in (set, frozenset) else _digest_text(type_name(kind), text)
    else:
        text = _ADDRESS_PATTERN.sub("", text)  # equal objects on two ranks are then shown once
        digest = _digest_array(obj, kind)
    return Preview(
        kind="plain" if plain else "object",
        type=type_name(kind),
        text=text,
        html=None if html is None else escape_surrogates(html),
        data={mime: encode_mime(mime, value) for mime, value in data.items()},
        metadata=to_json_data(metadata),
        digest=digest,
        truncated=cut or truncated,
    )


def _has_displayed_itself(obj: Any, formatter: DisplayFormatter) -> bool:
    """Whether `format` returned nothing because the object displays itself."""
    return getattr(type(obj), "_ipython_display_", None) is not None or (
        type(obj) in formatter.ipython_display_formatter.type_printers
    )


def _pretty_print(obj: Any, limit: int, formatter: DisplayFormatter | None, safe: bool) -> tuple[str, bool, bool]:
    """Return the text, whether it was truncated, and whether everything in it is plain."""
    stream = _BoundedText(limit)
    printer = _PreviewPrinter(stream, formatter, safe)
    cut = False
    try:
        printer.pretty(obj)
        printer.flush()
    except _TextLimitReached:
        cut = True
    except RuntimeError as error:  # "changed size during iteration": a user thread modifies it
        return _describe_repr_error(type(obj), error), False, False
    text = stream.text()
    if cut or len(text) > limit:
        text, cut = truncate(text, limit), True
    return escape_surrogates(text), cut or printer.is_truncated, printer.is_plain


class _TextLimitReached(Exception):
    """Raised when the text is long enough."""


class _BoundedText:
    def __init__(self, limit: int) -> None:
        self._pieces: list[str] = []
        self._remaining_chars = limit

    def write(self, text: str) -> None:
        self._pieces.append(text)
        self._remaining_chars -= len(text)
        if self._remaining_chars < 0:
            raise _TextLimitReached

    def text(self) -> str:
        return "".join(self._pieces)


class _PreviewPrinter(pretty.RepresentationPrinter):
    """IPython's printer, with short tensors, without exceptions and, if `safe`, without running user code."""

    def __init__(self, stream: _BoundedText, formatter: DisplayFormatter | None, safe: bool) -> None:
        if formatter is None or safe:
            super().__init__(stream)
        else:
            text = formatter.formatters["text/plain"]
            super().__init__(
                stream,
                max_width=text.max_width,
                max_seq_length=text.max_seq_length,
                singleton_pprinters=text.singleton_printers,
                type_pprinters=text.type_printers,
                deferred_pprinters=text.deferred_printers,
            )
        self.is_plain = True  # only plain values were printed
        self.is_truncated = False  # something in the middle was omitted
        self._safe = safe
        self._scalars_left = MAX_SCALARS_READ
        self._torch = sys.modules.get("torch")

    def pretty(self, obj: Any) -> None:
        kind = type(obj)
        if kind in _CONTAINER_TYPES:
            if len(obj) > self.max_seq_length:
                self.is_truncated = True
            if self._safe and kind in (set, frozenset) and not all(type(item) in _PLAIN_TYPES for item in obj):
                self.is_plain = False
                self.text(f"<{kind.__name__} of {len(obj):,}>")  # the printer would sort, and so compare, user objects
            elif (
                kind in (list, tuple)
                and len(obj) > 20
                and _NUMBER_TYPES.issuperset(map(type, obj[: self.max_seq_length]))
            ):
                self._print_numbers(obj, "[]" if kind is list else "()")
            else:
                super().pretty(obj)
        elif kind in _PLAIN_TYPES:
            if kind in (str, bytes) and len(obj) > 1000:
                self.is_truncated = True
                self.text(f"{obj[:1000]!r}…")
            elif kind is int and obj.bit_length() > 4000:
                self.is_truncated = True
                self.text(f"<int of {obj.bit_length():,} bits>")
            else:
                super().pretty(obj)
        else:
            if not _is_value_type(kind):
                self.is_plain = False
            self._print_other(obj, kind)

    def _print_numbers(self, numbers: Any, brackets: str) -> None:
        """Print a long list of numbers, as many per line as fit; IPython prints one per line."""
        self.text(brackets[0])
        self.indentation += 1
        column = self.output_width + self.buffer_width
        shown = numbers[: self.max_seq_length]
        for i, number in enumerate(shown):
            text = repr(number) if type(number) is not int or number.bit_length() < 4000 else "<int>"
            last = i + 1 == len(numbers)
            if i and column + len(text) + 2 > self.max_width:
                self.break_()
                column = self.indentation
            elif i:
                text = f" {text}"
            text = text if last else f"{text},"
            self.text(text)
            column += len(text)
        if len(shown) < len(numbers):
            self.text(" …")
        self.indentation -= 1
        self.text(brackets[1])

    def _print_other(self, obj: Any, kind: type) -> None:
        torch = self._torch
        if torch is not None and issubclass(kind, torch.Tensor):
            self._print_tensor(obj)
        elif torch is not None and issubclass(kind, torch.nn.Module):
            self.text(_describe_module(obj, short=self._safe or bool(self.stack)))
        elif torch is not None and issubclass(kind, torch.optim.Optimizer):
            self.text(_describe_optimizer(obj))
        # the printer's own helper objects
        elif self._safe and kind not in _SAFE_TYPES and kind.__module__ != pretty.__name__:
            self.text(_describe_statically(obj, kind))
        else:
            try:
                super().pretty(obj)
            except (_TextLimitReached, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.text(_describe_repr_error(kind, error))

    def _print_tensor(self, obj: Any) -> None:
        """Print a tensor inside another object: its kind and shape; its value if it has one element."""
        meta = _tensor_meta(obj)
        text = f"{_tensor_class_label(obj)} {meta.dtype} {meta.shape}"
        if meta.device != "cpu":
            text += f" {meta.device}"
        if self._scalars_left > 0 and _num_elements(meta.shape) == 1 and meta.placements is None:
            self._scalars_left -= 1
            elements = _first_elements(obj, self._safe)
            text += f"  {elements}" if elements else ""
        self.text(text)


def _is_value_type(kind: type) -> bool:
    """Whether a class that is not built in is a plain value: numpy's scalars, torch's sizes, dtypes and devices."""
    if kind.__module__ == "torch":
        return kind.__name__ in _TORCH_VALUES
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def _describe_statically(obj: Any, kind: type) -> str:
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
    if _is_value_type(kind):
        return repr(obj)
    return f"<{type_name(kind)}{_dataframe_shape(obj, kind)}>"


def _dataframe_shape(obj: Any, kind: type) -> str:
    """Return ` 100 rows x 3 columns` for a pandas table."""
    pandas = sys.modules.get("pandas")
    if pandas is None or kind not in (getattr(pandas, "DataFrame", None), getattr(pandas, "Series", None)):
        return ""
    shape = obj.shape
    return f" {shape[0]} rows" + (f" x {shape[1]} columns" if len(shape) == 2 else "")


def _digest_array(obj: Any, kind: type) -> str | None:
    """Return a hash of a small numpy array or scalar; None for others."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
        return None
    if obj.dtype.hasobject or obj.nbytes > MAX_DIGEST_BYTES:
        return None
    return _digest("numpy", f"{obj.dtype.str}{obj.shape}:".encode() + obj.tobytes())


def _describe_repr_error(kind: type, error: BaseException) -> str:
    try:
        detail = f": {str(error)[:200]}"
    except Exception:
        detail = ""
    return escape_surrogates(f"<{type_name(kind)}: showing it raised {type(error).__name__}{detail}>")


# ---------------------------------------------------------------------------------------------------------------------
# Tensors, modules, optimizers


def _preview_tensor(obj: Any, limit: int, safe: bool) -> Preview:
    kind = type(obj)
    try:
        meta = _tensor_meta(obj)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a subclass whose shape raises
        return Preview(kind="object", type=type_name(kind), text=_describe_repr_error(kind, error))
    local = obj._local_tensor if meta.placements is not None else obj  # without a collective: this rank's part only
    words = [_tensor_class_label(obj), meta.dtype, str(meta.shape), meta.device]
    if meta.placements is not None:
        words += [meta.placements, f"local {meta.local_shape}"]
    elif meta.requires_grad and _tensor_class_label(obj) == "tensor":
        words.append("requires_grad")
    elements = _first_elements(local, safe)
    text = " ".join(words) + (f"  {elements}" if elements else "")
    digest = None if safe else _digest_tensor(local, meta)
    return Preview(
        kind="tensor",
        type=type_name(kind),
        text=truncate(text, limit),
        tensor=meta,
        digest=digest,
        truncated=not elements or "…" in elements or len(text) > limit,
    )


def _tensor_class_label(obj: Any) -> str:
    name = type(obj).__name__
    return "tensor" if name == "Tensor" else name


def _tensor_meta(obj: Any) -> TensorMeta:
    placements = local_shape = None
    if _is_dtensor(obj):
        placements = str(tuple(obj.placements))
        local_shape = tuple(int(n) for n in obj._local_tensor.shape)
    return TensorMeta(
        shape=tuple(int(n) for n in obj.shape),
        dtype=str(obj.dtype).removeprefix("torch."),
        device=str(obj.device),
        requires_grad=bool(obj.requires_grad),
        placements=placements,
        local_shape=local_shape,
        stride=_stride(obj),
    )


def _stride(obj: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(step) for step in obj.stride())
    except Exception:  # nested tensors have none
        return None


def _is_dtensor(obj: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(obj, getattr(module, "DTensor", ()))


def _num_elements(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _first_elements(obj: Any, safe: bool) -> str:
    """Return the first few elements, nested as in the tensor; "" if they cannot be read, or not without waiting."""
    torch = sys.modules["torch"]
    try:
        if obj.layout is not torch.strided or obj.is_meta or obj.is_quantized:
            return ""
        if safe and (obj.device.type != "cpu" or type(obj) not in (torch.Tensor, torch.nn.Parameter)):
            return ""
        shape = tuple(obj.shape)
        if not _num_elements(shape):
            return "[]"
        rows = 2 if len(shape) < 4 else 1
        window = tuple(slice(0, 6 if n <= 6 else 4) for n in shape[-1:])
        window = tuple(slice(0, rows if n > 3 or len(shape) > 2 else 3) for n in shape[:-1]) + window
        window_values = obj.detach()[window].to("cpu")
        if window_values.is_floating_point() and window_values.element_size() == 1:
            window_values = window_values.to(torch.float32)  # 8-bit floats cannot be converted to Python numbers
        return _format_nested(window_values.tolist(), shape)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a fake, functional or wrapped tensor; a device in a bad state
        return ""


def _format_nested(values: Any, shape: tuple[int, ...]) -> str:
    if not shape:
        return _format_number(values)
    inner = [_format_nested(value, shape[1:]) for value in values]
    if len(inner) < shape[0]:
        inner.append("…")
    return f"[{', '.join(inner)}]"


def _format_number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return str(value)


def _digest_tensor(local: Any, meta: TensorMeta) -> str | None:
    torch = sys.modules["torch"]
    try:
        if local.layout is not torch.strided or local.is_meta or local.is_quantized:
            return None
        if local.numel() * local.element_size() > MAX_DIGEST_BYTES:
            return None
        flat = local.detach().to("cpu").contiguous().reshape(-1)
        import numpy

        # Not `.numpy()`: after that the user's storage could not be resized.
        content = numpy.from_dlpack(flat.view(torch.uint8)).tobytes() if flat.numel() else b""
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    header = f"{meta.shape}{meta.dtype}{meta.requires_grad}{meta.placements}{meta.local_shape}:"
    return _digest("tensor", header.encode() + content)


def _describe_module(obj: Any, *, short: bool) -> str:
    """Return `GPT: 10,788,929 parameters float32 cpu`, followed by its layers."""
    count = 0
    dtypes: set[str] = set()
    devices: set[str] = set()
    for parameter in itertools.islice(_iter_parameters(obj), 100_000):
        count += _num_elements(tuple(parameter.shape))
        dtypes.add(str(parameter.dtype).removeprefix("torch."))
        devices.add(str(parameter.device))
    head = f"{type(obj).__name__}: {count:,} parameters"
    for words in (dtypes, devices):
        head += f" {'/'.join(sorted(words))}" if words else ""
    if short:
        return f"<{head}>"
    try:
        return f"{head}\n{obj!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{head}\n{_describe_repr_error(type(obj), error)}"


def _iter_parameters(module: Any) -> Iterator[Any]:
    """Yield each parameter once, from torch's own dictionaries: a Module's methods may be overridden."""
    seen: set[int] = set()
    pending = [module]
    while pending:
        fields = getattr(pending.pop(), "__dict__", {})
        for parameter in list((fields.get("_parameters") or {}).values()):
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
        for child in list((fields.get("_modules") or {}).values()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)


def _describe_optimizer(obj: Any) -> str:
    """Return `AdamW(lr=0.001, betas=(0.9, 0.95), weight_decay=0.1): 2 groups, 74 tensors`."""
    fields = getattr(obj, "__dict__", {})
    groups = fields.get("param_groups") or []
    defaults = fields.get("defaults") or {}
    named = ("lr", "momentum", "betas", "eps", "weight_decay")
    shown = [f"{key}={defaults[key]!r}" for key in named if key in defaults]
    tensors = sum(len(group.get("params", ())) for group in groups)
    return (
        f"{type(obj).__name__}({', '.join(shown)}): {len(groups)} group{'' if len(groups) == 1 else 's'}, "
        f"{tensors} tensor{'' if tensors == 1 else 's'}"
    )
