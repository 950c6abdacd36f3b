"""The service thread, beside a host that is this test: what it answers, and that no exception ends it."""

from __future__ import annotations

import errno
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from meshbook.errors import ProtocolError
from meshbook.rank import service
from meshbook.rank.call_state import CallState
from meshbook.rank.checkpoints.door import CheckpointDoor
from meshbook.rank.outbox import Outbox
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.preemption import PreemptionPoint, TerminationSignal
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.rank.reporter import Reporter
from meshbook.rank.service import Service
from meshbook.wire import codec, messages, spawn
from meshbook.wire.link import Link
from tests.budget import WAIT_S

WAIT_MS = 30_000


class _Pool:
    def trim(self, idle_s: float) -> None: ...


class _Reader:
    def drain_released(self) -> tuple[str, ...]:
        return ()


class Rank:
    """What the service thread uses of a rank: its groups and its objects, of which there are none."""

    def __init__(self) -> None:
        self.ring = CollectiveRing()
        self.pool, self.reader, self.values = _Pool(), _Reader(), self
        self.released: list[str] = []
        self.fails: BaseException | None = None

    def complete_futures(self) -> None:
        pass

    def end_overdue(self) -> None:
        pass

    def release(self, refs: tuple[str, ...], segments: tuple[str, ...]) -> None:
        if self.fails is not None:
            raise self.fails
        self.released += refs


class Host:
    """The other end of a service thread."""

    def __init__(self, folder: Path, rank: Rank) -> None:
        self.rank = rank
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = Link()
        self.service, self.work = (self.context.socket(zmq.ROUTER) for _ in range(2))
        addresses = [f"ipc://{folder}/{name}.sock" for name in ("service", "work")]
        for socket, address in zip((self.service, self.work), addresses, strict=True):
            socket.bind(address)
        reported = spawn.RankConfig(
            rank=0,
            local_rank=0,
            local_world_size=1,
            world_size=1,
            token="",
            work_address=addresses[1],
            service_address=addresses[0],
            spec=messages.MeshSpec(axes={"rank": 1}),
            threads=1,
        )
        self.output = OutputBuffer(redirect_fds=False)
        reporter = Reporter(self.context, reported, self.output)
        self.answers: dict[type, Callable[[Any], Any]] = {messages.PreviewNames: lambda ask: {}}
        parts: Any = rank
        nothing: Any = None
        self.outbox = Outbox()
        self.thread = Service(
            self.context,
            reported,
            "cpu",
            CallState(0),
            parts,
            parts,
            output=self.output,
            reporter=reporter,
            snapshotter=nothing,
            query_handlers=self.answers,
            interrupt_call=nothing,
            leave_debugger=nothing,
            running_file=lambda: None,
            checkpoints=CheckpointDoor(0, "cpu", {}, nothing, self.outbox),
            outbox=self.outbox,
            preemption=PreemptionPoint(),
            termination=TerminationSignal(),
        )
        self.thread.start(messages.RankReady(rank=0, pid=os.getpid(), device="cpu", token=""))
        self.hear(messages.RankReady)

    def send(self, *frames: bytes) -> None:
        self.service.send_multipart([b"r0", *frames])

    def tell(self, command: Any) -> None:
        self.tell_body(codec.encode_body(command))

    def tell_body(self, body: bytes) -> None:
        self.send(self.link.number(body), body)

    def hear(self, kind: type, which: Callable[[Any], bool] = lambda report: True) -> Any:
        """The next report of this kind; others are dropped."""
        while True:
            assert self.service.poll(WAIT_MS), f"no {kind.__name__} came"
            report = codec.rank_reports.decode(self.service.recv_multipart()[1:])
            if isinstance(report, kind) and which(report):
                return report

    def close(self) -> None:
        self.thread._loop.stop()
        self.output.wake()
        assert self.thread.thread is not None
        self.thread.thread.join(WAIT_S)
        self.thread._socket.close()
        self.context.destroy(linger=0)
        self.outbox.close()


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def host(tmp_path: Path, rank: Rank) -> Iterator[Host]:
    host = Host(tmp_path, rank)
    yield host
    host.close()


def _release(ref: str) -> messages.Release:
    return messages.Release(ranks=(0,), refs=(ref,))


@pytest.mark.parametrize("error", [RuntimeError("cannot start new thread"), SystemExit(3), KeyboardInterrupt()])
def test_a_command_that_fails_is_told_once_and_the_thread_goes_on(host: Host, rank: Rank, error: BaseException) -> None:
    rank.fails = error
    host.tell(_release("a"))
    host.tell(_release("b"))
    failed = host.hear(messages.ServiceFailed)
    assert failed.activity == "carrying out Release"
    assert failed.error == f"{type(error).__name__}: {error}"
    assert "in release" in failed.traceback
    host.send(codec.PROTOCOL, b"")
    assert host.hear(messages.ServiceFailed).activity == "reading a message"  # and not Release a second time
    rank.fails = None
    host.tell(_release("c"))
    host.tell(messages.PreviewNames(call="c1", ranks=(0,), names=()))  # type: ignore[arg-type]
    host.hear(messages.RankReply)
    assert rank.released == ["c"]


def test_a_message_that_cannot_be_read_does_not_end_the_thread(host: Host) -> None:
    host.tell_body(b"\xc1")
    failed = host.hear(messages.ServiceFailed)
    assert (failed.activity, failed.error.partition(":")[0]) == ("reading a message", ProtocolError.__name__)
    host.hear(messages.RankHeartbeat)


def test_a_rank_that_cannot_measure_itself_goes_on_beating(
    host: Host, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(rank.pool, "trim", fails)
    monkeypatch.setattr(host.thread._probes, "measure", fails)
    reported = {host.hear(messages.ServiceFailed).activity for _ in range(2)}
    assert reported == {"giving back shared memory", "measuring"}
    assert host.hear(messages.RankHeartbeat).metrics is None


def test_a_rank_without_file_descriptors_goes_on_beating(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(service, "open", fails, raising=False)
    assert host.hear(messages.RankHeartbeat).rss_bytes > 0


def test_a_question_that_raises_anything_is_answered(host: Host, rank: Rank) -> None:
    def raises(*args: object) -> None:
        raise KeyboardInterrupt("from __getattr__ of the user's")

    host.answers[messages.PreviewNames] = raises
    host.tell(messages.PreviewNames(call="c1", ranks=(0,), names=("x",)))  # type: ignore[arg-type]
    answer = host.hear(messages.RankReply).content
    assert answer == {"error": "KeyboardInterrupt: from __getattr__ of the user's"}


def test_output_goes_on_after_a_failure(host: Host, rank: Rank) -> None:
    rank.fails = RuntimeError("x")
    host.tell(_release("a"))
    host.hear(messages.ServiceFailed)
    host.output.write("stdout", "still here\n")
    assert host.hear(messages.RankOutput).items == (messages.Text("stdout", "still here\n"),)


def test_the_thread_uses_the_ranks_gpu_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    cuda = types.SimpleNamespace(is_initialized=lambda: in_use, set_device=chosen.append)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    thread = Service.__new__(Service)
    thread._device, thread._is_device_selected = "cuda:3", False
    in_use = False
    thread._select_device()  # asking for a device would initialise CUDA, on this thread
    assert chosen == []
    in_use = True
    thread._select_device()
    thread._select_device()
    assert chosen == ["cuda:3"]


def test_what_a_thread_reports_of_a_checkpoint_is_sent(host: Host) -> None:
    for number in range(3):
        host.outbox.put(messages.CheckpointWritten(rank=0, save=f"a-{number}", generation=1))
    assert [host.hear(messages.CheckpointWritten).save for _ in range(3)] == ["a-0", "a-1", "a-2"]


def test_commands_about_saves_that_nobody_knows_are_ignored(host: Host) -> None:
    host.tell(messages.WriteCheckpointMetadata(ranks=(0,), save="a-1"))
    host.tell(messages.DropCheckpoint(ranks=(0,), save="a-1"))
    host.tell(messages.PreviewNames(call="b-1", ranks=(0,), names=()))
    assert host.hear(messages.RankReply).call == "b-1"
