"""Modules that only this machine has, when ranks on others fail to import them."""

from __future__ import annotations

import importlib.machinery
import re
from collections.abc import Sequence

from meshbook.errors import CellError, Failure, MeshbookError
from meshbook.ids import name_ranks
from meshbook.wire.messages import MeshSpec


def add_hint(error: MeshbookError, spec: MeshSpec | None) -> MeshbookError:
    """Return an error with what to do about a module that only this machine has, if that is what failed."""
    if isinstance(error, CellError) and (hint := missing_module_hint(error.failures, spec)):
        error.rendered = (*error.rendered, "", hint)
        error.add_note(hint)
    return error


def missing_module_hint(failures: Sequence[Failure], spec: MeshSpec | None) -> str:
    """Return what to do about a module that ranks on other machines lack and this one has; "" if that is not why."""
    if spec is None or not spec.on:
        return ""
    for failure in failures:
        # A function, a value or an actor's class that could not be rebuilt there is a TransferError; an actor's failure
        # that no call gets has the exception's class in its text.
        is_import = failure.ename == "ModuleNotFoundError" or re.search(
            "needs module `|ModuleNotFoundError: ", failure.evalue
        )
        found = re.search(r"No module named '([^']+)'", failure.evalue)
        if not is_import or found is None or (place := _place_here(name := found[1])) is None:
            continue
        only_here = f"{name} is a module of this machine ({place}), and {name_ranks(failure.ranks)} cannot import it. "
        if "site-packages" in place or "dist-packages" in place:
            return (
                f"{only_here}Install it on the other machines, or have uv do it there (%mesh restart --sync --env uv)"
            )
        if spec.project is None:
            return (
                f"{only_here}%mesh restart --sync brings the project folder to all machines (create_mesh(…, sync=True))"
            )
        if not place.startswith(f"{spec.project.root}/"):
            return f"{only_here}It is not in the project that --sync brings there, {spec.project.root}: move it there"
        return (
            f"{only_here}If git ignores it, name it: %mesh restart --sync {place}. If it is new, %mesh sync brings it "
            "there"
        )
    return ""


def _place_here(name: str) -> str | None:
    """Return where this process finds a module; None: nowhere. Imports nothing."""
    locations: Sequence[str] | None = None
    place = None
    for end in range(1, name.count(".") + 2):
        inner = ".".join(name.split(".")[:end])
        try:
            found = importlib.machinery.PathFinder.find_spec(inner, locations)
        except (ImportError, ValueError, OSError):
            return None
        if found is None:
            return None
        locations = list(found.submodule_search_locations or ())
        place = found.origin or next(iter(locations), None)
    return place
