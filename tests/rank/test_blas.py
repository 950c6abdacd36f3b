"""OpenBLAS after it was loaded with one thread, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("starts_processes")

SOURCE = """
import ctypes, numpy
from meshbook.rank import blas
path, = blas._find_loaded_libraries("openblas")
library = ctypes.CDLL(path)
name = next(name for name in blas._SETTER_NAMES if hasattr(library, name))
threads = getattr(library, name.replace("set_num", "get_num"))
a = numpy.ones((300, 300))
before, set_, after = threads(), blas.set_blas_threads(3), threads()
if (pid := __import__("os").fork()) == 0:
    __import__("os")._exit(0 if (a @ a)[0, 0] == 300 else 1)
print(before, set_, after, (a @ a)[0, 0], __import__("os").waitpid(pid, 0)[1])
"""


def test_a_rank_gets_its_own_number_of_threads_although_the_fork_server_had_one() -> None:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", SOURCE], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "True", "3", "300.0", "0"]
