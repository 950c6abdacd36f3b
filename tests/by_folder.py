"""Runs all tests, each folder in a pytest process of its own: a crash or a leak ends there.

    python -m tests.by_folder [pytest's arguments]           (make test-all)

What failed in a folder is run again, alone (tests/second_pass.py). The status is 1 if a folder is red.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent


def parts() -> dict[str, list[str]]:
    """What is run in one process, by name: a folder, or all files beside the folders."""
    folders = {path.name: [f"tests/{path.name}"] for path in sorted(TESTS.iterdir()) if any(path.glob("test_*.py"))}
    return folders | {"the rest": [f"tests/{path.name}" for path in sorted(TESTS.glob("test_*.py"))]}


def main(arguments: list[str]) -> int:
    rows = []
    for name, paths in parts().items():
        print(f"\n{'=' * 30} {name} {'=' * 30}", flush=True)
        began = time.monotonic()
        status = subprocess.call([sys.executable, "-m", "tests.second_pass", *arguments, *paths])
        rows.append((name, status, time.monotonic() - began))
    print()
    for name, status, seconds in rows:
        print(f"{name:15} {'passed' if not status else f'FAILED ({status})':12} {seconds:6.0f} s")
    return 1 if any(status for _, status, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
