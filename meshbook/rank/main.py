"""A rank's life: be born, listen, run what comes, end.

The main thread polls its own socket for commands and runs them, so that signals and CUDA behave and no message waits
for a thread switch. Everything that must be answered while it is busy is the service thread's (`service.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import multiprocessing.context
import os
import random
import resource
import signal
import sys
import traceback
from typing import Any, NoReturn

import zmq

from meshbook.rank.blas import set_blas_threads
from meshbook.rank.capture import Output
from meshbook.rank.executor import Executor
from meshbook.rank.service import Reporter, Service
from meshbook.rank.shell import InterruptGate, RankShell
from meshbook.wire import birth, messages
from meshbook.wire.lastwords import LastWords
from meshbook.wire.lifeline import be_readable_by, die_with_parent, lead_a_group


def be_rank(told: birth.RankBirth, pipes: tuple[int, int], last_words: int) -> NoReturn:
    """Live as a rank in this process; never returns.

    Args:
        told: who to be.
        pipes: read ends of the pipes that stdout and stderr (descriptors 1 and 2) write to.
        last_words: descriptor of the ring in which the host finds what was said last.
    """
    _settle(told)
    gate = InterruptGate()
    gate.install()
    context = zmq.Context()
    words = LastWords(last_words)
    output = Output(fds=pipes, mirror=words.write)
    output.install()
    reporter = Reporter(context, told, output)
    shell = RankShell.make(output=output, gate=gate)
    executor = Executor(told, shell, output, gate, reporter, words)
    shell.ask = executor.ask
    service = Service(context, told, executor, output, reporter)
    device = executor.choose_device()
    ready = messages.RankReady(rank=told.rank, pid=os.getpid(), device=device, token=told.token)
    service.start(ready)
    reporter.send(ready)
    code = 1
    try:
        executor.serve()
        code = 0
    except BaseException:  # ours, for user code is caught where it runs; these are the rank's last words then
        traceback.print_exc()
    finally:
        _end(executor, service, code)


def _settle(told: birth.RankBirth) -> None:
    """Make this process the one that user code expects."""
    lead_a_group()
    be_readable_by(told.host_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if told.max_files is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (told.max_files, hard))
    os.environ.update(told.spec.env)
    os.environ.update(
        RANK=str(told.rank),
        LOCAL_RANK=str(told.local_rank),
        WORLD_SIZE=str(told.world_size),
        LOCAL_WORLD_SIZE=str(told.local_world_size),
        OMP_NUM_THREADS=str(told.threads),
    )
    for path in reversed(told.spec.sys_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    if told.spec.cwd:
        with contextlib.suppress(OSError):
            os.chdir(told.spec.cwd)
    # A DataLoader worker must not collect what its rank had dropped: the end of a process group waits for threads that
    # a forked child does not have.
    os.register_at_fork(after_in_child=gc.freeze)
    # Forked ranks would all draw the fork server's numbers; torch's own default seed is the same in every process.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(told.threads)
    if told.blas_threads is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = str(told.blas_threads)
        set_blas_threads(told.blas_threads)
    fork_by_default()


def fork_by_default() -> None:
    """Have multiprocessing fork, unless user code asks for something else.

    Python 3.14 has a fork server of multiprocessing's own instead, and a DataLoader's workers would be started by it:
    they would know nothing of a Dataset that a cell has defined. `set_start_method` would do the same, and then refuse
    the user's own call of it.
    """
    if multiprocessing.get_all_start_methods()[0] == "fork":
        return
    default: Any = getattr(multiprocessing.context, "_default_context", None)
    contexts = getattr(multiprocessing.context, "_concrete_contexts", {})
    if "fork" in contexts and hasattr(default, "_default_context"):
        default._default_context = contexts["fork"]
    elif multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("fork")


def _end(executor: Executor, service: Service, code: int) -> NoReturn:
    """Leave without waiting for threads of the user's that may never end."""
    with contextlib.suppress(BaseException):
        service.end_actors()
    with contextlib.suppress(BaseException):
        executor.close()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        service.finish()
    os._exit(code)


def main() -> NoReturn:
    """A rank in a fresh interpreter: `python -m meshbook.rank.main OUT_FD ERR_FD RING_FD`; standard input says who."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    told = birth.births.decode(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    be_rank(told, (int(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3]))


if __name__ == "__main__":
    main()
