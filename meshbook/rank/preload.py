"""What the process that ranks are forked from does once, so that no rank has to."""

from __future__ import annotations

import os
import sys

from meshbook.ids import CallId
from meshbook.rank.cells.code_runner import CodeRunner
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.previews import introspection
from meshbook.wire.messages import RunCell


def preload() -> None:
    """Do once, in the process that ranks are forked from, what every rank would do at its first cell and first error.

    Starts no thread, leaves no file open and no shell behind; takes 0.2 s.
    """
    environment = dict(os.environ)
    output = OutputBuffer(redirect_fds=False)
    output.install()
    gate = InterruptGate()
    shell = RankShell.make(output=output, gate=gate)
    runner = CodeRunner(shell, output, gate)
    try:
        for source in ("1 + 1", "def f():\n    return 1 / 0\n\nf()", "%who", "x = ["):
            runner.run(RunCell(call=CallId("preload"), ranks=(), source=source))
        introspection.complete(shell, "sys.st", 6)
        introspection.inspect(shell, "print", 5, 1)
    finally:
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # nothing has failed on any rank yet
            vars(sys).pop(name, None)
        shell.close()
        output.uninstall()
        os.environ.clear()
        os.environ.update(environment)
