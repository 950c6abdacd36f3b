"""A host as an actor of Ray or Monarch starts it, on the actor's machine.

It goes there by value, with the actor, and so must need nothing but the standard library: an interpreter without
Meshbook is then an error with words of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from typing import Any

# Ray kills the children of an actor that ends. A grandchild hears the end of its standard input, and leaves no files.
_IN_BACKGROUND = 'exec 3<&0; "$0" "$@" <&3 3<&- & exec 3<&-; wait $!'


class LaunchedChild:
    """Starts a host, and passes on what it writes and how it ends."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, python: str | None, words: tuple[str, ...], environment: dict[str, str], without: tuple[str, ...] = ()
    ) -> str:
        """Start it in the home folder; return this machine's hostname.

        Args:
            python: None: the interpreter of this process.
            environment: in addition to this process's.
            without: what of this process's environment is left out: how its names begin.
        """
        own = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", _IN_BACKGROUND, python or sys.executable, *words], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env={**own, **environment},
                cwd=os.path.expanduser("~"), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._events.put(("log", f"{error}\n"))
            self._events.put(("end", 127))
        else:
            threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return socket.gethostname()

    def next_event(self) -> tuple[str, Any]:
        """Wait for ("line", its first), ("log", text) or ("end", status)."""
        return self._events.get()

    def write(self, data: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, which `next_event` says
                self._process.stdin.write(data)

    def close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        logging = threading.Thread(target=self._pass_errors, args=(process,), daemon=True)
        logging.start()
        assert process.stdout is not None
        if line := process.stdout.readline():
            self._events.put(("line", line.decode("utf-8", "replace")))
        code = process.wait()
        logging.join(0.5)  # ranks that are ending may still hold the pipe
        self._events.put(("end", code))

    def _pass_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        while text := process.stderr.read(1 << 16):
            self._events.put(("log", text.decode("utf-8", "replace")))
