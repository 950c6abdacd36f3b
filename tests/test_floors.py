"""Imports point strictly down, and what is heavy or impure is imported only where it is needed.

The tables below are the rule; docs/architecture.md draws the first of them. Every import statement of the package is
read, those inside functions and those for type checkers only included: what a file cannot name, it cannot lean on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meshbook"

# Module or folder under meshbook/, and its floor. The longest entry that fits a module is the module's own. Whatever
# shares a floor with another entry is a stranger to it; inside one entry, modules import each other freely.
FLOORS = {
    "ids": 0,
    "errors": 0,
    "exceptions": 1,  # the names of `errors` that Monarch's users know
    "clock": 0,
    "version": 0,
    "mesh_axes": 1,
    "placement": 1,
    "wire.messages": 1,  # words only, so that folding, which is about words, needs no sockets
    "wire": 2,
    "fold": 2,
    "diagnose": 2,
    "data": 2,
    "selections": 2,
    "marimo.page": 3,  # what is shown below a marimo cell
    "rank": 3,
    "host": 3,
    "engines": 3,
    "supervisor": 4,
    "controller": 5,
    "tensors": 6,
    "actors": 6,
    "actors.base": 2,  # what an actor's class is made of; ranks know it too
    "actors.shape": 2,  # points and extents, in Monarch's words
    "actors.runtime": 3,  # an actor's life on its rank
    "marimo.meshes": 6,
    "dashboard": 7,
    "actor": 7,  # the doors with Monarch's names
    "rdma": 7,
    "kernel": 8,
    "cli": 8,
    "marimo": 8,
    "__main__": 9,
    "": 9,  # meshbook/__init__.py: the front door. It may open on any floor; no floor may go out through it.
}

# Packages that are slow to import, or that not everyone has, and the only places that may name them.
CONFINED = {
    "torch": {
        "rank": "cells use it, and the process group is one",
        "wire.pickling": "tensors travel as buffers",
        "actors.buffer": "tensors' memory, read and written from other processes",
        "actors.memory": "the same, by kinds of memory",
        "tensors": "remote tensors are torch's, and their shapes are found with it",
        "controller.scattering": "joins the parts of a tensor that ranks hold",
        "controller.results": "stacks the tensors of all ranks into one",
        "cli.doctor": "says which torch is here and whether it sees a GPU",
    },
    "IPython": {
        "rank": "the shell that runs cells",
        "kernel": "the notebook's own shell, magics, display",
        "controller": "what is shown in a cell, where there is one",
        "cli": "the terminal",
    },
    "ipykernel": {
        "kernel": "the class it extends",
        "cli": "the kernel it starts",
        "dashboard": "has the widget heard beside a running cell",
    },
    "anywidget": {"dashboard": "the widget"},
    "textual": {"dashboard": "the screen"},
    "marimo": {"marimo.executor": "runs its cells"},
    "monarch": {"engines": "an engine"},
    "ray": {"engines": "an engine"},
}

# Modules that decide and do not act: a test drives them without a process, a socket or a clock of their own.
PURE = (
    "controller.call_errors", "controller.pending_requests", "controller.stop_presses",
    "dashboard.charts", "dashboard.view", "diagnose", "errors", "fold",
    "host.instructions", "host.ledger", "host.open_calls", "host.rank_record", "host.stop_escalation",
    "ids", "kernel.mesh_options", "mesh_axes", "placement", "selections",
    "supervisor.call_output", "supervisor.call_table", "supervisor.clients", "supervisor.desync",
    "supervisor.effects", "supervisor.group_state", "supervisor.history", "supervisor.monitoring",
    "supervisor.position_queries", "supervisor.rank_table", "supervisor.scheduler", "supervisor.series",
    "supervisor.snapshot_requests", "supervisor.stalls", "supervisor.startup", "supervisor.state",
    "supervisor.telemetry", "tensors.faults", "tensors.placement_rules", "wire.codec", "wire.messages",
)  # fmt: skip
ACTING = {"asyncio", "multiprocessing", "os", "select", "selectors", "socket", "subprocess", "threading", "time", "zmq"}


class Import(NamedTuple):
    line: int
    target: str  # dotted, "meshbook.wire.codec" or "torch.distributed"
    typing_only: bool


def modules() -> dict[str, str]:
    """Sources by dotted name under meshbook/; a folder's `__init__.py` by the folder's name, the front door as ""."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def imports(name: str, source: str, known: Mapping[str, str]) -> Iterator[Import]:
    """Every import of a module; `from meshbook.wire import codec` counts as one of `meshbook.wire.codec`."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for statement in block.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        typing_only = id(node) in for_types
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [_package(name, known, node.level), node.module]))
            for alias in node.names:
                inner_module = f"{base}.{alias.name}"
                is_module = inner_module.removeprefix("meshbook.") in known and base.split(".")[0] == "meshbook"
                yield Import(node.lineno, inner_module if is_module else base, typing_only)


def _package(name: str, known: Mapping[str, str], level: int) -> str:
    """What the dots of a relative import stand for, seen from module `name`; nothing for an absolute one."""
    if level == 0:
        return ""
    parts = ["meshbook", *filter(None, name.split("."))]
    is_folder = name == "" or any(other.startswith(f"{name}.") for other in known)
    return ".".join(parts[: len(parts) - level + is_folder])


def entry(name: str) -> str | None:
    """The entry of FLOORS that a module belongs to; None: it has no floor."""
    if name == "":
        return ""
    parts = name.split(".")
    return next((key for end in range(len(parts), 0, -1) if (key := ".".join(parts[:end])) in FLOORS), None)


def stands_in(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def trespasses(sources: Mapping[str, str]) -> list[str]:
    """One sentence for each import that breaks a rule, and for each module without a floor."""
    found = []
    for name, source in sources.items():
        own = entry(name)
        if own is None:
            found.append(f"meshbook.{name} has no floor: give it one in FLOORS")
            continue
        for line, target, _ in imports(name, source, sources):
            where = f"{'meshbook.' + name if name else 'meshbook'}, line {line}"
            top, _, rest = target.partition(".")
            if top == "meshbook":
                other = entry(rest)
                if other is None:
                    found.append(f"{where}: {target} has no floor")
                elif other != own and FLOORS[other] >= FLOORS[own]:
                    found.append(
                        f"{where}: floor {FLOORS[own]} ({own}) imports {target} of floor {FLOORS[other]};"
                        f" imports point strictly down"
                    )
            elif top in CONFINED and not stands_in(name, CONFINED[top]):
                found.append(f"{where}: {top} may be imported only in {', '.join(CONFINED[top])}")
            elif top in ACTING and stands_in(name, PURE):
                found.append(f"{where}: this module decides and does not act; {top} belongs to the edge")
    return found


def circles(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other, directly or round a few corners, imports for type checkers aside."""
    edges = {
        name: {
            target.removeprefix("meshbook.")
            for _, target, typing_only in imports(name, source, sources)
            if target.startswith("meshbook.") and not typing_only
        }
        & (sources.keys() - {name})
        for name, source in sources.items()
    }
    found, done = [], set[str]()

    def walk(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(edges[name]):
                walk(target, (*path, name))
            done.add(name)

    for name in sorted(edges):
        walk(name, ())
    return found


def test_imports_point_strictly_down() -> None:
    assert trespasses(modules()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(modules()) == []


def test_every_entry_of_the_table_stands_for_something() -> None:
    known = modules()
    assert {key for key in FLOORS if not any(entry(name) == key for name in known)} == set()
    assert {name for name in PURE if not any(stands_in(other, (name,)) for other in known)} == set()
    places = {place for allowed in CONFINED.values() for place in allowed}
    assert {place for place in places if not any(stands_in(other, (place,)) for other in known)} == set()


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("wire.codec", "import meshbook.supervisor.state", "(wire) imports meshbook.supervisor.state of floor 4"),
        ("wire.codec", "def late():\n    from meshbook.controller import values", "line 2: floor 2 (wire) imports"),
        ("wire.codec", "from ..controller import values", "imports meshbook.controller.values of floor 5"),
        ("wire", "from .messages import Hello\nfrom ..rank import main", "line 2: floor 2 (wire) imports"),
        ("wire.codec", "if TYPE_CHECKING:\n    from meshbook.rank.main import run", "imports meshbook.rank.main"),
        ("host.agent", "from meshbook.rank import main", "floor 3 (host) imports meshbook.rank.main of floor 3"),
        ("fold.lines", "from meshbook.wire.codec import encode", "(fold) imports meshbook.wire.codec of floor 2"),
        ("fold.lines", "from meshbook.wire import codec", "(fold) imports meshbook.wire.codec of floor 2"),
        (
            "mesh_axes",
            "from meshbook.wire.messages import Hello",
            "(mesh_axes) imports meshbook.wire.messages of floor 1",
        ),
        ("rank.main", "import meshbook", "floor 3 (rank) imports meshbook of floor 9"),
        ("rank.main", "from meshbook import Mesh", "floor 3 (rank) imports meshbook of floor 9"),
        ("attic", "", "meshbook.attic has no floor"),
        ("wire.codec", "import meshbook.attic", "meshbook.attic has no floor"),
        ("supervisor.state", "import torch", "torch may be imported only in rank"),
        ("", "def attach():\n    import torch.nn", "torch may be imported only in rank"),
        ("host.agent", "from ray.util import placement_group", "ray may be imported only in engines"),
        ("supervisor.state", "import zmq", "this module decides and does not act; zmq belongs to the edge"),
        ("fold.lines", "from time import sleep", "this module decides and does not act; time belongs to the edge"),
    ],
)
def test_a_planted_trespass_is_found(module: str, source: str, complaint: str) -> None:
    house = dict.fromkeys(("wire", "wire.codec", "rank.main", "controller.values", "supervisor.state"), "")
    assert [said for said in trespasses({**house, module: source}) if complaint in said]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("supervisor.state", "from meshbook.fold import lines\nfrom meshbook import ids"),
        ("wire.codec", "from . import messages, keys\nfrom ..ids import Rank"),
        ("fold.lines", "from meshbook.wire import messages\nfrom meshbook.wire.messages import Line"),
        ("rank.executor", "def late():\n    import torch\n    from meshbook.rank import main"),
        ("", "from meshbook.controller import values\nimport meshbook.ids\nfrom . import ids"),
    ],
)
def test_what_is_allowed_is_not_complained_of(module: str, source: str) -> None:
    names = ("ids", "wire.messages", "wire.keys", "wire.codec", "fold", "fold.lines", "rank.main", "controller.values")
    assert trespasses({**dict.fromkeys(names, ""), module: source}) == []


def test_a_planted_circle_is_found() -> None:
    house = {
        "wire.loop": "def late():\n    from meshbook.wire.keys import key",
        "wire.keys": "from meshbook.wire import codec",
        "wire.codec": "import meshbook.wire.loop",
    }
    assert circles(house) == ["wire.codec -> wire.loop -> wire.keys -> wire.codec"]
    apart = {**house, "wire.keys": "if TYPE_CHECKING:\n    from meshbook.wire import codec"}
    assert circles(apart) == []
