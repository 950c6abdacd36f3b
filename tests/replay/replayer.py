"""A process that replays bundles, each in a fork of its own: torch is imported once for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "ended: "


class Replayer:
    """Starts such a process, and asks it."""

    def __enter__(self) -> Replayer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.replay.replayer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate()

    def replay(self, path: Path) -> dict[str, Any]:
        """Return how the replay of a bundle ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        raise AssertionError("the replaying process has ended")


def main() -> None:
    from meshbook.rank.recording.bundle import BundleFile
    from meshbook.replay.cell import ReplayProcess

    def replay(path: Path) -> dict[str, Any]:
        bundle = BundleFile(path)
        with ReplayProcess(bundle) as process:
            end = process.run()
            return {
                "rank": bundle.header.rank,
                "difference": end.differs(bundle.header),
                "error": [type(end.error).__name__, str(end.error), end.line],
                "left": process.record.num_left,
                "notes": process.notes,
            }

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                ended = replay(Path(line.strip()))
            except BaseException as error:
                ended = {"difference": f"{type(error).__name__}: {error}"}
            print(f"{MARK}{json.dumps(ended)}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
