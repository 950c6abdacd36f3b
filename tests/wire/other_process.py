"""A second Python process that a test can talk to: a real other side for shared memory and pickles.

It evaluates what it is asked and keeps its names, like a prompt. From the start it has `pool`, `reader`, `dump`,
`load`, and the modules `os`, `gc` and `sys`. It is single-threaded, so what it is asked may fork.
"""

from __future__ import annotations

import ast
import gc
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
from types import TracebackType
from typing import Any

from meshbook.errors import TransferError
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.pickling import dump, load
from tests.budget import WAIT_S

ANSWER_TIMEOUT_S = WAIT_S  # importing torch on a loaded machine is the slowest thing it is asked


class OtherProcess:
    """`with OtherProcess() as other: other.ask("x + 1", x=1)`. Ended, and waited for, at the end."""

    def __init__(self, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                env=os.environ | environment,
            )
        self._connection = multiprocessing.connection.Connection(ours.detach())
        self.pid = self._process.pid

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._connection.close()  # its request for more ends in EOFError
        try:
            self._process.wait(ANSWER_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait(ANSWER_TIMEOUT_S)

    def evaluate(self, source: str, **names: object) -> Any:
        """Bind the names there, run the source there, and return the value of its last expression.

        Raises:
            TransferError: as it was raised there.
            AssertionError: anything else was.
        """
        self._connection.send((source, names))
        assert self._connection.poll(ANSWER_TIMEOUT_S), f"no answer to {source!r}"
        answer = pickle.loads(self._connection.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(ANSWER_TIMEOUT_S)


def serve(fd: int) -> None:
    """The other side."""
    connection = multiprocessing.connection.Connection(fd)
    names: dict[str, Any] = {
        "pool": SegmentPool(), "reader": SegmentReader(), "dump": dump, "load": load, "os": os, "gc": gc, "sys": sys,
    }  # fmt: skip
    while True:
        try:
            source, bound = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send_bytes(_evaluate(source, bound, names))


def _evaluate(source: str, bound: dict[str, Any], names: dict[str, Any]) -> bytes:
    names.update(bound)
    bound.clear()
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        statements, last = [*statements, last], ast.Expr(ast.Constant(None))
    try:
        exec(compile(ast.Module(statements, []), "<asked>", "exec"), names)
        value = ast.fix_missing_locations(ast.Expression(last.value))
        return pickle.dumps(eval(compile(value, "<asked>", "eval"), names))
    except TransferError as error:
        return pickle.dumps(TransferError(str(error)))
    except Exception as error:
        return pickle.dumps(AssertionError(f"the other process, asked {source!r}: {type(error).__name__}: {error}"))
