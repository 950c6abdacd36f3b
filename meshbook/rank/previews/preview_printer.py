"""Prints objects with IPython's printer: bounded, tensors in short and, if wanted, without running user code."""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

from IPython.lib import pretty

from meshbook.errors import escape_surrogates
from meshbook.rank.previews.digests import CONTAINER_TYPES, NUMBER_TYPES, PLAIN_TYPES
from meshbook.rank.previews.static_descriptions import describe_repr_error, describe_statically, is_value_type
from meshbook.rank.previews.torch_previews import (
    describe_module,
    describe_optimizer,
    first_elements,
    num_elements,
    tensor_class_label,
    tensor_meta,
)
from meshbook.rank.text import truncate

if TYPE_CHECKING:
    from IPython.core.formatters import DisplayFormatter

# Single elements are read from a device one by one, and each read waits for the device.
MAX_SCALARS_READ: Final = 16

# IPython's printers print these without calling methods of other classes.
_SAFE_TYPES: Final = (
    PLAIN_TYPES | CONTAINER_TYPES | {OrderedDict, defaultdict, deque, range, bytearray, types.SimpleNamespace}
)


def pretty_print(obj: Any, limit: int, formatter: DisplayFormatter | None, safe: bool) -> tuple[str, bool, bool]:
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
        return describe_repr_error(type(obj), error), False, False
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
        if kind in CONTAINER_TYPES:
            if len(obj) > self.max_seq_length:
                self.is_truncated = True
            if self._safe and kind in (set, frozenset) and not all(type(item) in PLAIN_TYPES for item in obj):
                self.is_plain = False
                self.text(f"<{kind.__name__} of {len(obj):,}>")  # the printer would sort, and so compare, user objects
            elif (
                kind in (list, tuple)
                and len(obj) > 20
                and NUMBER_TYPES.issuperset(map(type, obj[: self.max_seq_length]))
            ):
                self._print_numbers(obj, "[]" if kind is list else "()")
            else:
                super().pretty(obj)
        elif kind in PLAIN_TYPES:
            if kind in (str, bytes) and len(obj) > 1000:
                self.is_truncated = True
                self.text(f"{obj[:1000]!r}…")
            elif kind is int and obj.bit_length() > 4000:
                self.is_truncated = True
                self.text(f"<int of {obj.bit_length():,} bits>")
            else:
                super().pretty(obj)
        else:
            if not is_value_type(kind):
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
            self.text(describe_module(obj, short=self._safe or bool(self.stack)))
        elif torch is not None and issubclass(kind, torch.optim.Optimizer):
            self.text(describe_optimizer(obj))
        # the printer's own helper objects
        elif self._safe and kind not in _SAFE_TYPES and kind.__module__ != pretty.__name__:
            self.text(describe_statically(obj, kind))
        else:
            try:
                super().pretty(obj)
            except (_TextLimitReached, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.text(describe_repr_error(kind, error))

    def _print_tensor(self, obj: Any) -> None:
        """Print a tensor inside another object: its kind and shape; its value if it has one element."""
        meta = tensor_meta(obj)
        text = f"{tensor_class_label(obj)} {meta.dtype} {meta.shape}"
        if meta.device != "cpu":
            text += f" {meta.device}"
        if self._scalars_left > 0 and num_elements(meta.shape) == 1 and meta.placements is None:
            self._scalars_left -= 1
            elements = first_elements(obj, self._safe)
            text += f"  {elements}" if elements else ""
        self.text(text)
