"""debugpy's ports of ranks, and what VS Code needs to attach to them: `%mesh debug 2 --dap`."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import msgspec

from meshbook.controller.session import Session
from meshbook.errors import MeshTimeout, UsageError
from meshbook.ids import Ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import DebugPort

# Seconds that ranks may take to import debugpy and to listen, and between two looks.
_OPEN_TIMEOUT_S = 30.0
_POLL_S = 0.2


def open_ports(session: Session, ranks: Ranks, port: int = 0) -> str:
    """Have debugpy listen in the processes of ranks, also while a cell runs; return what VS Code needs. Blocks.

    Args:
        port: of one rank; 0: any that is free.

    Raises:
        UsageError: debugpy cannot listen there.
        MeshTimeout: a rank does not answer.
    """
    if port and len(ranks) > 1:
        raise UsageError(f"--port {port} is for one rank, and these are {len(ranks)}: {name_ranks(ranks)}")
    return describe_ports(session.name, _open(session, ranks, port), socket.gethostname())


def _open(session: Session, ranks: Ranks, port: int) -> dict[int, DebugPort]:
    opened: dict[int, DebugPort] = {}
    deadline = time.monotonic() + _OPEN_TIMEOUT_S
    while missing := tuple(rank for rank in ranks if rank not in opened):
        if time.monotonic() > deadline:
            raise MeshTimeout(
                f"no debugpy port of {name_ranks(missing)} within {_OPEN_TIMEOUT_S:.0f} s: the interpreter's lock is "
                "taken there, or the process is stopped; %mesh why says what it does"
            )
        for part in session.query(messages.OpenDebugPort(session.connection.next_call_id(), missing, port), 5.0):
            if part.outcome.status == "lost":
                raise UsageError(f"{name_ranks(part.ranks)}: gone; %mesh heal starts a new process")
            reply = part.outcome.reply
            found = DebugPort() if reply is None else msgspec.convert(reply, DebugPort)
            if found.problem:
                raise UsageError(f"{name_ranks(part.ranks)}: {found.problem}")
            if found.port:
                opened.update(dict.fromkeys(part.ranks, found))
        time.sleep(_POLL_S)
    return opened


def describe_ports(mesh: str, ports: dict[int, DebugPort], here: str) -> str:
    """Return the entries of launch.json for these ranks, and what else is needed on the machine `here`."""
    entries: list[Any] = []
    forwarded: dict[str, list[int]] = {}
    for rank, port in ports.items():
        entry: dict[str, Any] = {
            "name": f"rank {rank} of {mesh}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": port.host, "port": port.port},
            "justMyCode": False,
        }
        if port.machine != here:
            entry["pathMappings"] = [{"localRoot": "${workspaceFolder}", "remoteRoot": port.cwd}]
            forwarded.setdefault(port.machine, []).append(port.port)
        entries.append(entry)
    lines = [f'debugpy listens in {name_ranks(sorted(ports))}; in VS Code\'s launch.json, below "configurations":']
    lines += [f"{json.dumps(entry, indent=2)}," for entry in entries]
    for machine, numbers in forwarded.items():
        ways = " ".join(f"-L {number}:127.0.0.1:{number}" for number in numbers)
        lines.append(f"on the machine with VS Code, while it is attached: ssh -N {ways} {machine}")
    lines.append("Whoever has an account there can attach, until the rank's process ends.")
    return "\n".join(lines)
