"""`uv sync --frozen` in this machine's copy of the project, before ranks start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from meshbook.wire.loop import Loop
from meshbook.wire.process_control import die_with_parent
from meshbook.wire.process_watch import ProcessWatch

# Prints what the environment adds: its site-packages, and what .pth files name.
_PRINT_PATH = (
    "import sys; print(*[path for path in sys.path if path.startswith(sys.prefix) or "
    "not path.startswith(sys.base_prefix)], sep='\\n')"
)
_PRINT_PATH_TIMEOUT_S = 20.0
_EXIT_POLL_S = 0.2
_MAX_LINES = 4  # of uv's own words in an error


class UvEnvironment:
    """The environment of a project, for this host's ranks.

    Attributes:
        is_made: uv has ended well.
        paths: entries for the ranks' sys.path, with the packages of uv.lock.
    """

    def __init__(self, loop: Loop, on_end: Callable[[str], None]) -> None:
        """on_end: called with why uv has failed; "" if it has not."""
        self._on_end = on_end
        self._watch: ProcessWatch[str] = ProcessWatch(loop, lambda _: self._exited(), poll_s=_EXIT_POLL_S)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self.is_made = False
        self.paths: tuple[str, ...] = ()

    def begin(self, project: Path, folder: Path) -> None:
        """Run uv. The environment is for this process's Python, since ranks run in that.

        Args:
            project: the folder with uv.lock.
            folder: where the environment and what uv says are to be.
        """
        self._folder = folder
        if (uv := _find_uv()) is None:
            self._on_end(
                "it has no uv, which --env uv needs (looked in PATH, in ~/.local/bin and beside "
                f"{sys.executable}); install it there: {sys.executable} -m pip install uv"
            )
            return
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        environment["UV_PROJECT_ENVIRONMENT"] = str(folder / ".venv")
        with open(folder / "uv.log", "wb") as log:
            self._process = subprocess.Popen(
                [uv, "sync", "--frozen", "--color", "never", "--no-progress", "--python", sys.executable],
                cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self._watch.watch("uv", self._process.pid)

    def close(self) -> None:
        """End uv if it runs."""
        if self._process is not None:
            self._watch.forget("uv")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def take_over(self) -> None:
        """Go on in a process that was forked from the one that has run uv, and that has ended: uv with it."""
        if self._process is not None:
            self._watch.forget("uv")
            self._process.returncode = 0  # it is not this process's child
            self._process = None

    def _exited(self) -> None:
        assert self._process is not None
        self._watch.forget("uv")
        code, self._process = self._process.wait(), None
        words = _last_lines((self._folder / "uv.log").read_text(errors="replace"))
        if code:
            self._on_end(f"uv sync --frozen failed with status {code}: {words}")
            return
        python = self._folder / ".venv" / "bin" / "python"
        try:
            done = subprocess.run(
                [python, "-I", "-c", _PRINT_PATH], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_PRINT_PATH_TIMEOUT_S, check=True, cwd=self._folder,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            self._on_end(f"uv sync --frozen made an environment whose Python does not run: {error}")
            return
        self.paths, self.is_made = tuple(done.stdout.splitlines()), True
        self._on_end("")


def _find_uv() -> str | None:
    beside = [str(Path(sys.executable).parent), str(Path.home() / ".local" / "bin")]
    return shutil.which("uv") or shutil.which("uv", path=os.pathsep.join(beside))


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_MAX_LINES:]) or "it said nothing"
