"""One host of real ranks, driven by hand: an agent on the test's own thread, and what it has reported."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from meshbook.host.agent import HostAgent
from meshbook.supervisor.store import StoreServer
from meshbook.wire import codec, messages
from meshbook.wire.loop import Loop
from tests.budget import WAIT_S

# Seconds until a wait counts as a hang.
DEADLINE_S = WAIT_S


class HostDriver:
    """A host agent with its ranks. `send` gives it a command; `wait_until` lets its loop turn."""

    def __init__(self, size: int, *, torch: bool, **options: Any) -> None:
        """options: more of the mesh's specification."""
        self.loop = Loop()
        self.reports: list[Any] = []
        self._context = zmq.Context()
        self._folder = Path(tempfile.mkdtemp(prefix="mbh", dir="/tmp"))
        self._calls = itertools.count(1)
        self.agent = HostAgent(self.loop, self._context, self._folder, "token", 0, self.reports.append)
        self.ranks = tuple(range(size))
        self.spec = messages.MeshSpec(
            axes={"rank": size}, torch=torch, process_group=torch, cwd=str(Path.cwd()), **options
        )
        start = messages.StartRanks(spec=self.spec, ranks=self.ranks, world_size=size, host_ranks=self.ranks)  # type: ignore[arg-type]
        self.send(start)
        self._generation = 0
        self._store = StoreServer(self.loop, self._context, f"ipc://{self._folder}/store.sock", "token")
        try:
            self.form_groups()
        except BaseException:
            self.close()
            raise

    def form_groups(self) -> None:
        """The process groups, the first time or again."""
        self._generation += 1
        form = messages.FormGroups(
            call=self.new_call_id(),  # type: ignore[arg-type]
            ranks=self.ranks,  # type: ignore[arg-type]
            generation=self._generation,
            store_address=self._store.address,
        )
        self.send(form)
        outcome = self.wait_for(messages.CallFinished, form.call).outcomes[0].outcome
        assert outcome.status == "ok", outcome.error

    def new_call_id(self) -> str:
        return f"call-{next(self._calls)}"

    def send(self, command: Any) -> None:
        self.agent.handle(command, codec.encode_body(command))

    def wait_until(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Let the loop turn until `condition()` is; what it gave."""
        deadline = time.monotonic() + deadline_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it did not become true within {deadline_s:.0f} s"
            self.loop.run_once(max_wait_s=0.02)
        return value

    def wait_for(self, kind: type, call: str | None = None) -> Any:
        """The first report of this kind (and call) that has come or comes."""

        def find_report() -> Any:
            of_kind = [report for report in self.reports if isinstance(report, kind)]
            return next((report for report in of_kind if call is None or report.call == call), None)  # type: ignore[attr-defined]

        return self.wait_until(find_report)

    def start_cell(
        self, source: str, ranks: tuple[int, ...] | None = None, label: str = "cell 1", *, allow_input: bool = False
    ) -> str:
        """Start a cell; its call."""
        call = self.new_call_id()
        self.send(
            messages.RunCell(
                call=call,  # type: ignore[arg-type]
                ranks=self.ranks if ranks is None else ranks,  # type: ignore[arg-type]
                source=source,
                execution_count=1,
                label=label,
                allow_input=allow_input,
            )
        )
        return call

    def run(self, source: str) -> messages.CallFinished:
        call = self.start_cell(source)
        finished: messages.CallFinished = self.wait_for(messages.CallFinished, call)
        self._release_groups(call)
        return finished

    def start_cell_and_wait(self, source: str, ranks: tuple[int, ...] | None = None, label: str = "cell 1") -> str:
        """Start a cell whose first line says `begun`, and wait until all its ranks have."""
        call = self.start_cell("print('begun', flush=True)\n" + source, ranks, label)
        wanted = set(self.ranks if ranks is None else ranks)

        def have_all_begun() -> bool:
            lines = [
                item.ranks
                for report in self.reports
                if isinstance(report, messages.CallOutput) and report.call == call
                for item in report.items
                if isinstance(item, messages.Line) and item.text == "begun"
            ]
            return wanted <= {rank for ranks in lines for rank in ranks}

        self.wait_until(have_all_begun)
        return call

    def interrupt(self, call: str) -> messages.CallFinished:
        """Stop a call; its ranks may begin collectives again, as the supervisor lets them once they are in step."""
        self.send(messages.Interrupt(ranks=self.ranks, target=call))  # type: ignore[arg-type]
        finished: messages.CallFinished = self.wait_for(messages.CallFinished, call)
        self._release_groups(call)
        return finished

    def _release_groups(self, call: str) -> None:
        self.send(messages.ResumeCollectives(ranks=self.ranks, about_call=call, generation=self._generation))  # type: ignore[arg-type]

    def take_snapshots(self, ranks: tuple[int, ...] | None = None, **options: Any) -> dict[int, messages.RankSnapshot]:
        """Snapshots by rank."""
        call = self.new_call_id()
        asked = self.ranks if ranks is None else ranks
        self.send(messages.TakeSnapshots(call=call, ranks=asked, **options))  # type: ignore[arg-type]
        taken = self.wait_for(messages.SnapshotReply, call)
        return {snapshot.rank: snapshot for snapshot in taken.snapshots}

    def take_snapshots_until(
        self, is_so: Callable[[dict[int, messages.RankSnapshot]], Any]
    ) -> dict[int, messages.RankSnapshot]:
        """Take snapshots until they show something: a rank may be on its way there, or too slow to answer in time."""

        def taken() -> dict[int, messages.RankSnapshot] | None:
            found = self.take_snapshots()
            return found if is_so(found) else None

        found: dict[int, messages.RankSnapshot] = self.wait_until(taken)
        return found

    def pid(self, rank: int) -> int:
        child = self.agent._processes.get(rank)
        assert child is not None
        return child.pid

    def close(self) -> None:
        ended: list[bool] = []
        for rank in self.ranks:
            with contextlib.suppress(OSError, AssertionError):
                if self.agent.ledger.ranks[rank].exit_reason is None:
                    os.kill(self.pid(rank), signal.SIGCONT)
        self.agent.stop(0.5, lambda: ended.append(True))
        self.wait_until(lambda: ended)
        self.agent.close()
        self._store.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def running_host(size: int, *, torch: bool = False, **options: Any) -> Iterator[HostDriver]:
    made = HostDriver(size, torch=torch, **options)
    try:
        yield made
    finally:
        made.close()
