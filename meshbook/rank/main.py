"""The entry point of a rank: set up the process, execute commands, exit.

The main thread polls its own socket for commands and executes them, so that signals and CUDA work and no message waits
for a thread switch. The service thread (`service.py`) handles everything that needs a reply while the main thread is
busy.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.context
import os
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

import zmq

from meshbook.rank import actor_hooks, preemption, spare
from meshbook.rank.blas import set_blas_threads
from meshbook.rank.call_state import CallState
from meshbook.rank.cells.code_runner import CodeRunner
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.cells.stop_requests import StopRequests
from meshbook.rank.cells.tracebacks import shorten_anomaly_stacks
from meshbook.rank.cells.user_input import InputRequester
from meshbook.rank.checkpoints.door import CheckpointDoor
from meshbook.rank.debug_port import DebugPortDoor
from meshbook.rank.device import choose_device
from meshbook.rank.differences.sentinel_door import SentinelDoor
from meshbook.rank.executor import Executor
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.objects import RankObjects
from meshbook.rank.outbox import Outbox
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.rank.queries import make_query_handlers
from meshbook.rank.reporter import Reporter
from meshbook.rank.service import Service
from meshbook.rank.snapshot import Snapshotter
from meshbook.wire import codec, messages, spawn
from meshbook.wire.crash_log import CrashLog
from meshbook.wire.process_control import allow_ptrace_by, die_with_pipe, start_new_session


def run(
    command: spawn.ForkRank | spawn.ForkSpare,
    pipes: tuple[int, int],
    crash_log_fd: int,
    host_pipe: int,
    channel: int = -1,
) -> NoReturn:
    """Run as a rank in this process, at once or, as a spare, when the host says so; never returns.

    Args:
        command: what to be.
        pipes: read ends of the pipes that stdout and stderr (descriptors 1 and 2) write to.
        crash_log_fd: descriptor of the ring in which the host finds the last output.
        host_pipe: read end of a pipe; this process ends when its write end is closed, with its host.
        channel: a spare's socket to its host.
    """
    start_new_session()
    die_with_pipe(host_pipe)
    if isinstance(command, spawn.ForkRank):
        run_rank(command.config, pipes, crash_log_fd)
    _configure_process(command.config)
    run_rank(spare.wait_to_be_rank(command.config, socket.socket(fileno=channel)), pipes, crash_log_fd)


def run_rank(config: spawn.RankConfig, pipes: tuple[int, int], crash_log_fd: int) -> NoReturn:
    """Run as a rank in this process, as `run`."""
    _configure_process(config)
    gate = InterruptGate()
    gate.install()
    context = zmq.Context()
    crash_log = CrashLog(crash_log_fd)
    output = OutputBuffer(fds=pipes, on_text=crash_log.write)
    output.install()
    reporter = Reporter(context, config, output)
    shell = RankShell.make(output=output, gate=gate)
    if config.spec.argv:
        shell.user_ns["__file__"] = config.spec.argv[0]
    runner = CodeRunner(shell, output, gate)
    running_file = lambda: runner.running_file  # noqa: E731
    rank, device, state = config.rank, choose_device(config), CallState(config.rank)
    if device == "cpu":  # else accelerate, and transformers' Trainer, take each rank for a process alone
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    state.cell_title = shell.cell_title
    outbox = Outbox()
    groups = RankGroups(
        config,
        device,
        state,
        context,
        crash_log,
        ExitQuestions(rank, outbox.put),
        running_file=running_file,
        describe_error=runner.describe_error,
    )
    objects = RankObjects(rank, device, shell.user_ns, state, groups, defer_interrupts=gate.defer_interrupts)
    termination, point = preemption.TerminationSignal(), preemption.PreemptionPoint()
    preemption.install(point)
    user_input = InputRequester(rank, state, output, reporter, is_allowed=lambda: runner.allow_input)
    user_input.serve(shell.terminal)
    stop_requests = StopRequests(state, gate, shell.terminal, user_input, groups.ring, shell.cell_title)
    debug_port = DebugPortDoor(shell)
    atexit.register(debug_port.close)
    checkpoints = CheckpointDoor(rank, device, shell.user_ns, groups, outbox)
    sentinel = SentinelDoor(
        rank, shell.user_ns, groups, lambda text: output.put(messages.Notice(text)), shell.cell_title
    )
    executor = Executor(
        rank,
        device,
        state,
        shell,
        runner,
        groups,
        objects,
        output=output,
        gate=gate,
        reporter=reporter,
        crash_log=crash_log,
        checkpoints=checkpoints,
        preemption=point,
        sentinel=sentinel,
    )
    snapshotter = Snapshotter(
        rank,
        threading.get_ident(),
        state,
        groups.ring,
        runner,
        is_awaiting_input=lambda: user_input.is_waiting,
        current_operation=lambda: objects.current_operation,
        forming_ranks=groups.forming_ranks,
    )
    service = Service(
        context,
        config,
        device,
        state,
        groups,
        objects,
        output=output,
        reporter=reporter,
        snapshotter=snapshotter,
        query_handlers=make_query_handlers(
            shell,
            groups,
            point,
            sentinel,
            stop_requests,
            debug_port,
            open_actors=actor_hooks.make_opener(config, device, objects, outbox),
        ),
        leave_debugger=stop_requests.leave,
        interrupt_call=gate.interrupt_call,
        running_file=running_file,
        checkpoints=checkpoints,
        outbox=outbox,
        preemption=point,
        termination=termination,
    )
    termination.install()
    ready = messages.RankReady(rank=rank, pid=os.getpid(), device=device, token=config.token)
    service.start(ready)
    reporter.work_socket.introduce(codec.encode_body(ready))
    exit_code, grace_s = 1, messages.Exit().grace_s
    try:
        grace_s = executor.serve()
        exit_code = 0
    except BaseException:  # an error of Meshbook, because user code is caught where it runs; log it before the exit
        traceback.print_exc()
    finally:
        _shut_down(groups, objects, service, exit_code, grace_s)


def _configure_process(config: spawn.RankConfig | spawn.SpareConfig) -> None:
    """Set up the process environment that user code expects. May be called again with another configuration."""
    allow_ptrace_by(config.host_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.max_files is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (config.max_files, hard))
    os.environ.update(config.spec.env)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    if isinstance(config, spawn.RankConfig):
        os.environ.update(
            RANK=str(config.rank),
            LOCAL_RANK=str(config.local_rank),
            WORLD_SIZE=str(config.world_size),
            LOCAL_WORLD_SIZE=str(config.local_world_size),
            GROUP_RANK=str(config.host),
            TORCHELASTIC_RUN_ID="meshbook",  # by which libraries know that ranks run already, and have these variables
        )
    sys.argv = list(config.spec.argv or [""])  # argparse in a cell would refuse the arguments of this process
    for path in reversed(config.spec.sys_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    if config.spec.cwd:
        with contextlib.suppress(OSError):
            os.chdir(config.spec.cwd)
    # A DataLoader worker must not collect what its rank had dropped: the destructor of a process group waits for
    # threads that a forked child does not have.
    os.register_at_fork(after_in_child=gc.freeze)
    # Otherwise all forked ranks would draw the fork server's numbers; torch's default seed is the same in every
    # process.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(config.threads)
        shorten_anomaly_stacks()
    if config.blas_threads is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = str(config.blas_threads)
        set_blas_threads(config.blas_threads)
    fork_by_default()


def fork_by_default() -> None:
    """Make "fork" the default start method of multiprocessing, unless user code selects another.

    Python 3.14 uses multiprocessing's own fork server by default, and DataLoader workers started by it would not know a
    Dataset that a cell has defined. `set_start_method` has the same effect, but then refuses the user's own call.
    """
    if multiprocessing.get_all_start_methods()[0] == "fork":
        return
    default: Any = getattr(multiprocessing.context, "_default_context", None)
    contexts = getattr(multiprocessing.context, "_concrete_contexts", {})
    if "fork" in contexts and hasattr(default, "_default_context"):
        default._default_context = contexts["fork"]
    elif multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("fork")


def _shut_down(groups: RankGroups, objects: RankObjects, service: Service, exit_code: int, grace_s: float) -> NoReturn:
    """Exit without waiting for user threads that may never end.

    Args:
        grace_s: seconds for exit functions and the `__del__` of what cells have bound, once the actors have ended: the
            host gives a rank with actors longer. A thread without the GIL then ends the process.
    """
    with contextlib.suppress(BaseException):
        actor_hooks.end_actors()
    with contextlib.suppress(BaseException):
        faulthandler.dump_traceback_later(max(grace_s, 0.1), exit=True, file=os.open(os.devnull, os.O_WRONLY))
    with contextlib.suppress(BaseException):
        groups.close()
    with contextlib.suppress(BaseException):
        objects.pool.close()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        service.send_final_output()
    os._exit(exit_code)


def main() -> NoReturn:
    """Run a rank, or a spare, in a fresh interpreter, with its config on stdin.

    Command line: `python -m meshbook.rank.main OUT_FD ERR_FD RING_FD PIPE_FD [CHANNEL_FD]`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = spawn.start_commands.decode(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    out, err, ring, pipe, *channel = map(int, sys.argv[1:])
    run(command, (out, err), ring, pipe, *channel)


if __name__ == "__main__":
    main()
