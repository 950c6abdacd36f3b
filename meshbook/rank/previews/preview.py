"""The preview of a value: a bounded text, rich data for a front end, and a digest to compare ranks.

Cheap for any value: of a tensor a few elements are read, of a list of millions its beginning. On the main thread the
user's own `__repr__`s and formatters are used. With `safe`, for the service thread, no user code runs and no device is
waited for. torch is never imported here, only detected.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from meshbook.errors import escape_surrogates
from meshbook.rank.cells.mime import WIDGET_VIEW, encode_mime, to_json_data
from meshbook.rank.previews.digests import (
    CONTAINER_TYPES,
    MAX_DIGEST_BYTES,
    PLAIN_TYPES,
    digest_array,
    digest_bytes,
    digest_plain,
    digest_text,
)
from meshbook.rank.previews.preview_printer import pretty_print
from meshbook.rank.previews.static_descriptions import describe_repr_error, type_name
from meshbook.rank.previews.torch_previews import preview_tensor
from meshbook.rank.text import truncate
from meshbook.wire.messages import Preview

if TYPE_CHECKING:
    from IPython.core.formatters import DisplayFormatter

MAX_HTML_CHARS: Final = 100_000

_ADDRESS_PATTERN: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_NONE_PREVIEW: Final = Preview(kind="none", type="NoneType", text="None", digest="none")


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
    if kind in PLAIN_TYPES:
        return _preview_plain(obj, kind, text_limit, None if safe else formatter)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return preview_tensor(obj, text_limit, safe)
    try:
        return _preview_object(obj, kind, text_limit, formatter if rich and not safe else None, formatter, safe)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Preview(kind="object", type=type_name(kind), text=describe_repr_error(kind, error))


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
            return Preview(kind="plain", type=name, text=text, digest=digest_text(name, text))
        data = obj.encode("utf-8", "surrogatepass") if kind is str and len(obj) <= MAX_DIGEST_BYTES else obj
        digest = digest_bytes(name, data) if len(obj) <= MAX_DIGEST_BYTES else None
        return Preview(kind="plain", type=name, text=text, digest=digest, truncated=True)
    if kind is int and obj.bit_length() > 4 * limit:
        text = f"<int of {obj.bit_length():,} bits>"
        return Preview(kind="plain", type=name, text=text, digest=None, truncated=True)
    if kind is float and formatter is not None and _own_text_formatter(formatter) is None:
        text = formatter.formatters["text/plain"].float_format % obj
        return Preview(kind="plain", type=name, text=text, digest=digest_text(name, repr(obj)))
    text = repr(obj)
    return Preview(kind="plain", type=name, text=text, digest=digest_text(name, text))


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
    if rich is not None and kind not in CONTAINER_TYPES:
        data, metadata = rich.format(obj, exclude=("text/plain",))
        if not data and _has_displayed_itself(obj, rich):
            return Preview(kind="object", type=type_name(kind), text="", metadata={"displayed": True})
    html = data.pop("text/html", None)
    data.pop("text/plain", None)
    data.pop(WIDGET_VIEW, None)
    truncated = False
    if html is not None and (not isinstance(html, str) or len(html) > MAX_HTML_CHARS):
        html, truncated = None, True
    own_formatter = None if safe or printers is None else _own_text_formatter(printers)
    text, cut, plain = pretty_print(obj, limit, None if own_formatter is not None else printers, safe)
    digest = None
    if plain:
        digest = digest_plain(obj) if cut or kind in (set, frozenset) else digest_text(type_name(kind), text)
    else:
        text = _ADDRESS_PATTERN.sub("", text)  # equal objects on two ranks are then shown once
        digest = digest_array(obj, kind)
    if own_formatter is not None and isinstance(own_text := own_formatter(obj), str):  # None: it has none for this
        text, cut = truncate(escape_surrogates(own_text), limit), len(own_text) > limit
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


def _own_text_formatter(formatter: DisplayFormatter) -> Callable[[Any], Any] | None:
    """Return the formatter that user code (`rich.pretty.install()`) has put in the place of IPython's printer."""
    text: Any = formatter.formatters["text/plain"]
    return None if hasattr(text, "float_format") else text


def _has_displayed_itself(obj: Any, formatter: DisplayFormatter) -> bool:
    """Whether `format` returned nothing because the object displays itself."""
    return getattr(type(obj), "_ipython_display_", None) is not None or (
        type(obj) in formatter.ipython_display_formatter.type_printers
    )
