"""What the sources of past cells say: which of them a new rank runs, and which names depend on the rank. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from meshbook.ids import Ranks
from meshbook.wire.messages import CellToReplay, HistoryEntry

# Source of cells that is replayed, in characters: the latest, if they are more.
_MAX_REPLAYED_CHARS = 4 << 20
# What a rank's own number is called: names of a rank's namespace, and functions of torch.distributed.
_RANK_NAMES = frozenset(
    {"rank", "local_rank", "device", "get_rank", "get_local_rank", "get_coordinate", "RANK", "LOCAL_RANK"}
)
# What the number of ranks is called.
_SIZE_NAMES = frozenset({"world_size", "get_world_size", "WORLD_SIZE"})
# Lines that are not Python: magics and shell commands.
_MAGIC_LINE = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)


def cells_to_replay(entries: Iterable[HistoryEntry], new_ranks: Ranks) -> tuple[CellToReplay, ...]:
    """Return the cells that new ranks run, oldest first: of equal ones the last, and only those that define something.

    Those are cells that ran on all ranks that the mesh had then, or on ranks of these numbers.

    A setup cell that did not end well is run as another cell: for its imports and definitions. One that is run again
    without `--setup` stays a setup cell.
    """
    cells: dict[str, CellToReplay] = {}
    for entry in entries:
        if entry.status == "running" or not (entry.whole_mesh or set(new_ranks) <= set(entry.ranks)):
            continue  # it waits for the new ranks, or was not theirs
        before = cells.get(entry.source)
        is_setup = entry.status == "ok" if entry.setup else before is not None and before.setup
        if is_setup or _may_define(entry.source):
            cells.pop(entry.source, None)
            cells[entry.source] = CellToReplay(entry.source, entry.number, entry.label, is_setup)
    found, num_chars = list(cells.values()), 0
    for index in range(len(found) - 1, -1, -1):
        num_chars += len(found[index].source)
        if num_chars > _MAX_REPLAYED_CHARS:
            return tuple(found[index + 1 :])
    return tuple(found)


def _may_define(source: str) -> bool:
    """Whether a cell may import something, define a function or class, or bind a constant."""
    body = _parse(source)
    if body is None:
        return any(word in source for word in ("import ", "def ", "class "))
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.Try)
    return any(isinstance(node, (*kinds, ast.Assign, ast.AnnAssign)) for node in body)


def rank_dependent_names(sources: Iterable[str]) -> tuple[str, ...]:
    """Return the names that cells compute from the rank's number, directly or through other such names."""
    return _dependent_names(sources, _RANK_NAMES)


def size_dependent_names(sources: Iterable[str]) -> tuple[str, ...]:
    """Return the names that cells compute from the number of ranks, directly or through other such names."""
    return _dependent_names(sources, _SIZE_NAMES)


def setup_names(entries: Iterable[HistoryEntry]) -> tuple[str, ...]:
    """Return the names that setup cells bind, which every new rank therefore has."""
    found = set[str]()
    for entry in entries:
        if entry.setup and entry.status == "ok":
            for node in _parse(entry.source) or ():
                found.update(_bound_names(node))
    return tuple(sorted(found))


def _dependent_names(sources: Iterable[str], words: frozenset[str]) -> tuple[str, ...]:
    found = set[str]()
    for source in sources:
        for node in _parse(source) or ():
            _add_dependent(node, found, words, is_dependent=False)
    return tuple(sorted(found))


def _add_dependent(node: ast.stmt, found: set[str], words: frozenset[str], *, is_dependent: bool) -> None:
    """Add the names that a statement binds to something that depends on one of these words.

    Args:
        is_dependent: whether the statement runs depends on it already.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    head: list[ast.AST] = [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.stmt)]
    is_dependent = is_dependent or any(_mentions(inner, found, words) for inner in head)
    if is_dependent:
        found.update(name for inner in head for name in _bound_names(inner))
    for inner in ast.iter_child_nodes(node):
        statements = inner.body if isinstance(inner, (ast.ExceptHandler, ast.match_case)) else [inner]
        for statement in statements:
            if isinstance(statement, ast.stmt):
                _add_dependent(statement, found, words, is_dependent=is_dependent)


def _mentions(node: ast.AST, names: set[str], words: frozenset[str]) -> bool:
    """Whether an expression uses one of these words, or one of these names."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            if inner.id in words or inner.id in names:
                return True
        elif (isinstance(inner, ast.Attribute) and inner.attr in words) or (
            isinstance(inner, ast.Constant)
            and isinstance(inner.value, str)
            and inner.value.isupper()
            and inner.value in words
        ):
            return True
    return False


def _bound_names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def _parse(source: str) -> list[ast.stmt] | None:
    """Return a cell's statements without its magics; None if it is not Python."""
    for text in (source, _MAGIC_LINE.sub(r"\1pass", source)):
        try:
            return ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError):
            continue
    return None
