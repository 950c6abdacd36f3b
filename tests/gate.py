"""A gate that cells wait at, so that a test decides when they go on."""

from __future__ import annotations

from pathlib import Path


class Gate:
    """A file that is not there until the test opens the gate. `wait` is the line of a cell that waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wait = f"while not __import__('os').path.exists({str(path)!r}): __import__('time').sleep(0.01)"

    def open(self) -> None:
        self.path.touch()
