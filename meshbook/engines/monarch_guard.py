"""Ends a Monarch job whose driver was killed: `python -m meshbook.engines.monarch_guard`.

A job's workers, on this machine or on others, do not end with the client that has started them. This process waits
for the end of its standard input, on which the driver says what there is to end; it imports Monarch only then.
"""

from __future__ import annotations

import base64
import signal
import sys

import msgspec


class GuardedJob(msgspec.Struct, frozen=True):
    """A job that has been started; as a line."""

    file: str  # the program that has made it; "": none
    pickled: str  # base64


DONE = b"done"  # the line of a driver that has ended its job


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.buffer.read().splitlines()
    if not lines or lines[-1] == DONE:
        return
    from meshbook.engines.monarch_jobs import load_job

    job = msgspec.json.decode(lines[-1], type=GuardedJob)
    load_job(base64.b64decode(job.pickled), job.file).kill()


if __name__ == "__main__":
    main()
