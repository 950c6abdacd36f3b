"""Where programs wait: (path suffix, function) pairs that classify a stack below the user's line.

These are tables. The outermost known frame counts, as it is closest to what the user wrote: `subprocess.run` waits in
`selectors.select`, and what the user waits for is a subprocess. A second table classifies system calls, for a thread
that waits in C directly below the user's line without a Python frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from meshbook.wire.messages import Frame


class WaitSite(NamedTuple):
    """What a thread in a known function does."""

    kind: str  # the kind of wait, as in `kinds.KINDS`, or one of the names below
    phrase: str  # "waits for a lock": follows "rank 3 "


# Values of `kind` that are not findings by themselves.
COLLECTIVE: Final = "collective"  # inside a process-group operation
FORMING: Final = "forming"  # creating a process group, which requires all its members
SLEEP: Final = "sleep"
COMPUTE: Final = "compute"

IN_COLLECTIVE = WaitSite(COLLECTIVE, "waits in a collective")
_FORMING_GROUP = WaitSite(FORMING, "forms a process group")
_STORE = WaitSite("waits-for-store", "waits for a key of a TCPStore")
_WORKER = WaitSite("waits-for-worker", "waits for a DataLoader worker")
_PROCESS = WaitSite("waits-for-subprocess", "waits for a subprocess")
_POOL = WaitSite("waits-for-subprocess", "waits for a process pool")
_QUEUE = WaitSite("waits-for-queue", "waits for a queue")
_THREAD = WaitSite("waits-for-thread", "waits for a thread to end")
_FUTURE = WaitSite("waits-for-thread", "waits for a future")
_EVENT = WaitSite("waits-for-event", "waits for an event or condition")
_BARRIER = WaitSite("waits-for-event", "waits at a threading.Barrier")
_LOCK = WaitSite("waits-for-lock", "waits for a lock")
_SEMAPHORE = WaitSite("waits-for-lock", "waits for a semaphore")
_SOCKET = WaitSite("waits-for-socket", "waits for the network")
_PIPE = WaitSite("waits-for-pipe", "waits for a pipe")
_INPUT = WaitSite("waits-for-input", "waits for the answer to input()")
IN_DEBUGGER = "waits in the debugger for a command"
_DEBUGGER = WaitSite("waits-for-input", IN_DEBUGGER)
_LOOP = WaitSite("waits-in-event-loop", "waits in an asyncio event loop")
_GPU = WaitSite("waits-for-gpu", "waits for the GPU")
_SELECT = WaitSite("waits-for-socket", "waits in select for a socket or pipe")
_ACTOR = WaitSite("waits-for-actor", "waits for an actor's answer")
_FILE = WaitSite("waits-for-file", "waits for a file")

# (path suffix, functions); None matches every function of the file.
WAIT_SITES: Final[tuple[tuple[str, tuple[str, ...] | None, WaitSite], ...]] = (
    ("torch/_inductor/async_compile.py", ("wait", "_wait_futures"), WaitSite(COMPUTE, "compiles for torch.compile")),
    ("torch/utils/data/dataloader.py", ("_get_data", "_try_get_data", "_shutdown_workers"), _WORKER),
    ("torch/distributed/rendezvous.py", None, _FORMING_GROUP),
    (
        "torch/distributed/distributed_c10d.py",
        (
            "init_process_group",
            "new_group",
            "_new_group_with_tag",
            "_new_process_group_helper",
            "new_subgroups",
            "new_subgroups_by_enumeration",
            "split_group",
            "_store_based_barrier",
        ),
        _FORMING_GROUP,
    ),
    ("torch/distributed/device_mesh.py", ("init_device_mesh", "_init_process_groups"), _FORMING_GROUP),
    ("meshbook/rank/process_groups/groups.py", ("connect", "form"), _FORMING_GROUP),
    ("meshbook/rank/process_groups/connector.py", None, _FORMING_GROUP),
    ("torch/distributed/distributed_c10d.py", None, IN_COLLECTIVE),
    ("torch/distributed/_functional_collectives.py", None, IN_COLLECTIVE),
    ("torch/distributed/nn/functional.py", None, IN_COLLECTIVE),
    ("meshbook/rank/process_groups/watched_group.py", None, IN_COLLECTIVE),
    ("meshbook/rank/process_groups/watched_work.py", None, IN_COLLECTIVE),
    ("meshbook/rank/process_groups/group_health.py", None, IN_COLLECTIVE),
    ("meshbook/actors/runtime/futures.py", ("get", "_wait", "exception", "as_completed", "__await__"), _ACTOR),
    ("torch/distributed/elastic/utils/store.py", None, _STORE),
    ("meshbook/rank/process_groups/store.py", None, _STORE),
    (
        "torch/cuda/__init__.py",
        ("synchronize",),
        _GPU,
    ),
    ("torch/cuda/streams.py", ("synchronize", "wait", "query"), _GPU),
    ("torch/multiprocessing/spawn.py", ("join", "start_processes"), _PROCESS),
    ("multiprocessing/pool.py", ("get", "wait", "join", "next", "map", "apply"), _POOL),
    ("multiprocessing/process.py", ("join",), _PROCESS),
    ("multiprocessing/popen_fork.py", ("wait", "poll"), _PROCESS),
    ("multiprocessing/queues.py", ("get", "put"), _QUEUE),
    ("multiprocessing/managers.py", None, _PROCESS),
    ("multiprocessing/synchronize.py", ("acquire", "__enter__"), _LOCK),
    ("multiprocessing/synchronize.py", ("wait", "wait_for"), _EVENT),
    ("multiprocessing/connection.py", ("accept", "Client", "Listener"), _SOCKET),
    ("multiprocessing/connection.py", ("recv", "recv_bytes", "send", "_recv", "_send", "poll", "wait"), _PIPE),
    ("concurrent/futures/process.py", None, _POOL),
    ("concurrent/futures/thread.py", ("shutdown",), _THREAD),
    ("concurrent/futures/_base.py", ("result", "exception", "wait", "result_iterator", "as_completed"), _FUTURE),
    ("subprocess.py", None, _PROCESS),
    ("pexpect/expect.py", None, _PROCESS),
    ("IPython/utils/_process_common.py", None, _PROCESS),
    ("IPython/utils/_process_posix.py", None, _PROCESS),
    ("queue.py", ("get", "put", "join"), _QUEUE),
    ("threading.py", ("join", "_wait_for_tstate_lock"), _THREAD),
    ("threading.py", ("_enter", "_wait"), _BARRIER),
    ("threading.py", ("wait", "wait_for"), _EVENT),
    ("threading.py", ("acquire", "__enter__"), _SEMAPHORE),
    ("filelock/_api.py", None, _FILE),
    ("fasteners/process_lock.py", None, _FILE),
    ("meshbook/rank/cells/no_terminal.py", ("_input", "_getpass"), _INPUT),
    ("getpass.py", None, _INPUT),
    ("pdb.py", ("interaction", "cmdloop", "_cmdloop"), _DEBUGGER),
    ("bdb.py", None, _DEBUGGER),
    ("IPython/core/debugger.py", None, _DEBUGGER),
    ("urllib/request.py", None, _SOCKET),
    ("http/client.py", None, _SOCKET),
    ("requests/sessions.py", None, _SOCKET),
    ("httpx/_client.py", None, _SOCKET),
    ("urllib3/connectionpool.py", None, _SOCKET),
    ("huggingface_hub/file_download.py", None, _SOCKET),
    ("socket.py", ("readinto", "create_connection", "accept", "getaddrinfo", "recv_into"), _SOCKET),
    ("ssl.py", None, _SOCKET),
    ("socketserver.py", ("serve_forever", "handle_request"), _SOCKET),
    ("ftplib.py", None, _SOCKET),
    ("smtplib.py", None, _SOCKET),
    ("selectors.py", ("select",), _SELECT),
    ("asyncio/base_events.py", ("run_forever", "run_until_complete", "_run_once"), _LOOP),
    ("asyncio/runners.py", ("run",), _LOOP),
    *(
        (f"asyncio/{name}.py", None, _LOOP)
        for name in ("locks", "tasks", "queues", "streams", "timeouts", "subprocess")
    ),
)

# `WAIT_SITES` by the file's base name.
_SITES_BY_FILE_NAME: Final[dict[str, list[tuple[str, tuple[str, ...] | None, WaitSite]]]] = {}
for _suffix, _functions, _site in WAIT_SITES:
    _SITES_BY_FILE_NAME.setdefault(_suffix.rsplit("/", 1)[-1], []).append((_suffix, _functions, _site))

# What a thread waits for if it sleeps in C directly below the user's line. `with lock:`, `queue.SimpleQueue.get`,
# `time.sleep`, `open(fifo)` and `file.read` have no Python frame.
SYSCALL_SITES: Final[dict[str, WaitSite]] = {
    **dict.fromkeys(("futex", "futex_waitv", "futex_time64"), _LOCK),
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), WaitSite(SLEEP, "sleeps")),
    **dict.fromkeys(("wait4", "waitid", "waitpid"), _PROCESS),
    **dict.fromkeys(("flock", "fcntl"), WaitSite("waits-for-file", "waits for a lock on a file")),
    **dict.fromkeys(("open", "openat"), WaitSite("waits-for-file", "waits for a file to open")),
    **dict.fromkeys(("fsync", "fdatasync", "sync"), WaitSite("waits-for-file", "waits until a file is on disk")),
    **dict.fromkeys(
        ("connect", "accept", "accept4", "recvfrom", "recvmsg", "sendto", "sendmsg"),
        _SOCKET,
    ),
    **dict.fromkeys(("select", "pselect6", "poll", "ppoll"), _SELECT),
    # Code that uses epoll has a frame of `selectors` on the stack; an awaiting coroutine has none.
    **dict.fromkeys(("epoll_wait", "epoll_pwait", "epoll_pwait2"), _LOOP),
    **dict.fromkeys(("read", "readv", "pread64"), WaitSite("waits-for-file", "waits to read")),
    **dict.fromkeys(
        ("write", "writev", "pwrite64", "splice", "sendfile"), WaitSite("waits-for-file", "waits to write")
    ),
    **dict.fromkeys(("msgrcv", "msgsnd", "mq_timedreceive"), _PIPE),
    **dict.fromkeys(("semop", "semtimedop"), _SEMAPHORE),
    **dict.fromkeys(("pause", "rt_sigtimedwait", "rt_sigsuspend"), WaitSite("waits-for-event", "waits for a signal")),
}

# System calls whose target is no open file: a path may have any name, also "pipe".
_SYSCALLS_WITHOUT_FD: Final = ("open", "openat", "wait4", "waitid")

# Frames of a backward pass. They say little by themselves: the wait inside belongs to another library.
AUTOGRAD_FRAMES: Final = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/autograd/__init__.py", "backward"),
)


@lru_cache(maxsize=4096)
def wait_site_of(file: str, function: str) -> WaitSite | None:
    """Return what a thread in this library function does; None if the function is not known to wait."""
    for suffix, functions, site in _SITES_BY_FILE_NAME.get(file.rsplit("/", 1)[-1], ()):
        at_end = file == suffix or file.endswith("/" + suffix)
        if at_end and (functions is None or function in functions):
            return site
    return None


def outermost_site(frames: Iterable[Frame]) -> tuple[WaitSite, Frame] | None:
    """Return the first known wait site among frames, outermost first."""
    for frame in frames:
        if (site := wait_site_of(frame.file, frame.function)) is not None:
            return site, frame
    return None


def input_site(frames: Iterable[Frame]) -> WaitSite:
    """Return what a thread does that waits for somebody to type: input(), or the debugger."""
    is_debugger = any(wait_site_of(frame.file, frame.function) is _DEBUGGER for frame in frames)
    return _DEBUGGER if is_debugger else _INPUT


def is_forming_group(frames: Iterable[Frame]) -> bool:
    """Whether these frames create a process group; some groups connect only at their first use."""
    return any(site is _FORMING_GROUP for frame in frames if (site := wait_site_of(frame.file, frame.function)))


def site_of_syscall(syscall: str | None, target: str | None) -> WaitSite | None:
    """Return what a sleeping thread waits for, from its system call and that call's target; None if unknown."""
    site = SYSCALL_SITES.get(syscall or "")
    if site is None:
        return None
    if not target or site is _LOOP or site is _LOCK:  # a loop's selector polls the loop's own descriptors
        return site
    if syscall not in _SYSCALLS_WITHOUT_FD:
        if target == "pipe":
            return _PIPE
        if "socket" in target.split()[:2]:
            site = _SOCKET
        elif target.startswith("pipe"):  # a pipe among other polled descriptors
            site = _PIPE
    return WaitSite(site.kind, f"{site.phrase} ({target})")
