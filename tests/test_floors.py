"""Imports point strictly down, heavy packages are imported only where they are needed, and nothing grows too large.

The tables below are the rule; docs/architecture.md draws the first of them. Every import of the package is read: those
inside functions, those for type checkers only, and modules that are named in strings.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
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
    "replay": 4,  # a rank's part of a recorded cell, in one process
    "controller": 5,
    "tensors": 6,
    "actors": 6,
    "actors.base": 2,  # what an actor's class is made of; ranks know it too
    "actors.shape": 2,  # points and extents, in Monarch's words
    "actors.runtime": 3,  # an actor's life on its rank
    "marimo.meshes": 6,
    "dashboard": 7,
    "gateway": 7,  # meshes for agents and for web programs
    "actor": 7,  # the doors with Monarch's names
    "rdma": 7,
    "distributed": 7,
    "kernel": 8,
    "cli": 8,
    "marimo": 8,
    "testing": 8,
    "__main__": 9,
    "": 9,  # meshbook/__init__.py: the front door. It may open on any floor; no floor may go out through it.
}

# Packages that are slow to import, or that not everyone has, and the only places that may name them.
CONFINED = {
    "torch": {
        "rank": "cells use it, and the process group is one",
        "wire.pickler": "tensors travel as buffers",
        "wire.pickling": "... outside torch's modes",
        "wire.unpickler": "tensors travel as buffers",
        "actors.buffer": "tensors' memory, read and written from other processes",
        "actors.memory": "the same, by kinds of memory",
        "replay": "runs what a rank ran",
        "tensors": "remote tensors are torch's, and their shapes are found with it",
        "controller.scattering": "joins the parts of a tensor that ranks hold",
        "controller.results": "stacks the tensors of all ranks into one",
        "cli.doctor": "says which torch is here and whether it sees a GPU",
        "cli.doctor_gpu": "computes on the GPUs",
    },
    "IPython": {
        "rank": "the shell that runs cells",
        "replay": "the same shell",
        "kernel": "the notebook's own shell, magics, display",
        "controller": "what is shown in a cell, where there is one",
        "cli": "the terminal",
    },
    "ipykernel": {
        "kernel": "the class it extends",
        "cli": "the kernel it starts",
        "dashboard": "has the widget heard beside a running cell",
    },
    "debugpy": {"rank.debug_port": "a port for VS Code, with the first request for one"},
    "anywidget": {"dashboard": "the widget"},
    "textual": {"dashboard": "the screen"},
    "shtab": {"cli.completion": "writes the shells' scripts"},
    "mcp": {"gateway.mcp_server": "agents' protocol"},
    "mcp_types": {"gateway.mcp_server": "agents' protocol"},
    "anyio": {"gateway.mcp_server": "what mcp runs on", "gateway.http_app": "what starlette runs on"},
    "starlette": {"gateway.http_app": "the web", "gateway.events": "the web"},
    "uvicorn": {"gateway.http_server": "serves it"},
    "marimo": {"marimo.executor": "runs its cells"},
    "monarch": {
        "engines.monarch_main": "the process that speaks to Monarch",
        "engines.monarch_jobs": "... and what it asks for",
    },
    "ray": {"engines.ray_main": "the process that speaks to Ray"},
    "transformers": {"rank.tensors.pretrained": "reads models from folders"},
}

# Modules that decide and do not act: a test drives them without a process, a socket or a clock of their own.
PURE = (
    "controller.call_errors", "controller.debugging", "controller.differences", "controller.healed",
    "controller.pending_requests", "controller.redaction", "controller.stop_presses",
    "dashboard.charts", "dashboard.view", "diagnose", "engines.addresses", "errors", "fold",
    "gateway.answers", "gateway.openapi", "gateway.parameters", "host.instructions", "host.ledger",
    "host.open_calls", "host.pending_notices", "host.rank_record", "host.run_times", "host.stop_escalation", "ids",
    "kernel.mesh_options", "kernel.page_sessions",
    "mesh_axes", "placement", "rank.elastic.agreement", "rank.healing.choice",
    "rank.resharding.boxes", "selections", "supervisor.allocation", "supervisor.call_output",
    "supervisor.call_table", "supervisor.cell_sources", "supervisor.checkpoints", "supervisor.clients",
    "supervisor.desync", "supervisor.effects", "supervisor.exit_checks", "supervisor.group_state",
    "supervisor.healing", "supervisor.history", "supervisor.input_requests",
    "supervisor.kept_output", "supervisor.log_searches", "supervisor.machines",
    "supervisor.monitoring", "supervisor.past_cells",
    "supervisor.position_queries", "supervisor.preemption", "supervisor.preemption_points",
    "supervisor.project_sync",
    "supervisor.rank_changes", "supervisor.rank_table", "supervisor.resizing",
    "supervisor.scheduler",
    "supervisor.series", "supervisor.silent_hosts",
    "supervisor.snapshot_requests", "supervisor.stalls", "supervisor.startup",
    "supervisor.state", "supervisor.telemetry", "supervisor.waiting_cells", "tensors.faults",
    "rank.tensors.placement_rules", "wire.codec", "wire.link", "wire.messages", "wire.project_files",
)  # fmt: skip
ACTING = {"asyncio", "multiprocessing", "os", "select", "selectors", "socket", "subprocess", "threading", "time", "zmq"}

# Modules that are named in a string across floors: (who names it, what is named), and why.
NAMED_IN_STRINGS = {
    ("actors.unhandled_faults", "actor"): "where a program may have put its own hook, looked up in sys.modules",
    ("cli.kernels", "kernel"): "the command line of another process",
    ("engines.local", "host.main"): "the command line of another process",
    ("engines.probe", "host.remote"): "the command line of another process, on another machine",
    ("engines.actor_engine", "host.remote"): "the command line of another process, on another machine",
    ("engines.slurm", "host.remote"): "the command line of another process, on another machine",
    ("engines.ssh", "host.remote"): "the command line of another process, on another machine",
    ("host.starter", "rank.forkserver"): "the command line of another process",
    ("host.fresh_starter", "rank.main"): "the command line of another process",
    (
        "rank.actor_hooks",
        "actors.runtime.rank_hooks",
    ): "what answers messages about actors, imported with the first of them",
}

# What is counted, and how large it may be at most.
LIMITS = {
    "lines of a file": 500,
    "lines of a class": 300,
    "methods of a class": 30,
    "branches of a function": 20,
    "classes of one name": 1,
}
# What is larger, by (count, dotted name), and why.
LARGER = {
    ("lines of a class", "controller.mesh.Mesh"): "the public face of a mesh: documented methods of a few lines each",
    ("methods of a class", "controller.mesh.Mesh"): "the same",
}

# Words that once were Meshbook's own, and what is said for them.
REPLACED = {
    "birth": "spawn request", "cabin": "ActorRunner", "glance": "sample", "grounds": "proc backend",
    "island": "stuck group", "lastwords": "crash log", "lifeline": "parent-death signal", "onlooker": "observer",
    "parcel": "payload", "parcels": "payloads", "settle": "complete, resolve, flush, wait",
    "settled": "completed, resolved", "told": "reported, sent, given",
}  # fmt: skip

# An import's name for a module of ours, perhaps with what it has: "meshbook.rank.main", "meshbook.rank.main:run".
NAME_OF_MODULE = re.compile(r"(meshbook(?:\.[a-z_]+)+)(?::[\w.]*)?")


class Import(NamedTuple):
    line: int
    target: str  # dotted, "meshbook.wire.codec" or "torch.distributed"


parsed = functools.cache(ast.parse)  # several tests look at all modules


def modules() -> dict[str, str]:
    """Sources by dotted name under meshbook/; a folder's `__init__.py` by the folder's name, the front door as ""."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def imports(name: str, source: str, known: Mapping[str, str]) -> Iterator[Import]:
    """Every import of a module; `from meshbook.wire import codec` counts as one of `meshbook.wire.codec`, and so does a
    string with that name, but for loggers' names and what NAMED_IN_STRINGS allows."""
    loggers = set[int]()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [_package(name, known, node.level), node.module]))
            for alias in node.names:
                inner_module = f"{base}.{alias.name}"
                is_module = inner_module.removeprefix("meshbook.") in known and base.split(".")[0] == "meshbook"
                yield Import(node.lineno, inner_module if is_module else base)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
            loggers |= {id(argument) for argument in node.args}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers:
            named = NAME_OF_MODULE.fullmatch(node.value)
            target = named[1].removeprefix("meshbook.") if named else None
            if target in known and (name, target) not in NAMED_IN_STRINGS:
                yield Import(node.lineno, f"meshbook.{target}")


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
        for line, target in imports(name, source, sources):
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
    """Modules that import each other, directly or through others."""
    edges = {
        name: {
            target.removeprefix("meshbook.")
            for _, target in imports(name, source, sources)
            if target.startswith("meshbook.")
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


def counts(sources: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Each count of LIMITS with the dotted name of what was counted, and the number."""
    names = Counter[str]()
    for module, source in sources.items():
        yield "lines of a file", module, source.count("\n")
        for dotted, node in definitions(module, parsed(source)):
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
                yield "lines of a class", dotted, (node.end_lineno or 0) - node.lineno + 1
                yield "methods of a class", dotted, sum(isinstance(inner, FUNCTION) for inner in node.body)
            else:
                yield "branches of a function", dotted, sum(map(branches, own_nodes(node)))
    for class_name, number in names.items():
        yield "classes of one name", class_name, number


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def definitions(
    within: str, node: ast.AST
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every class and function below a node, by its dotted name."""
    for inner in ast.iter_child_nodes(node):
        named = isinstance(inner, (ast.ClassDef, *FUNCTION))
        dotted = f"{within}.{inner.name}" if named else within  # type: ignore[attr-defined]
        if isinstance(inner, (ast.ClassDef, *FUNCTION)):
            yield dotted, inner
        yield from definitions(dotted, inner)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside it."""
    for inner in ast.iter_child_nodes(function):
        yield inner
        if not isinstance(inner, (*FUNCTION, ast.ClassDef, ast.Lambda)):
            yield from own_nodes(inner)


def branches(node: ast.AST) -> int:
    """How many more ways there are through a function because of this node."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    forks = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)
    return isinstance(node, (*forks, ast.Assert))


def replaced_words(sources: Mapping[str, str]) -> list[str]:
    """One sentence for each word of REPLACED in the text of a module: its names, comments and strings."""
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(REPLACED)})(?![a-z])", re.IGNORECASE)
    return [
        f"meshbook.{module}, line {source.count(chr(10), 0, found.start()) + 1}: for {found[0]!r} we say"
        f" {REPLACED[found[0].lower()]}"
        for module, source in sources.items()
        for found in pattern.finditer(source)
    ]


def test_nothing_is_larger_than_the_limits_without_a_reason() -> None:
    larger = {(count, name): number for count, name, number in counts(modules()) if number > LIMITS[count]}
    assert {key: number for key, number in larger.items() if key not in LARGER} == {}
    assert LARGER.keys() - larger.keys() == set(), "these have become smaller: take them out of LARGER"


def test_replaced_words_do_not_come_back() -> None:
    assert replaced_words(modules()) == []


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


def test_what_the_documentation_names_is_there() -> None:
    folders = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_")
    for page in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for named in re.findall(rf"`((?:{folders})/[a-z_/.]*)`", page.read_text()):
            path = PACKAGE / named
            assert path.exists() or path.with_suffix(".py").exists(), f"{page.name} names {named}"


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
        ("host.agent", "from ray.util import placement_group", "ray may be imported only in engines.ray_main"),
        ("supervisor.state", "import zmq", "this module decides and does not act; zmq belongs to the edge"),
        ("wire.codec", "module = 'meshbook.supervisor.state:MeshState'", "(wire) imports meshbook.supervisor.state"),
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
    typing = {**house, "wire.keys": "if TYPE_CHECKING:\n    from meshbook.wire import codec"}
    assert circles(typing) == ["wire.codec -> wire.loop -> wire.keys -> wire.codec"]
    in_a_string = {**house, "wire.keys": "codec = import_module('meshbook.wire.codec')"}
    assert circles(in_a_string) == ["wire.codec -> wire.loop -> wire.keys -> wire.codec"]
    logger = {**house, "wire.keys": "log = logging.getLogger('meshbook.wire.codec')"}
    assert circles(logger) == []


def test_what_is_too_large_is_counted() -> None:
    branchy = "def f(x):\n" + "    if x and x or not x: pass\n" * 7 + "    def g(): return [1 for _ in x]\n"
    large = "class Large:\n" + "    def f(self): ...\n" * 31
    found = {
        (count, name): number for count, name, number in counts({"a": branchy, "b": large, "c": "class Large: ..."})
    }
    assert found["branches of a function", "a.f"] == 21
    assert found["branches of a function", "a.f.g"] == 1
    assert found["methods of a class", "b.Large"] == 31
    assert found["lines of a class", "b.Large"] == 32
    assert found["lines of a file", "a"] == 9
    assert found["classes of one name", "Large"] == 2


def test_a_replaced_word_is_found_in_names_and_in_prose() -> None:
    source = "def was_told(): ...\n# what the Cabin has\nsettlement = 'a birthday'"
    assert [said.split(": for ")[0] for said in replaced_words({"a": source})] == [
        "meshbook.a, line 1",
        "meshbook.a, line 2",
    ]
