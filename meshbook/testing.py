"""The pytest plugin: a `mesh` fixture, and tests whose body runs on every rank (`@pytest.mark.mesh(ranks=4)`).

Meshes are shared by the tests of a run and clean before each: names that a test has bound on the ranks are gone. A mesh
that a test has damaged is ended, and the next test that needs one gets another. pytest loads this module in every run
of an environment that has Meshbook, so nothing of the mesh is imported before a test needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshbook.controller.mesh import Mesh

# Seconds that a test's body may take on the ranks; `@pytest.mark.mesh(timeout=…)` sets another limit.
DEFAULT_TIMEOUT_S = 120.0
DEFAULT_RANKS = 2

# Seconds that ranks may take to come back from an interrupt, and to forget a test's names.
_STOP_TIMEOUT_S = 10.0
_MARKER = "mesh(ranks=N, axes={'dp': 2, 'tp': 2}, timeout=120): run the test's body on every rank of a mesh"
_KNOWN_OPTIONS = {"ranks", "axes", "timeout"}
_CLEAN_UP = """
for _name in [name for name in globals() if name not in {kept!r} and not name.startswith("_")]:
    del globals()[_name]
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("meshbook")
    group.addoption("--mesh-ranks", type=int, metavar="N", help=f"ranks of a mesh that names none ({DEFAULT_RANKS})")
    parser.addini("mesh_ranks", f"ranks of a mesh that names none ({DEFAULT_RANKS})")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _options_of(item)  # a misspelt option ends the run before it begins


class Meshes:
    """The meshes of a test run, by their axes."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[tuple[str, int], ...], tuple[Mesh, frozenset[str]]] = {}

    def get(self, axes: dict[str, int]) -> Mesh:
        """Return a mesh with these axes: whole, idle, and without names of other tests."""
        from meshbook.controller.starting import create_mesh

        key = tuple(axes.items())
        if (known := self._meshes.get(key)) is not None:
            mesh, kept = known
            if self._clean(mesh, kept):
                return mesh
            del self._meshes[key]
            mesh.stop()
        mesh = create_mesh(axes)
        names = mesh.run("sorted(globals())", echo=False).values.same()
        self._meshes[key] = mesh, frozenset(names)
        return mesh

    def close(self) -> None:
        for mesh, _ in self._meshes.values():
            mesh.stop()
        self._meshes.clear()

    def _clean(self, mesh: Mesh, kept: frozenset[str]) -> bool:
        """Remove what a test has left on the ranks; return whether the mesh can be used again."""
        from meshbook.errors import MeshbookError

        try:
            if mesh.session.lost or mesh.session.ended is not None:
                return False
            mesh.interrupt()
            mesh.run(_CLEAN_UP.format(kept=sorted(kept)), echo=False, timeout=_STOP_TIMEOUT_S)
            return mesh.status().groups == "ready"
        except MeshbookError:
            return False


@pytest.fixture(scope="session")
def meshes() -> Iterator[Meshes]:
    """The meshes of this test run."""
    meshes = Meshes()
    yield meshes
    meshes.close()


@pytest.fixture
def mesh(meshes: Meshes, request: pytest.FixtureRequest) -> Mesh:
    """A mesh that no other test has left anything on: as `@pytest.mark.mesh` says, else of `--mesh-ranks` ranks."""
    return meshes.get(_axes_of(request.node))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test that has the marker and no `mesh` among its arguments on the ranks."""
    names = pyfuncitem._fixtureinfo.argnames
    if pyfuncitem.get_closest_marker("mesh") is None or "mesh" in names:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    meshes = pyfuncitem._request.getfixturevalue("meshes")
    timeout_s = float(_options_of(pyfuncitem).get("timeout", DEFAULT_TIMEOUT_S))
    _run_on_ranks(meshes.get(_axes_of(pyfuncitem)), pyfuncitem.obj, arguments, timeout_s)
    return True


def _options_of(item: pytest.Item) -> dict[str, Any]:
    marker = item.get_closest_marker("mesh")
    if marker is None:
        return {}
    unknown = [repr(argument) for argument in marker.args] + sorted(marker.kwargs.keys() - _KNOWN_OPTIONS)
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.mesh does not know {unknown[0]}; it is {_MARKER}")
    return dict(marker.kwargs)


def _axes_of(item: pytest.Item) -> dict[str, int]:
    options = _options_of(item)
    if "axes" in options:
        return dict(options["axes"])
    given = options.get("ranks") or item.config.getoption("--mesh-ranks") or item.config.getini("mesh_ranks")
    return {"rank": int(given or DEFAULT_RANKS)}


def _run_on_ranks(mesh: Mesh, function: Callable[..., object], arguments: dict[str, Any], timeout_s: float) -> None:
    """Call a test's function on every rank; fail with what the ranks raised, equal failures once."""
    from meshbook.controller import running
    from meshbook.controller.console import Console
    from meshbook.errors import CellInterrupted, MeshbookError, MeshTimeout

    session, ranks = mesh.session, mesh.resolve_ranks(None)
    label = function.__name__
    failure, skipped = "", []
    try:
        with _pickled_by_value(function):
            command = session.call_command(call_on_rank, (function, arguments), {}, ranks, label=label)
        future = running.submit_command(session, command, Console(ranks, echo=True))
        try:
            reasons = dict(future.result(timeout_s).values)
            skipped = [reason for reason in reasons.values() if reason is not None]
        except MeshTimeout:
            failure = f"{label} did not end on all ranks within {timeout_s:g} s\n\n{mesh.why()}"
            future.interrupt()
            future.exception(_STOP_TIMEOUT_S)
        except KeyboardInterrupt as error:
            if not isinstance(error, CellInterrupted):
                future.interrupt()
            raise
    except MeshbookError as error:
        failure = failure or _describe(error)
    if failure:
        pytest.fail(failure, pytrace=False)
    if skipped:
        pytest.skip(skipped[0])


def _describe(error: Exception) -> str:
    from meshbook.fold.rendering import plain_text

    rendered = getattr(error, "rendered", ())
    return plain_text("\n".join(rendered)) if rendered else f"{type(error).__name__}: {error}"


def call_on_rank(function: Callable[..., object], arguments: dict[str, Any]) -> str | None:
    """Call a test's function on this rank; return why it was skipped, if it was."""
    try:
        function(**arguments)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    except pytest.fail.Exception as failed:
        raise AssertionError(str(failed)) from None
    return None


class _pickled_by_value:
    """In this block, functions of a test's module are pickled with their code: ranks cannot import the module."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._module = sys.modules.get(function.__module__)

    def __enter__(self) -> None:
        import cloudpickle

        if self._module is not None:
            cloudpickle.register_pickle_by_value(self._module)

    def __exit__(self, *_: object) -> None:
        import cloudpickle

        if self._module is not None:
            cloudpickle.unregister_pickle_by_value(self._module)
