"""How a notebook shows failures on the ranks: their class name, and the next step. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, CellInterrupted, MeshbookError
from meshbook.kernel.transform import BOTH_LINE_MAGICS, CONTROLLER_MAGICS, LOCAL_CELL_MAGICS, LOCAL_LINE_MAGICS


def parse_missing_name(message: str) -> str | None:
    """Return `lr` from `name 'lr' is not defined`; None: another message."""
    begin, end = "name '", "' is not defined"
    return message[len(begin) : message.index(end)] if message.startswith(begin) and end in message else None


def _method_of_mesh(message: str) -> str | None:
    """Return `pull` from `'DeviceMesh' object has no attribute 'pull'`, if `meshbook.Mesh` has it."""
    found = re.match(r"'DeviceMesh' object has no attribute '([a-z]\w*)'", message)
    return found[1] if found is not None and hasattr(Mesh, found[1]) else None


def suggest(word: str, known: Iterable[str], before: str = "") -> str:
    """Return `did you mean status?`, or an empty string if no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {before}{close[0]}?" if close else ""


def _missing_magic_hint(message: str) -> str:
    """Return what to type instead of a magic that ranks do not have; empty for another message, or without advice."""
    found = re.search(r"`(%{1,2})(\w+)` not found", message)
    if found is None:
        return ""
    sign, name = found.groups()
    if name in ("autoreload", "aimport"):
        return "%load_ext autoreload brings it"
    if name not in LOCAL_LINE_MAGICS | LOCAL_CELL_MAGICS | CONTROLLER_MAGICS:
        line_magics = LOCAL_LINE_MAGICS | BOTH_LINE_MAGICS
        return suggest(name, line_magics if sign == "%" else LOCAL_CELL_MAGICS | CONTROLLER_MAGICS, sign)
    sign = "%" if name in LOCAL_LINE_MAGICS else "%%"
    return (
        f"{sign}{name} runs in the notebook's own process: it stands at the top of a cell, before code for the "
        "ranks, or in a %%controller cell"
    )


def with_raised_class_name(error: CellError) -> CellError:
    """Return the error in a class named like the exception raised on the ranks, if all raised the same class.

    Readers of the reply's `ename` and `evalue` (papermill, tests, people) then see ZeroDivisionError.
    """
    names = {failure.ename for failure in error.failures}
    if not names and isinstance(error, CellInterrupted):  # interrupted before it began
        names = {"KeyboardInterrupt"}
    if len(names) != 1:
        return error
    values = {failure.evalue for failure in error.failures}
    plain = len(values) == 1 and not error.succeeded and not error.released and not isinstance(error, CellInterrupted)
    summary = values.pop() if plain else str(error)
    kind = type(names.pop(), (type(error),), {"__module__": type(error).__module__, "__doc__": type(error).__doc__})
    named: CellError = kind(error.failures, error.succeeded, released=error.released, summary=summary)
    named.rendered = error.rendered
    return named


def next_step_hints(error: CellError, is_user_bound: Callable[[str], bool]) -> list[str]:
    """Return lines to append to a failure that say what to type next; empty if there is no better advice.

    Args:
        is_user_bound: whether the user bound a name in the notebook's own process.
    """
    found = []
    for failure in error.failures:
        if failure.ename == "NameError" and (name := parse_missing_name(failure.evalue)) and is_user_bound(name):
            found.append(f"`{name}` lives on the controller; %mesh push {name} copies it to the ranks")
        elif failure.ename == "AttributeError" and (name := _method_of_mesh(failure.evalue)):
            found.append(
                f"in this cell `mesh` is torch's DeviceMesh, on the ranks; mesh.{name} is Meshbook's own: call it in a "
                "%%controller cell, where `mesh` is the mesh"
            )
        elif failure.ename == "UsageError" and (hint := _missing_magic_hint(failure.evalue)):
            found.append(hint)
    return ["", *dict.fromkeys(found)] if found else []


def hide_traceback(error: MeshbookError) -> None:
    """Make IPython show only the error's message: the stack above it is Meshbook's own."""
    if not hasattr(error, "_render_traceback_"):
        text = f"\x1b[31m{type(error).__name__}\x1b[39m: {error}"
        error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]  # IPython asks the exception for it
