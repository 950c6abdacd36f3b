"""The house in which every test runs: a runtime folder of its own, quiet threads, and a look round at the end.

Nothing here imports torch: a run of a few pure tests starts at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from hypothesis import settings

from tests.gate import Gate
from tests.leaks import GRACE_S, Run

ROOT = Path(__file__).resolve().parent.parent

# A shell that starts a run in the background has it ignore SIGINT, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports torch or numpy, for these read it once. Ranks of one test share few cores: with a pool of
# threads in each they fight, and numbers that are compared bit for bit would depend on how many threads summed them.
os.environ["OMP_NUM_THREADS"] = "1"

# Where jupyter_core looks for its folders is its own affair; unset, it warns that it will look elsewhere one day.
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"

# The same examples in each run, however slow the machine. `--hypothesis-profile=explore` draws new ones, and more.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile("repeatable")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def reason_to_skip(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None: they can."""
    match marker:
        case "gpu" if not Path("/dev/nvidiactl").exists():  # the driver's own file: asks without initialising CUDA
            return "no NVIDIA GPU on this machine"
        case "browser" if importlib.util.find_spec("playwright") is None:
            return "playwright is not installed: pip install -e '.[dev]'"
        case "browser" if not any(map(shutil.which, CHROMIUM)):
            return "no Chromium on PATH: apt-get install chromium"
        case "monarch" if importlib.util.find_spec("monarch") is None:
            return "torchmonarch is not installed: pip install -e '.[monarch]'"
        case "ray" if importlib.util.find_spec("ray") is None:
            return "ray is not installed: pip install -e '.[ray]'"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "browser", "monarch", "ray"):
            if item.get_closest_marker(marker) and (reason := reason_to_skip(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))


# Tests that start meshes. Importing torch is most of what a start costs, so one fork server does it for all of them.
FOLDERS_WITH_MESHES = ("actors", "browser", "cli", "controller", "engines", "kernel", "random_faults", "tensors", "zoo")


@contextmanager
def fork_server(folder: Path) -> Iterator[None]:
    """What all meshes of the run branch their fork servers off; until it listens, they start their own."""
    from meshbook.controller.launch import FORK_SERVER_VARIABLE
    from meshbook.host.starter import rank_environment

    listen = folder / "fork.sock"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-P", "-m", "meshbook.rank.forkserver", str(theirs.fileno()), str(listen)]
            server = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=rank_environment(), start_new_session=True
            )
        os.environ[FORK_SERVER_VARIABLE] = str(listen)
        yield
        del os.environ[FORK_SERVER_VARIABLE]
    server.kill()  # it may still import torch
    server.wait(30)


def isolate(run: Run) -> None:
    """Give this process, and all that it starts, the surroundings of a run and nothing of the person who runs it."""
    os.environ.update(run.environment)
    # The tree under test and its kernelspec, in every kernel, supervisor and rank, whatever else is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kernels = run.home / "jupyter" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "meshbook").symlink_to(ROOT / "kernelspec")
    os.environ["JUPYTER_PATH"] = str(kernels.parent)
    # And nothing of the person who runs the tests: no startup files, no history, no connection files.
    os.environ["IPYTHONDIR"] = str(run.home / "ipython")
    os.environ["JUPYTER_CONFIG_DIR"] = str(run.home / "jupyter-config")
    os.environ["JUPYTER_DATA_DIR"] = str(run.home / "jupyter-data")
    os.environ["JUPYTER_RUNTIME_DIR"] = str(run.home / "jupyter-run")


@pytest.fixture(scope="session", autouse=True)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """This run's own surroundings, for every process that a test starts.

    It is the first fixture to be set up and so the last to be torn down, when tests and fixtures have all ended what
    they began. What is left then is an error of the run, shown at the last test, whichever test began it.
    """
    run = Run()
    isolate(run)
    folders = {item.path.relative_to(ROOT / "tests").parts[0] for item in request.session.items}
    with_meshes = not folders.isdisjoint(FOLDERS_WITH_MESHES) and importlib.util.find_spec("torch") is not None
    with fork_server(run.home) if with_meshes else nullcontext():
        yield run
    left = run.wait_until_clean(float(os.environ.get("MESHBOOK_LEAK_GRACE_S", GRACE_S)))
    run.clean()
    if left:
        pytest.fail("the test run left something behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate. It is opened at the latest when the test has ended."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium for tests marked `browser`."""
    return next(path for path in map(shutil.which, CHROMIUM) if path)
