"""Previews of torch's objects: tensors, modules, optimizers. torch is never imported here, only detected."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from meshbook.rank.previews.digests import digest_tensor
from meshbook.rank.previews.static_descriptions import describe_repr_error, type_name
from meshbook.rank.text import truncate
from meshbook.wire.messages import Preview, TensorMeta


def preview_tensor(obj: Any, limit: int, safe: bool) -> Preview:
    kind = type(obj)
    try:
        if obj.is_nested:  # it has no shape of numbers
            text = f"nested tensor {str(obj.dtype).removeprefix('torch.')}, {obj.size(0)} tensors, {obj.device}"
            return Preview(kind="object", type=type_name(kind), text=text)
        meta = tensor_meta(obj)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a subclass whose shape raises
        return Preview(kind="object", type=type_name(kind), text=describe_repr_error(kind, error))
    local = obj._local_tensor if meta.placements is not None else obj  # without a collective: this rank's part only
    words = [tensor_class_label(obj), meta.dtype, str(meta.shape), meta.device]
    if meta.placements is not None:
        words += [meta.placements, f"local {meta.local_shape}"]
    elif meta.requires_grad and tensor_class_label(obj) == "tensor":
        words.append("requires_grad")
    elements = first_elements(local, safe)
    text = " ".join(words) + (f"  {elements}" if elements else "")
    digest = None if safe else digest_tensor(local, meta)
    return Preview(
        kind="tensor",
        type=type_name(kind),
        text=truncate(text, limit),
        tensor=meta,
        digest=digest,
        truncated=not elements or "…" in elements or len(text) > limit,
    )


def tensor_class_label(obj: Any) -> str:
    name = type(obj).__name__
    return "tensor" if name == "Tensor" else name


def tensor_meta(obj: Any) -> TensorMeta:
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
    if obj.layout is not sys.modules["torch"].strided:  # a sparse tensor, which cannot be a remote tensor
        return None
    try:
        return tuple(int(step) for step in obj.stride())
    except Exception:  # nested tensors have none
        return None


def _is_dtensor(obj: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(obj, getattr(module, "DTensor", ()))


def num_elements(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def first_elements(obj: Any, safe: bool) -> str:
    """Return the first few elements, nested as in the tensor; "" if they cannot be read, or not without waiting."""
    torch = sys.modules["torch"]
    try:
        if obj.layout is not torch.strided or obj.is_meta or obj.is_quantized:
            return ""
        if safe and (obj.device.type != "cpu" or type(obj) not in (torch.Tensor, torch.nn.Parameter)):
            return ""
        shape = tuple(obj.shape)
        if not num_elements(shape):
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


def describe_module(obj: Any, *, short: bool) -> str:
    """Return `GPT: 10,788,929 parameters float32 cpu`, followed by its layers."""
    count = 0
    dtypes: set[str] = set()
    devices: set[str] = set()
    for parameter in itertools.islice(_iter_parameters(obj), 100_000):
        count += num_elements(tuple(parameter.shape))
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
        return f"{head}\n{describe_repr_error(type(obj), error)}"


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


def describe_optimizer(obj: Any) -> str:
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
