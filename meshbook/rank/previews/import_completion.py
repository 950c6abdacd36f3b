"""Completion of `import` lines without importing anything.

IPython's own completer imports the module before the last dot. That would load torch into the notebook's process, or
run a package's code on a rank's service thread beside a cell. Modules that are loaded are looked into; of others the
files are read.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import ast
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# Larger sources are not parsed: completion answers within a moment.
MAX_SOURCE_BYTES: Final = 1 << 20

_COMMANDS: Final = ("import", "from", "%aimport")


def install(shell: InteractiveShell) -> None:
    """Complete this shell's `import` lines by this module, in the place of IPython's completer."""
    dispatcher = shell.strdispatchers["complete_command"]
    for command in _COMMANDS:
        dispatcher.strs.pop(command, None)
        shell.set_hook("complete_command", lambda _shell, event: complete_import(event.line), str_key=command)


def complete_import(line: str) -> list[str]:
    """Return what may stand at the end of `import a.b`, `from a.b import c` or `%aimport a.b`."""
    words = line.split(" ")
    if words[0] not in _COMMANDS or len(words) < 2:
        return []
    if len(words) == 2:
        package = words[1].rpartition(".")[0]
        if not package:
            return sorted({*sys.stdlib_module_names, *(module.name for module in pkgutil.iter_modules())})
        return [f"{package}.{name}" for name in sorted(_submodules(package))]
    if words[0] != "from":
        return []
    return ["import "] if len(words) == 3 else sorted(_contents(words[1]))


def _submodules(package: str) -> set[str]:
    """Return the names of the modules in a package."""
    loaded = sys.modules.get(package)
    names = set() if loaded is None else _names_of(loaded, modules_only=True)
    names.update(module.name for module in pkgutil.iter_modules(_search_path(package)))
    return names


def _contents(module: str) -> set[str]:
    """Return what `from module import` finds."""
    loaded = sys.modules.get(module)
    return _submodules(module) | (_names_in_source(module) if loaded is None else _names_of(loaded, modules_only=False))


def _names_of(module: types.ModuleType, *, modules_only: bool) -> set[str]:
    namespace = dict(vars(module))
    names = {name for name, value in namespace.items() if not modules_only or isinstance(value, types.ModuleType)}
    exported: Any = () if modules_only else namespace.get("__all__", ())
    names.update(name for name in exported if isinstance(name, str))
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def _search_path(package: str) -> list[str]:
    loaded = sys.modules.get(package)
    path: Any = getattr(loaded, "__path__", None)
    if path is None and (spec := _find_spec(package)) is not None:
        path = spec.submodule_search_locations
    return list(path or ())


def _find_spec(module: str) -> ModuleSpec | None:
    """Return the module's spec. `importlib.util.find_spec` would import the packages that it is in."""
    package = module.rpartition(".")[0]
    path = _search_path(package) if package else None
    if package and not path:
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module, path)
        except Exception:  # a finder of the user's
            continue
        if spec is not None:
            return spec
    return None


def _names_in_source(module: str) -> set[str]:
    """Return the names that a module's source binds at its top level; none if it is not Python, or large."""
    spec = _find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return set()
    try:
        with open(spec.origin, "rb") as file:
            source = file.read(MAX_SOURCE_BYTES + 1)
        tree = ast.parse(source if len(source) <= MAX_SOURCE_BYTES else b"")
    except (OSError, SyntaxError, ValueError):
        return set()
    return {name for name in _bound_names(tree.body) if not name.startswith("__")}


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in names if alias.name != "*")
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If(body=inner, orelse=other):
                yield from _bound_names((*inner, *other))
            case ast.Try(body=inner, handlers=handlers, orelse=other):
                yield from _bound_names((*inner, *other, *(one for handler in handlers for one in handler.body)))
