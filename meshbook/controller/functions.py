"""Functions that run on a mesh: `@mesh.remote`, and the body of a function as a cell (`@mesh.cell`)."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, ParamSpec, Protocol

from meshbook.controller import running
from meshbook.controller.console import Console, find_prompter
from meshbook.controller.results import CellResult, RankValues
from meshbook.controller.session import Session
from meshbook.errors import UsageError, repr_of
from meshbook.ids import Ranks

P = ParamSpec("P")


class MeshRunner(Protocol):
    """Runs code on every rank: a `Mesh`."""

    @property
    def session(self) -> Session: ...

    def run(self, source: str, /) -> Any: ...

    def resolve_ranks(self, ranks: None, /) -> Ranks: ...


def _check_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if a function cannot be called so: here, where the user's line is."""
    if not callable(function):
        raise TypeError(f"{repr_of(function)} cannot be called; source text runs with mesh.run(source)")
    if isinstance(function, FunctionType):
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}{signature}: {error}") from None


class RemoteFunction(Generic[P]):
    """A function that runs on every rank of its mesh when called."""

    def __init__(self, mesh: MeshRunner, function: Callable[P, Any], timeout: float | None = None) -> None:
        self._mesh, self._function, self._timeout = mesh, function, timeout
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> RankValues:
        _check_arguments(self._function, args, kwargs)
        session = self._mesh.session
        chosen_at, ranks = session.info.num_rank_changes, self._mesh.resolve_ranks(None)
        command = session.call_command(
            self._function,
            args,
            kwargs,
            ranks,
            chosen_at=chosen_at,
            allow_input=self._timeout is None and find_prompter() is not None,
            label=f"{getattr(self._function, '__name__', 'the function')}()",
            record_bytes=session.record_bytes,
        )
        return running.run_command(session, command, Console(ranks, echo=True), self._timeout).values

    def on(self, mesh: MeshRunner) -> RemoteFunction[P]:
        """Return the same function on another mesh, or on a slice of this one."""
        return RemoteFunction(mesh, self._function, self._timeout)

    def within(self, timeout: float | None) -> RemoteFunction[P]:
        """Return the same function with a time limit for each call.

        Args:
            timeout: seconds after which a call is interrupted on the ranks and raises MeshTimeout; None: no limit.
        """
        return RemoteFunction(self._mesh, self._function, timeout)

    def __repr__(self) -> str:
        return f"<{getattr(self._function, '__name__', 'function')} on {self._mesh!r}>"


class FunctionBodyCell:
    """A function's body as a cell: `result` is the result of the last run; call the object to run it again."""

    def __init__(self, mesh: MeshRunner, function: Callable[[], Any]) -> None:
        self._mesh = mesh
        self.__name__ = function.__name__
        self.source = function_body_source(function)
        self.result: CellResult = mesh.run(self.source)

    def __call__(self) -> CellResult:
        self.result = self._mesh.run(self.source)
        return self.result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result, name)

    def __repr__(self) -> str:
        return repr(self.result)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.result._repr_mimebundle_()

    def _mime_(self) -> tuple[str, Any]:
        return self.result._mime_()


def function_body_source(function: Callable[..., Any]) -> str:
    """Return the dedented source of a function's body; a `return` at its end becomes the cell's value.

    Raises:
        UsageError: it takes parameters, or its source cannot be found.
    """
    if inspect.signature(function).parameters:
        raise UsageError(
            f"{function.__name__} takes parameters, and a cell has none; use @mesh.remote for a function with arguments"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise UsageError(
            f"the source of {function.__name__} cannot be found ({error}); use mesh.run with a string"
        ) from error
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    last = definition.body[-1]
    lines = source.splitlines()
    if isinstance(last, ast.Return):
        row = last.lineno - 1
        replaced = "pass" if last.value is None else ast.get_source_segment(source, last.value) or "pass"
        indent = lines[row][: last.col_offset]
        lines[row : last.end_lineno] = [f"{indent}({replaced})" if last.value is not None else f"{indent}pass"]
    first = definition.body[0]
    if first.lineno == definition.lineno:
        raise UsageError(f"write the body of {function.__name__} on lines of its own")
    return textwrap.dedent("\n".join(lines[first.lineno - 1 :])) + "\n"
