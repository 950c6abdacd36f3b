"""`python -m meshbook.supervisor FOLDER NAME READY_FD LAUNCHER_PID [--owner TEXT] …`: daemonise and own a mesh.

It forks twice before any import: once into a session of its own, once more to leave the notebook's process tree (VS
Code ends every descendant of a kernel, whatever its session). It writes `ready` to READY_FD, or one sentence with the
reason for the failure.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    from meshbook.supervisor.daemon import serve

    serve(sys.argv[1:])


if __name__ == "__main__":
    main()
