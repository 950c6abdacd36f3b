"""Worlds of real ranks for tests: forked from a clean single-threaded process, told what to run, stopped by pid.

A `ForkServer` is that process; it has imported torch and nothing of its own runs in it. A `World` is a store and some
ranks that it forked. Each rank has a main thread, which runs functions of the test's module, and a service thread,
which can be asked to look at the main thread or to sever its groups, as in a real rank.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

from tests.budget import WAIT_S

ROOT = Path(__file__).resolve().parent.parent.parent

# Seconds until a wait counts as a hang. Generous: machines that run tests are busy; nothing here takes a tenth of it.
DEADLINE_S = WAIT_S
# And until torch is imported, which takes three seconds of a processor.
IMPORT_DEADLINE_S = 110.0

# How long the main thread must stand at one instruction, and sleep, to count as stuck.
MIN_STUCK_S = 0.05
# Functions that wait for a collective's other members, again and again for a moment.
WAITS_IN_LOOPS = ("_wait_slice_by_slice", "_wait_for_all")

TOKEN = "the world's"


def _send(connection: Connection, value: object) -> None:
    # Plain pickle: multiprocessing's own would hand tensors over as descriptors of the sender.
    connection.send_bytes(pickle.dumps(value))


class TimedOut(AssertionError):
    """Something did not happen in time."""


class FunctionFailed(Exception):
    """A rank's function raised: the exception, and its traceback as text."""

    def __init__(self, rank: int, error: BaseException, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.error = error


# ---------------------------------------------------------------------------------------------------------------------
# In the test


class ForkServer:
    """Forks ranks and stores. Use as a context manager; everything it forked ends with it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank.worlds", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
        )
        theirs.close()
        self._socket.settimeout(IMPORT_DEADLINE_S)
        assert self._socket.recv(16) == b"ready"
        self._socket.settimeout(DEADLINE_S)

    def fork(self, spec: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The new process's pid; it has the descriptors."""
        socket.send_fds(self._socket, [json.dumps(spec).encode()], list(descriptors))
        return int(self._socket.recv(16))

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(DEADLINE_S)


class RankHandle:
    """One rank of a world, as a test holds it."""

    def __init__(self, forker: ForkServer, rank: int, size: int, *, plain: bool, device: str) -> None:
        self.rank = rank
        self._alive = True
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        spec = {"kind": "rank", "rank": rank, "size": size, "plain": plain, "device": device}
        self.pid = forker.fork(spec, [end.fileno() for end in theirs])
        for end in theirs:
            end.close()
        self._work, self._service = (Connection(end.detach()) for end in ours)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the main thread run `function(member, *args)`; does not wait."""
        _send(self._work, (function.__code__.co_filename, function.__qualname__, args))

    def result(self, deadline_s: float = DEADLINE_S) -> Any:
        return self._receive_reply(self._work, deadline_s)

    def error(self, deadline_s: float = DEADLINE_S) -> BaseException:
        """What the function raised; an assertion error if it did not."""
        try:
            value = self.result(deadline_s)
        except FunctionFailed as failed:
            return failed.error
        raise AssertionError(f"rank {self.rank} returned {value!r} and should have raised")

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def error_of(self, function: Callable[..., Any], *args: Any) -> BaseException:
        self.start(function, *args)
        return self.error()

    def run_in_service_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(member, *args)` in the service thread, also while the main thread is stuck."""
        _send(self._service, (function.__code__.co_filename, function.__qualname__, args))
        return self._receive_reply(self._service, DEADLINE_S)

    def wait_until_stuck(self) -> int:
        """Until the main thread stands still in a collective; return its number. It may wait for one that is slow."""
        return int(self.run_in_service_thread(_wait_until_stuck))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As the out-of-memory killer would."""
        if self._alive:
            os.kill(self.pid, signal.SIGKILL)
            self._alive = False

    def close(self) -> None:
        self.kill()
        self._work.close()
        self._service.close()

    def _receive_reply(self, connection: Connection, deadline_s: float) -> Any:
        if not connection.poll(deadline_s):
            raise TimedOut(f"rank {self.rank} did not answer within {deadline_s} s")
        ok, value, text = pickle.loads(connection.recv_bytes())
        if not ok:
            raise FunctionFailed(self.rank, value, text)
        return value


class World:
    """Some ranks and their store. Use as a context manager.

    Args:
        axes: of the mesh, {"dp": 2, "tp": 2}.
        plain: torch's own gloo group, without Meshbook: what results are compared with.
        device: "cpu", or "cuda" for the GPU of each rank's number.
    """

    def __init__(
        self, forker: ForkServer, axes: Mapping[str, int], *, plain: bool = False, device: str = "cpu"
    ) -> None:
        self.axes = dict(axes)
        self.plain = plain
        self.device = device
        self.generation = 0
        self._forker = forker
        size = 1
        for axis in axes.values():
            size *= axis
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="mbw", dir="/tmp"))
        self.store = f"ipc://{self._folder}/store.sock"
        self._store_pid = forker.fork({"kind": "store", "address": self.store}, [])
        self.members = [RankHandle(forker, rank, size, plain=plain, device=device) for rank in range(size)]
        try:
            self.form_groups()
        except BaseException:
            self.__exit__()
            raise

    def form_groups(self) -> None:
        """Form the groups of the next epoch, on all ranks."""
        self.generation += 1
        self.run(_form_groups, self.generation, self.store, self.axes)

    def replace(self, rank: int) -> None:
        """A new process in the place of one that is dead."""
        self.members[rank].close()
        self.members[rank] = RankHandle(self._forker, rank, self.size, plain=self.plain, device=self.device)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(member, *args)` on the main thread of all ranks; their results, in rank order."""
        for member in self.members:
            member.start(function, *args)
        results, failures = [], []
        for member in self.members:  # all of them, or the next run would be answered with this one's results
            try:
                results.append(member.result())
            except FunctionFailed as failed:
                failures.append(failed)
        if failures:
            raise failures[0]
        return results

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()
        os.kill(self._store_pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# In the rank


class RankContext:
    """This rank, as functions of tests get it."""

    def __init__(self, rank: int, size: int, *, plain: bool, device: str) -> None:
        self.rank = rank
        self.device = device
        self.size = size
        self.mesh: Any = None
        self.stored: dict[str, Any] = {}  # what one function leaves for the next
        self.groups: Any = None
        self.ring: Any = None
        if not plain:
            from meshbook.rank.process_groups.groups import ProcessGroups
            from meshbook.rank.process_groups.ring import CollectiveRing

            self.ring = CollectiveRing()
            self.groups = ProcessGroups(self.ring)


def _mesh_store(here: RankContext, address: str) -> Any:
    """The world's store, one for all its epochs."""
    import zmq

    from meshbook.rank.process_groups.store import MeshStore

    if "store" not in here.stored:
        here.stored["store"] = MeshStore(zmq.Context(), address, TOKEN, timeout_s=DEADLINE_S)
    return here.stored["store"]


def _form_groups(here: RankContext, epoch: int, address: str, axes: dict[str, int]) -> None:
    import torch

    store = _mesh_store(here, address)
    if here.groups is not None:
        here.mesh = here.groups.form(
            epoch,
            rank=here.rank,
            world_size=here.size,
            store=store,
            device=torch.device(here.device, here.rank) if here.device == "cuda" else torch.device(here.device),
            timeout_s=DEADLINE_S,
            axes=axes,
        )
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    here.mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def wait_until_stuck(members: Sequence[RankHandle]) -> None:
    """Until all of them stand still in a collective at once, and so for good."""
    numbers = None
    while numbers != (numbers := [member.wait_until_stuck() for member in members]):
        pass


def _wait_until_stuck(here: RankContext) -> int:
    main = threading.main_thread().ident
    assert main is not None
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    last_position: tuple[int, int] | None = None
    since = time.monotonic()
    while time.monotonic() < deadline:
        frame = sys._current_frames()[main]
        # Slices and polls of a wait end and begin again: what counts is the frame of the wait, not what it calls.
        loops = [caller for caller, _ in traceback.walk_stack(frame) if caller.f_code.co_name in WAITS_IN_LOOPS]
        position = (id(loops[0]), 0) if loops else (id(frame), frame.f_lasti)
        # a thread that the machine gives no processor stands too, before its wait: it does not sleep
        moves = position != last_position or not (loops or _is_main_thread_asleep())
        if moves or not here.ring.running():
            last_position, since = position, time.monotonic()
        elif time.monotonic() - since > MIN_STUCK_S:
            return int(here.ring.last.seq)
        pause.wait(0.005)
    raise AssertionError("the main thread does not stand still in a collective")  # `TimedOut` is of `__main__` here


def _is_main_thread_asleep() -> bool:
    pid = os.getpid()
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(") ")[2].startswith("S")


_modules: dict[str, types.ModuleType] = {}
_loading = threading.Lock()  # both threads may be told to run a function of a module that neither has loaded


def _resolve_function(file: str, name: str) -> Callable[..., Any]:
    """By file, because a test's module has another name under pytest."""
    if file == __file__:
        return cast("Callable[..., Any]", globals()[name])
    with _loading:
        if file not in _modules:
            spec = importlib.util.spec_from_file_location(f"ranks_{Path(file).stem}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _modules[file] = module
    return cast("Callable[..., Any]", getattr(_modules[file], name))


def _run_and_reply(here: RankContext, connection: Connection, request: tuple[str, str, tuple[Any, ...]]) -> None:
    file, name, args = request
    try:
        answer = (True, _resolve_function(file, name)(here, *args), "")
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        answer = (False, error.with_traceback(None), text)
        error.__context__ = error.__cause__ = None
    _send(connection, answer)


def _serve_requests(here: RankContext, connection: Connection) -> None:
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        _run_and_reply(here, connection, request)


def _rank_main(spec: Mapping[str, Any], work: int, service: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here = RankContext(spec["rank"], spec["size"], plain=spec["plain"], device=spec["device"])
    threading.Thread(target=_serve_requests, args=(here, Connection(service)), daemon=True).start()
    _serve_requests(here, Connection(work))
    raise AssertionError("not reached")


# ---------------------------------------------------------------------------------------------------------------------
# In the forker


def _serve_store(address: str) -> NoReturn:
    import zmq

    from meshbook.supervisor.store import StoreServer
    from meshbook.wire.loop import Loop

    loop = Loop()
    server = StoreServer(loop, zmq.Context(), address, TOKEN)  # noqa: F841  it serves for as long as it is held
    while True:
        loop.run_once()


def _fork_server_main(requests: socket.socket) -> NoReturn:
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import meshbook.rank.process_groups.groups  # noqa: F401  so that ranks share it
    from meshbook.wire.process_control import die_with_parent

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # as in the real fork server: ranks share these objects, and looking through them would copy them all
    requests.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 65536, 4)
        if not data:
            os._exit(0)
        spec = json.loads(data)
        pid = os.fork()
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            try:
                if spec["kind"] == "store":
                    _serve_store(spec["address"])
                _rank_main(spec, *descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    from meshbook.wire.process_control import die_with_parent

    die_with_parent()
    _fork_server_main(socket.socket(fileno=int(sys.argv[1])))
