"""`python -m meshbook.supervisor FOLDER NAME READY_FD [--owner TEXT] [--listen ADDRESS]`: become a daemon, own a mesh.

It forks twice before anything is imported: once into a session of its own, once more so that no process tree leads from
the notebook to it (VS Code ends every descendant of a kernel, whatever its session). READY_FD is told `ready`, or in
one sentence why not.
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
