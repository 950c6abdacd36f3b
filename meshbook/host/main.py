"""A host as a process of its own: `python -m meshbook.host.main FOLDER HOST ADDRESS`, the token on standard input.

It connects to the supervisor and shows the token; from then on a HostAgent does all the work.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import zmq

from meshbook.errors import TransferError
from meshbook.fold.outcomes import failure_report_for
from meshbook.host.agent import HostAgent
from meshbook.host.rlimits import raise_fd_limit
from meshbook.wire import codec, keys, messages
from meshbook.wire.loop import Loop
from meshbook.wire.process_control import die_with_parent

log = logging.getLogger("meshbook.host")

_LINGER_MS = 500


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    raise_fd_limit()
    folder, host, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    token = sys.stdin.read().strip()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loop = Loop()
    supervisor_socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    supervisor_socket.setsockopt(zmq.IDENTITY, b"h%d" % host)
    keys.configure_socket(supervisor_socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
    supervisor_socket.connect(address)

    is_terminating = False

    def report(message: messages.HostReport) -> None:
        try:
            frames = codec.encode(message)
        except TransferError as error:  # the supervisor waits for a reply, so send the failure
            log.warning("%s", error)
            frames = codec.encode(failure_report_for(message, error))
        supervisor_socket.send_multipart(frames)
        if is_terminating and isinstance(message, messages.RankExited) and not agent.ledger.living():
            agent.stop(0.0, loop.stop)

    agent = HostAgent(loop, context, folder, token, host, report, mergeable=True)

    def hear(frames: list[bytes]) -> None:
        command = codec.host_commands.decode(frames)
        if isinstance(command, messages.Exit):
            agent.stop(command.grace_s, loop.stop)
        else:
            agent.handle(command, frames[1])

    def terminate() -> None:
        """SIGTERM: the supervisor ends the ranks, perhaps after a checkpoint, and this host ends with the last."""
        nonlocal is_terminating
        is_terminating = True
        if ranks := agent.ledger.living_ranks:
            report(messages.TerminationRequested(ranks))
        else:
            agent.stop(0.0, loop.stop)

    loop.watch_socket(supervisor_socket, hear)
    loop.watch_signal(signal.SIGTERM, terminate)
    ready = messages.HostReady(host=host, hostname=agent.hostname, pid=os.getpid(), token=token)
    supervisor_socket.send_multipart(codec.encode(ready))
    loop.run()
    agent.close()
    supervisor_socket.close(linger=_LINGER_MS)  # the ranks' last output may still be in transit
    context.term()


if __name__ == "__main__":
    main()
