"""Which processes `spawn_procs` starts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys
    from meshbook.actor import Actor, endpoint, this_host

    class Idle(Actor):
        @endpoint
        def has_torch(self):
            return "torch" in sys.modules

    procs = this_host().spawn_procs()
    print(procs.spawn("idle", Idle).has_torch.call_one().get(100))
    procs.stop().get(30)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("imports_torch", [True, False])
def test_processes_have_torch_if_the_program_has_imported_it(imports_torch: bool) -> None:
    source = ("import torch\n" if imports_torch else "") + textwrap.dedent(PROGRAM)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=170)
    assert done.stdout == f"{imports_torch}\n", done.stderr
