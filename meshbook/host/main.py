"""A host as a process of its own, on the supervisor's machine: `python -m meshbook.host.main FOLDER HOST IDENTITY
ADDRESS`, the token as a line on standard input, which stays open as long as a supervisor lives.

`HostProcess` connects to the supervisor and shows the token; from then on a HostAgent does all the work. It has a
standby, as the supervisor has, from when its ranks run. `host/remote.py` starts one on another machine.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from meshbook.errors import TransferError
from meshbook.fold.outcomes import failure_report_for
from meshbook.host.agent import HostAgent
from meshbook.host.keeper import Keeper, end_like
from meshbook.host.project_copy import ProjectCopy
from meshbook.host.rlimits import raise_fd_limit
from meshbook.wire import codec, messages
from meshbook.wire.descriptor_reserve import DescriptorReserve
from meshbook.wire.linked_sockets import LinkedDealer
from meshbook.wire.process_control import die_with_pipe
from meshbook.wire.processes import has_pidfds
from meshbook.wire.remote_start import HostPlace
from meshbook.wire.replicated_loop import ReplicatedLoop
from meshbook.wire.transfers import without_data

log = logging.getLogger("meshbook.host")

_LINGER_MS = 500
_LEASE_CHECK_S = 1.0


class HostProcess:
    """This process as a host: `run()` returns when the host has ended."""

    def __init__(
        self,
        folder: Path,
        host: int,
        token: str,
        *,
        keeper: Keeper | None = None,
        place: HostPlace | None = None,
        lease_s: float = math.inf,
    ) -> None:
        """Create the agent. It may prepare to fork ranks before `run`.

        Args:
            keeper: of this process; None: it has none, and no standby.
            place: in a mesh of several machines; None: it is on one.
            lease_s: seconds without a word from the supervisor after which its ranks end.
        """
        self._host, self._token, self._keeper, self._pid = host, token, keeper, os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.loop = ReplicatedLoop()
        self.loop.on_takeover = self._take_over
        self._reserve = DescriptorReserve(self.loop)
        self._supervisor: LinkedDealer | None = None  # before `run`
        self._is_terminating = self._is_ending = False
        self._is_cut_off = False
        self._lease_s = lease_s
        self._silent_checks = 0
        self._has_heard = False
        self._project = ProjectCopy(self.loop, folder, self._report)
        self.agent = HostAgent(self.loop, self._context, folder, token, host, self._report, mergeable=True, place=place)
        self.agent.launcher.keeper = keeper.pid if keeper is not None else 0

    def run(
        self,
        identity: str,
        supervisor: str,
        facts: messages.MachineFacts | None = None,
        *,
        server_key: str | None = None,
    ) -> None:
        """Connect to the supervisor, and serve until it or a signal ends this host.

        Args:
            identity: of this connection; the supervisor knows it.
            facts: of this machine, if it is another than the supervisor's.
            server_key: the supervisor's public CURVE key, if its address is a tcp one.
        """
        self._supervisor = LinkedDealer(
            self._context, supervisor, identity.encode(), server_key=server_key, act=self.loop.act
        )
        self.loop.watch_socket(self._supervisor.socket, self._hear, shorten=_without_data)
        self.loop.watch_signal(signal.SIGTERM, self._terminate)
        ready = messages.HostReady(
            host=self._host, hostname=self.agent.hostname, pid=os.getpid(), token=self._token, facts=facts
        )
        self._supervisor.introduce(codec.encode_body(ready))
        if facts is not None:
            self.agent.values.listen(facts.address)
        self._check_lease()
        self.loop.run()
        self.agent.close()
        self._project.close()
        self._supervisor.close(linger_ms=_LINGER_MS)  # the ranks' last output may still be in transit
        self._context.term()

    def _take_over(self, ended_at: float) -> None:
        """Go on in the place of the host agent that this process is a standby of, and that has ended at `ended_at`."""
        assert self._keeper is not None
        assert self._supervisor is not None
        self._keeper.begin()
        former, self._pid = self._pid, os.getpid()
        self._context = zmq.Context()
        self._supervisor.reopen(self._context)
        self.loop.watch_socket(self._supervisor.socket, self._hear, shorten=_without_data)
        self.agent.take_over(self._context)
        self._project.take_over()
        text = (
            f"the host agent of host {self._host} (pid {former}) was killed; its standby (pid {self._pid}) took over "
            f"after {self.loop.clock.monotonic() - ended_at:.2f} s, and nothing is lost"
        )
        log.warning("%s", text)
        self.agent.notify(messages.Notice(text))

    def stop(self, reason: str) -> None:
        """End the ranks at once, and then this host, which says no more: who started it knows why."""
        log.warning("host %d ends: %s", self._host, reason)
        self._is_cut_off = True
        self._end(0.0)

    def _end(self, grace_s: float) -> None:
        """End the ranks, by SIGKILL after `grace_s` seconds, and then this host."""
        self._is_ending = True
        self.loop.stop_replicating()
        self.agent.stop(grace_s, self.loop.stop)

    def _report(self, message: messages.HostReport) -> None:
        assert self._supervisor is not None
        if self._is_cut_off:
            return
        try:
            body = codec.encode_body(message)
        except TransferError as error:  # the supervisor waits for a reply, so send the failure
            log.warning("%s", error)
            body = codec.encode_body(failure_report_for(message, error))
        if isinstance(message, messages.CallFinished) and self._keeper is not None and not self._is_ending:
            self.loop.replicate()  # from the first on: its ranks run
        self._supervisor.send(body)
        if self._is_terminating and isinstance(message, messages.RankExited) and not self.agent.ledger.living():
            self._end(0.0)

    def _hear(self, frames: list[bytes]) -> None:
        assert self._supervisor is not None
        self._silent_checks, self._has_heard = 0, True
        body = self._supervisor.accept(frames)
        if body is None:
            return
        command = codec.host_commands.decode_body(body)
        match command:
            case messages.Exit():
                self._end(command.grace_s)
            case messages.StartRanks() if self._is_ending:
                pass  # nobody would end what is started now; the supervisor learns that this host has ended
            case messages.StartRanks() | messages.PrepareSpares():
                self.agent.handle(msgspec.structs.replace(command, spec=self._project.localize(command.spec)), body)
            case messages.SyncFiles() | messages.FileParts():
                self._project.handle(command)
            case messages.ShowNotice():
                self.agent.notify(command.notice)
            case messages.KeepAlive():
                self._supervisor.send(codec.encode_body(messages.HostAlive(command.sent_at)))
            case _:
                self.agent.handle(command, body)

    def _check_lease(self) -> None:
        """End the ranks if the supervisor counts them as lost by now: it has not been heard of for long enough.

        What is counted are looks, not seconds: a host that was itself stopped finds the words that came meanwhile.
        """
        if self._silent_checks * _LEASE_CHECK_S >= self._lease_s:
            what = "no word from" if self._has_heard else "is there a firewall? No connection to"
            self.stop(f"{what} the mesh's supervisor for {self._lease_s:.0f} s")
        else:
            self._silent_checks += 1
            self.loop.call_later(_LEASE_CHECK_S, self._check_lease)

    def _terminate(self) -> None:
        """SIGTERM: the supervisor ends the ranks, perhaps after a checkpoint, and this host ends with the last."""
        self._is_terminating = True
        if ranks := self.agent.ledger.living_ranks:
            self._report(messages.TerminationRequested(ranks))
        else:
            self._end(0.0)


def _without_data(frames: list[bytes]) -> list[bytes]:
    return [*frames[:-1], without_data(frames[-1], codec.host_commands)]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_fd_limit()
    folder, host, identity, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    token, stdin = sys.stdin.readline().strip(), sys.stdin.fileno()
    if has_pidfds():  # all of it ends when the supervisor has ended, and has no standby
        keeper = Keeper(stdin)
        end_like(keeper.run(lambda: HostProcess(folder, host, token, keeper=keeper).run(identity, address)))
    die_with_pipe(stdin, with_group=False)
    HostProcess(folder, host, token).run(identity, address)


if __name__ == "__main__":
    main()
