"""What a client leaves on the ranks when it is killed, or goes: nothing but the names that its cells bound."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")

HELD = """
import gc
objects = next(one for one in gc.get_objects() if type(one).__name__ == "RankObjects")
len(objects.values), objects.pool.used_bytes >> 20
"""

CLIENT = """
import os, sys, meshbook
from meshbook.controller.remote import _evaluate, RemoteValue
from meshbook.rank.previews import expressions
m = meshbook.attach("left-behind")
m.run("import numpy as np; big = np.ones(1 << 19); large = np.ones(1 << 21)")
value = RemoteValue(m.session, expressions.Expression(expressions.NameRef("big")), m.ranks)
handles = [_evaluate(value, value._meshbook_path.attr("copy").call()) for _ in range(5)]
whole = m.pull("large")
print(*m.run(sys.argv[2], echo=False).values[0], flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
m.detach()
"""


def held(mesh: Mesh) -> Any:
    """How many values the rank keeps behind handles, and MiB of its shared memory in use."""
    return mesh.run(HELD, echo=False).values[0]


@pytest.mark.parametrize("how", ["killed", "detached"])
def test_a_client_that_goes_leaves_nothing_but_names_on_the_ranks(how: str) -> None:
    with create_mesh(1, name="left-behind", torch=False) as mesh:
        own = mesh.execute(lambda: [1, 2, 3])
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, how, HELD], timeout=2 * WAIT_S, check=False, capture_output=True, text=True
        )
        kept, used = done.stdout.split()
        assert int(kept) >= 5, done.stderr
        assert int(used) >= 16
        when(lambda: held(mesh)[1] == 0)
        assert held(mesh)[0] < 5
        assert mesh.run("big.nbytes >> 20").values.same() == 4
        assert own[0] == [1, 2, 3]


def test_a_value_that_fits_no_message_is_an_error_and_the_mesh_works_on() -> None:
    with create_mesh(1, torch=False) as mesh:
        mesh.run(
            "import numpy as np; from meshbook.wire import codec, pickling, segments\n"
            "def none_left(*arguments): raise OSError(24, 'Too many open files')\n"
            "segments.Segment.create = none_left; big = np.ones(1 << 19)\n"
            "pickling.MAX_MESSAGE_BYTES = codec.MAX_MESSAGE_BYTES = 1 << 20"
        )
        with pytest.raises(CellError, match=r"4 MiB .* a message takes 1 MiB.*in parts"):
            mesh.pull("big")
        assert mesh.run("1 + 1").values.same() == 2
