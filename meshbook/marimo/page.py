"""The marimo page of the cell that this thread runs: which cell it is, and what is shown below it.

This module never imports marimo, which need not be installed if no marimo notebook runs. It uses marimo's internals; if
one is missing, the cell is treated as ordinary code.
"""

from __future__ import annotations

import getpass
import html
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshbook.fold import rendering
from meshbook.ids import Ranks, name_ranks

KIND = "marimo"  # the kind of client that a marimo notebook is


@dataclass(frozen=True)
class MarimoCell:
    """The cell that this thread runs.

    Attributes:
        owner: the notebook, as the owner of its meshes.
        id: marimo's name for the cell.
        mode: "edit": a kernel of its own, which may be restarted; "run": a thread of the server, and readers share the
            notebook's meshes; "script": `python notebook.py`, app.run() and tests.
        execution: marimo's context of this one run of the cell.
    """

    owner: str
    id: str
    mode: str
    execution: Any


def running_cell() -> MarimoCell | None:
    """Return the marimo cell that this thread runs; None if it runs none."""
    context = _call_marimo("marimo._runtime.context.types", "safe_get_context")
    if context is None:
        return None
    id = getattr(context, "cell_id", None)
    if id is None:
        return None
    filename = getattr(context, "filename", None)
    mode = _call_marimo("marimo._runtime.context.utils", "get_mode")
    return MarimoCell(
        owner=f"{KIND}:{os.path.abspath(filename)}" if filename else f"{KIND}:pid {os.getpid()}",
        id=str(id),
        mode=mode if mode in ("edit", "run") else "script",
        execution=getattr(context, "execution_context", None),
    )


def reader() -> threading.Thread | None:
    """Return the kernel of the reader whose cell this thread runs, in `marimo run`; None elsewhere.

    It is a thread of the server, and ends with the reader's page.
    """
    cell = running_cell()
    return threading.current_thread() if cell is not None and cell.mode == "run" else None


def append_output(mime: tuple[str, Any], ranks: Ranks | None) -> bool:
    """Append a rich display from ranks below the cell that this thread runs, as `mo.output.append` does.

    Args:
        mime: its MIME type and content.
        ranks: the ranks that displayed it, for a heading; None: all ranks of the cell, without a heading.

    Returns:
        Whether there was a marimo page to show it on.
    """
    append = getattr(getattr(sys.modules.get("marimo"), "output", None), "append", None)
    cell = running_cell()
    if append is None or cell is None or cell.mode == "script":
        return False
    if ranks is not None:
        append(_MimeOutput("text/html", f"<small>{name_ranks(ranks)}</small>"))
    append(_MimeOutput(*mime))
    return True


def ask(prompt: str, *, password: bool) -> str | None:
    """Ask the user of the page below the cell that this thread runs; None: this marimo cannot."""
    if password:
        return getpass.getpass(prompt)  # marimo's own, in a notebook that is edited
    reply = _call_marimo("marimo._runtime.input_override", "input_override", prompt)
    return None if reply is None else str(reply)


def has_output() -> bool:
    """Whether the cell that this thread runs has an output already."""
    cell = running_cell()
    return cell is not None and bool(getattr(cell.execution, "output", None))


def marimo_mime(bundle: Mapping[str, Any]) -> tuple[str, Any]:
    """Convert a MIME bundle for marimo: one MIME type and its content.

    Text becomes preformatted HTML without colours, because marimo shows ANSI sequences literally.
    """
    for kind in ("text/html", "image/svg+xml"):
        if kind in bundle:
            return kind, bundle[kind]
    for kind in ("image/png", "image/jpeg"):
        if kind in bundle:
            return kind, f"data:{kind};base64,{bundle[kind]}"
    others = {kind: content for kind, content in bundle.items() if kind != "text/plain"}
    if others:
        return "application/vnd.marimo+mimebundle", others
    return "text/html", f"<pre class='text-xs'>{html.escape(rendering.plain_text(bundle['text/plain']))}</pre>"


class _MimeOutput:
    """An object with a MIME representation only."""

    def __init__(self, kind: str, content: Any) -> None:
        self._mime = kind, content

    def _mime_(self) -> tuple[str, Any]:
        return self._mime


def _call_marimo(module: str, function: str, *args: Any) -> Any:
    """Call one of marimo's functions; None if marimo is not in use, or lacks the function."""
    implementation: Callable[..., Any] | None = getattr(sys.modules.get(module), function, None)
    try:
        return implementation(*args) if implementation is not None else None
    except Exception:
        return None
