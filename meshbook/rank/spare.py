"""A process that waits to become a rank: it imports what the ranks of its host have imported, and runs nothing else.

It is no rank yet. What a package reads of a rank while it is imported (`RANK`, the process groups), it does not have,
and would keep wrong for good: such packages are found out and left to the rank. So is what initialises
CUDA, because a spare is to hold no memory of a GPU. A spare that has come so far exits, and the host starts another one
without these packages. A spare whose files have changed since it imported them cannot be a rank either.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

from meshbook.clock import monotonic, wall
from meshbook.errors import message_of
from meshbook.rank.imported_modules import PRELOADED_MODULES
from meshbook.wire import spawn

# What `rank/main` sets for a rank.
_RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"}
)

_GONE = (-1, -1)  # the stamp of a file that is not there
_MAX_FAILED = 20  # modules that are reported with why


def wait_to_be_rank(config: spawn.SpareConfig, channel: socket.socket) -> spawn.RankConfig:
    """Import what the host sends, until it sends the rank to become; return that. Blocks. Closes `channel`.

    The process exits if the host closes its end, or if it is unfit to be a rank.
    """
    report: spawn.SpareReport
    with _silence():
        for name in PRELOADED_MODULES if config.spec.torch else ():  # the fork server has
            importlib.import_module(name)
        importer = _Importer(set(config.left_out), channel)
        while True:
            command = spawn.receive_in_file(channel, spawn.spare_commands)
            match command:
                case None:
                    os._exit(0)
                case spawn.ImportModules(names=names):
                    report = importer.run(names)
                case spawn.BecomeRank(config=rank_config):
                    changed = importer.find_changed_file()
                    report = spawn.SpareUnfit(f"{changed} has changed") if changed else spawn.SpareAccepted()
            channel.send(spawn.encoder.encode(report))
            if isinstance(report, spawn.SpareUnfit):
                os._exit(0)
            if isinstance(report, spawn.SpareAccepted):
                channel.close()
                return rank_config


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what is printed meanwhile: nobody has asked for it, and a pipe that nobody reads would fill up."""
    null = os.open(os.devnull, os.O_WRONLY)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    yield
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for descriptor, former in zip((1, 2), kept, strict=True):
        os.dup2(former, descriptor)
        os.close(former)


class _Importer:
    def __init__(self, left_out: set[str], channel: socket.socket) -> None:
        self._left_out, self._channel = left_out, channel
        # What the fork server has imported is the same in every rank.
        self._before = set(sys.modules)
        self._trusted = {name.partition(".")[0] for name in self._before}
        self._files: dict[str, tuple[int, int]] = {}  # path -> time of the last change, size
        self._failed: dict[str, str] = {}
        self._seconds = 0.0

    def run(self, names: tuple[str, ...]) -> spawn.SpareReady | spawn.SpareUnfit:
        """Import modules; one that fails does not keep the next ones from being imported."""
        started, began_at = monotonic(), int(wall() * 1e9)
        unfit: dict[str, str] = {}
        package = ""
        for name in names:
            root = name.partition(".")[0]
            if name in sys.modules or root in self._left_out or root in unfit:
                continue
            if root != package:
                package = root
                self._channel.send(spawn.encoder.encode(spawn.SpareImporting(root)))
            if reason := self._import(name):
                unfit[root] = reason
        self._seconds += monotonic() - started
        if unfit:
            return spawn.SpareUnfit("packages were left out", tuple(unfit.items()))
        self._note_files(began_at)
        num_modules = len(sys.modules.keys() - self._before)
        failed = tuple(self._failed.items())[:_MAX_FAILED]
        return spawn.SpareReady(num_modules, self._seconds, _private_bytes(), failed)

    def _import(self, name: str) -> str:
        """Import a module. Return why its package must be left to the rank, or ""."""
        noticed: list[str] = []
        with _noticing_rank_reads(noticed):
            try:
                importlib.import_module(name)
            except BaseException as error:  # of user code: a rank that needs it fails as well, and shows it
                self._failed[name] = f"{type(error).__name__}: {message_of(error)}"[:200]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "its import initialises CUDA"
        if noticed and name.partition(".")[0] not in self._trusted:
            return f"its import reads {noticed[0]}"
        return ""

    def _note_files(self, began_at: int) -> None:
        for name in sys.modules.keys() - self._before:
            path = getattr(sys.modules[name], "__file__", None)
            if isinstance(path, str) and path not in self._files:
                stamp = _stamp(path)
                if stamp != _GONE:  # it would be in an archive
                    # what has changed while it was imported is of an unknown version
                    self._files[path] = stamp if stamp[0] < began_at else _GONE

    def find_changed_file(self) -> str:
        """Return the path of a file that is not as it was imported; "" if all are."""
        return next((path for path, stamp in self._files.items() if stamp == _GONE or _stamp(path) != stamp), "")


@contextlib.contextmanager
def _noticing_rank_reads(noticed: list[str]) -> Iterator[None]:
    """Note what is read meanwhile of what only a rank has."""
    environ: Any = os.environ  # all access by name goes through this function of it, and nothing of `environ` is bound
    encode_key = environ.encodekey

    def noticing_key(key: str) -> Any:
        if key in _RANK_VARIABLES:
            noticed.append(f"{key} of the environment")
        return encode_key(key)

    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    meta: Any = type(getattr(distributed, "GroupMember", None))
    world: Any = vars(meta).get("WORLD")
    has_world = isinstance(world, property) and world.fget is not None

    def noticing_world(cls: Any) -> Any:
        noticed.append("the process group")
        return world.fget(cls)

    environ.encodekey = noticing_key
    if has_world:
        meta.WORLD = property(noticing_world, world.fset)
    try:
        yield
    finally:
        environ.encodekey = encode_key
        if has_world:
            meta.WORLD = world


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return _GONE
    return found.st_mtime_ns, found.st_size


def _private_bytes() -> int:
    """Return how much memory this process shares with no other; 0 if the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup") as file:
        return sum(int(kib) * 1024 for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", file.read(), re.MULTILINE))
    return 0
