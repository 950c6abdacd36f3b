"""Start-up of a supervisor: its log, its connection file, the `ready` status; then the driver, then clean-up."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from meshbook.errors import MeshbookError
from meshbook.host.rlimits import raise_fd_limit
from meshbook.supervisor.driver import Driver
from meshbook.wire import keys


def serve(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("ready_fd", type=int)
    parser.add_argument("launcher", type=int)  # pid of the process that starts this one
    parser.add_argument("--owner")
    parser.add_argument("--listen")
    parser.add_argument("--light", action="store_true")  # warm up a fork server without torch
    parser.add_argument("--cold", action="store_true")  # warm up nothing: ranks will be on other machines
    parser.add_argument("--source")  # socket of a fork server to branch from
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever starts the mesh may block some
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_fd_limit()
    folder: Path = options.folder
    try:
        _configure_logging()
        keys.lock_folder(folder)
        token = keys.new_token()
        driver = Driver(
            folder,
            options.name,
            token,
            address=options.listen,
            owner=options.owner,
            light=options.light,
            cold=options.cold,
            branch_from=options.source,
        )
        keys.write_connection_file(folder, driver.connection)
    except (MeshbookError, OSError) as error:
        keys.remove_folder(folder)
        _write_status(options.ready_fd, str(error))
        os._exit(1)
    _write_status(options.ready_fd, "ready")
    try:
        driver.run(options.launcher)
    except BaseException:
        logging.getLogger("meshbook").exception("the supervisor failed")
        raise
    finally:
        if not (folder / "mesh.json").exists():
            keys.remove_folder(folder)
    os._exit(0)


def _configure_logging() -> None:
    """Log lines to standard error, which the parent has redirected to the mesh's log."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")


def _write_status(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, text.encode())
        os.close(fd)
