"""The driver of a mesh's hosts on Ray: `python -m meshbook.engines.ray_main`, which the ray engine speaks to by lines.

Nothing else imports ray: that takes seconds, starts threads and blocks. The placement group, an actor for each host and
the connection to the cluster are this process's, and end with it, however it ends; it ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshbook.engines.ray_messages import (
    AllocateNodes,
    CloseInput,
    ClusterDescribed,
    ClusterFailed,
    DescribeCluster,
    HostActorLost,
    HostEnded,
    HostLogged,
    HostStarted,
    HostWrote,
    KillHost,
    NodesAllocated,
    NodesAwaited,
    RayCommand,
    RayLine,
    StartHost,
    WriteInput,
)

# Seconds for a connection to GCS: Ray itself tries for much longer, and does not say why it fails.
_CONNECT_TIMEOUT_S = 5.0
# Seconds that a node may be missing when a host is to be started again. Ray takes some 30 to notice that one is lost.
_REPLACEMENT_TIMEOUT_S = 15.0
_POLL_S = 0.5
# Polls of a connection until whoever waits is to hear of it. Ray takes a minute to find that this machine is no node.
_SLOW_POLLS = 10
# Ray kills the children of an actor that ends. A grandchild hears the end of its standard input, and leaves no files.
_IN_BACKGROUND = 'exec 3<&0; "$0" "$@" <&3 3<&- & exec 3<&-; wait $!'
# Seconds that hosts have to end with their ranks.
_END_TIMEOUT_S = 3.0


class HostActor:
    """Starts a host on its node, and passes on what it writes and how it ends.

    It goes to the node by value, since this module is `__main__`, and so must need nothing but the standard library: an
    interpreter without Meshbook is then an error with words of its own.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, python: str | None, words: tuple[str, ...], environment: dict[str, str]) -> str:
        """Start it in the home folder; return this node's hostname."""
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", _IN_BACKGROUND, python or sys.executable, *words], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env={**os.environ, **environment},
                cwd=os.path.expanduser("~"), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._events.put(("log", f"{error}\n"))
            self._events.put(("end", 127))
        else:
            threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return socket.gethostname()

    def next_event(self) -> tuple[str, Any]:
        """Wait for ("line", its first), ("log", text) or ("end", status)."""
        return self._events.get()

    def write(self, data: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(data)

    def close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        logging = threading.Thread(target=self._pass_errors, args=(process,), daemon=True)
        logging.start()
        assert process.stdout is not None
        if line := process.stdout.readline():
            self._events.put(("line", line.decode("utf-8", "replace")))
        code = process.wait()
        logging.join(0.5)  # ranks that are ending may still hold the pipe
        self._events.put(("end", code))

    def _pass_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        while text := process.stderr.read(1 << 16):
            self._events.put(("log", text.decode("utf-8", "replace")))


class RayMain:
    """Does what the engine asks for."""

    def __init__(self, report: Callable[[RayLine], None], commands: asyncio.Queue[RayCommand | None]) -> None:
        """commands: None is the end of the mesh."""
        self._report, self._commands = report, commands
        self._actors: dict[int, Any] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._num_cpus = self._num_gpus = 0.0
        self._group: PlacementGroup | None = None
        self._files = contextlib.ExitStack()  # of a Ray of ours

    async def run(self) -> None:
        """Serve until the mesh ends."""
        first = await self._commands.get()
        if not isinstance(first, AllocateNodes | DescribeCluster):
            return
        try:
            temp = ""
            if first.cluster == "local":  # a short path, for its sockets
                temp = self._files.enter_context(tempfile.TemporaryDirectory(prefix="mbray", dir="/tmp"))
            connecting = asyncio.create_task(asyncio.to_thread(_connect, first.cluster, temp))
            for poll in itertools.count():
                if (await asyncio.wait({connecting}, timeout=_POLL_S))[0]:
                    break
                if poll == _SLOW_POLLS:
                    what = "start on this machine" if first.cluster == "local" else f"let us in ({first.cluster})"
                    self._report(NodesAwaited(f"Ray: waiting for it to {what}"))
                if self._has_ended():
                    self._files.close()
                    os._exit(0)  # Ray cannot be stopped meanwhile, and ends what it has started with this process
            connecting.result()
            if isinstance(first, DescribeCluster):
                self._report(_describe_cluster())
                return
            if not await self._allocate(first):
                return
        except Exception as error:
            causes = [error, *([error.__cause__] if error.__cause__ is not None else [])]
            self._report(ClusterFailed("; ".join(f"{type(one).__name__}: {one}" for one in causes)))
            return
        self._report(NodesAllocated(ray.util.get_node_ip_address()))
        while (command := await self._commands.get()) is not None:
            self._handle(command)

    async def close(self) -> None:
        """End all hosts, in order if they do so soon, and leave the cluster."""
        for actor in self._actors.values():
            actor.close_input.remote()
        if self._lives:
            await asyncio.wait(self._lives.values(), timeout=_END_TIMEOUT_S)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
        self._files.close()

    def _has_ended(self) -> bool:
        """Whether the mesh has: until it has its nodes, the engine says nothing else."""
        return not self._commands.empty()

    # ---- nodes

    async def _allocate(self, wanted: AllocateNodes) -> bool:
        """Wait for nodes; return whether they are there, else the mesh has ended."""
        self._num_cpus = wanted.num_cpus
        has_gpus = any(node["Resources"].get("GPU") for node in _live_nodes())
        self._num_gpus = wanted.num_gpus if wanted.num_gpus is not None else wanted.gpus_if_any if has_gpus else 0
        asked_for = {"CPU": self._num_cpus, "GPU": self._num_gpus}
        bundle = {name: number for name, number in asked_for.items() if number}
        self._group = placement_group([bundle] * wanted.num_nodes, strategy="STRICT_SPREAD")
        shown: str | None = None
        while not await asyncio.to_thread(self._group.wait, _POLL_S):
            if self._has_ended():
                return False
            if shown is None:  # nodes that are free are taken in a moment
                shown = ""
            elif (state := _describe_wait(wanted.num_nodes, bundle)) != shown:
                shown = state
                self._report(NodesAwaited(state))
        return True

    # ---- hosts

    def _handle(self, command: RayCommand) -> None:
        match command:
            case StartHost():
                self._lives[command.launch] = asyncio.create_task(self._live(command))
            case WriteInput() if (actor := self._actors.get(command.launch)) is not None:
                actor.write.remote(command.text.encode())
            case CloseInput() if (actor := self._actors.get(command.launch)) is not None:
                actor.close_input.remote()
            case KillHost() if (life := self._lives.get(command.launch)) is not None:
                life.cancel()

    async def _live(self, start: StartHost) -> None:
        """Start a host, and follow it until it ends; then its actor does."""
        try:
            await self._follow(start)
        except ray.exceptions.RayError as error:
            self._report(HostActorLost(start.launch, str(error)))
        finally:
            if (actor := self._actors.pop(start.launch, None)) is not None:
                ray.kill(actor)
            del self._lives[start.launch]

    async def _follow(self, start: StartHost) -> None:
        try:
            await self._run_host(start)
        except ray.exceptions.RayActorError as error:
            if "never ran" not in str(error):
                raise
            await self._run_host(start)  # its node had ended before, and Ray has only noticed now

    async def _run_host(self, start: StartHost) -> None:
        assert self._group is not None
        if not await asyncio.to_thread(self._group.wait, _REPLACEMENT_TIMEOUT_S):
            self._report(HostActorLost(start.launch, "Ray has no other node for the one that it has lost"))
            return
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=start.bundle)
        # Cores are not taken again: the actor of a host that is given up may still be ending.
        options = {"num_cpus": 0, "num_gpus": self._num_gpus, "max_restarts": 0, "max_concurrency": 2}
        actor = ray.remote(HostActor).options(**options, scheduling_strategy=strategy).remote()
        self._actors[start.launch] = actor
        self._report(HostStarted(start.launch, await actor.start.remote(start.python, start.words, start.environment)))
        while True:
            match await actor.next_event.remote():
                case ("line", line):
                    self._report(HostWrote(start.launch, line))
                case ("log", text):
                    self._report(HostLogged(start.launch, text))
                case (_, code):
                    self._report(HostEnded(start.launch, code))
                    return


def _connect(cluster: str, temp: str) -> None:
    """Connect to a cluster, or start one. Blocks for some seconds.

    Args:
        temp: the folder for the files of one that is started.
    """
    if cluster == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it is Meshbook's, not one that the user set up
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))  # else Ray leaves one in the home folder
        ray.init("local", include_dashboard=False, _temp_dir=temp, log_to_driver=False, logging_level="ERROR")
        return
    if cluster != "auto":
        host, _, port = cluster.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"{cluster} cannot be reached: {error.strerror or error}") from None
    ray.init(cluster, log_to_driver=False, logging_level="ERROR")


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _describe_cluster() -> ClusterDescribed:
    rows = [
        (str(node["NodeManagerHostname"]), str(node["NodeManagerAddress"]),
         float(node["Resources"].get("CPU", 0)), float(node["Resources"].get("GPU", 0)))
        for node in _live_nodes()
    ]  # fmt: skip
    return ClusterDescribed(ray.__version__, platform.python_version(), tuple(sorted(rows)))


def _describe_wait(num_nodes: int, bundle: dict[str, float]) -> str:
    """Return what a placement group waits for: "Ray: waiting for 2 nodes with 8 GPUs each; the cluster has 1"."""
    have = [node["Resources"] for node in _live_nodes()]
    large = sum(all(node.get(name, 0) >= number for name, number in bundle.items()) for node in have)
    each = " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for name, number in reversed(bundle.items()))
    what = f"{num_nodes} nodes with {each} each" if num_nodes > 1 else f"a node with {each}"
    if large < num_nodes:
        return f"Ray: waiting for {what}; the cluster has {large or 'none'}"
    return f"Ray: waiting for {what}; the cluster has {large}, and too few of them are free"


async def _serve(output: Any) -> None:
    encoder = msgspec.json.Encoder()

    def report(line: RayLine) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor was killed
            output.write(encoder.encode(line) + b"\n")

    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[RayCommand | None] = asyncio.Queue()

    def read() -> None:
        decoder = msgspec.json.Decoder(RayCommand)
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(commands.put_nowait, decoder.decode(line))
        loop.call_soon_threadsafe(commands.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    main = RayMain(report, commands)
    try:
        await main.run()
        await main.close()
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # threads that ask Ray something, for some seconds, are not waited for


def main() -> None:
    # Ray and what it starts write to standard output; the engine's lines have it for themselves.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(_serve(output))


if __name__ == "__main__":
    main()
