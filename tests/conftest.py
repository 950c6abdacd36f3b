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
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.budget import WAIT_S
from tests.cluster.bed import Bed, why_no_bed, why_no_slurm
from tests.cluster.ray_bed import RayOnBed
from tests.gate import Gate
from tests.leaks import GRACE_S, Run
from tests.second_pass import LeftBehind
from tests.starvation import starve
from tests.suites import is_in_gate, kind_of

ROOT = Path(__file__).resolve().parent.parent

# A shell that starts a run in the background has it ignore SIGINT, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports torch or numpy, for these read it once. Ranks of one test share few cores: with a pool of
# threads in each they fight, and numbers that are compared bit for bit would depend on how many threads summed them.
os.environ["OMP_NUM_THREADS"] = "1"

# Where this is set, each of the processes of a run would compile Meshbook anew, and each worker all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Where jupyter_core looks for its folders is its own affair; unset, it warns that it will look elsewhere one day.
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"

# jsonschema, of nbformat, imports it if it is there, and then a grammar is compiled for three seconds.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# The same examples in each run, however slow the machine. `--hypothesis-profile=explore` draws new ones, and more.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile("repeatable")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gate", action="store_true", help="only the tests of `make test`, which tests/suites.py names")
    parser.addoption("--starve", type=float, default=0.0, help="the part of the threads that get no processor")
    parser.addoption("--starve-seed", type=int, default=0, help="which threads, and when")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, bool, bool]:
    fraction = session.config.getoption("starve")
    runs_all = fraction and not hasattr(session.config, "workerinput")  # of pytest-xdist
    with starve(fraction, session.config.getoption("starve_seed")) if runs_all else nullcontext():
        return (yield)


# What starts a process, as Python's audit events name it.
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
is_pure = False  # what runs


@sys.addaudithook
def refuse_processes(event: str, _: object) -> None:
    if is_pure and event in STARTS:
        raise RuntimeError(
            "a pure test starts a process; it has to use starts_processes, starts_meshes or starts_kernels"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global is_pure
    is_pure = item.get_closest_marker("pure") is not None
    try:
        return (yield)
    finally:
        is_pure = False


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Name the first difference of large values: pytest compares them line by line, which can take minutes."""
    if op != "==" or not isinstance(left, (dict, list, tuple)) or len(repr(left)) < 20_000:
        return None
    return ["large values differ", *first_difference(left, right)]


def first_difference(left: Any, right: Any, at: str = "") -> list[str]:
    """Where two values begin to differ, and how; nothing for equal ones."""
    if left == right:
        return []
    pairs: list[tuple[object, Any, Any]] = []
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        pairs = [(repr(key), left[key], right[key]) for key in left]
    elif isinstance(left, (list, tuple, bytes)) and type(left) is type(right) and len(left) == len(right):
        pairs = [(index, *pair) for index, pair in enumerate(zip(left, right, strict=True))]
    for key, one, other in pairs:
        if lines := first_difference(one, other, f"{at}[{key}]"):
            return lines
    return [f"first at {at or 'the whole'}: {left!r:.200} != {right!r:.200}"]


def reason_to_skip(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None: they can."""
    match marker:
        case "gpu" if not Path("/dev/nvidiactl").exists():  # the driver's own file: asks without initialising CUDA
            return "no NVIDIA GPU on this machine"
        case "browser" if importlib.util.find_spec("playwright") is None:
            return "playwright is not installed: pip install -e '.[dev]'"
        case "cluster":
            return why_no_bed()
        case "browser" if not any(map(shutil.which, CHROMIUM)):
            return "no Chromium on PATH: apt-get install chromium"
        case "monarch" if importlib.util.find_spec("monarch") is None:
            return "torchmonarch is not installed: pip install -e '.[monarch]'"
        case "ray" if importlib.util.find_spec("ray") is None:
            return "ray is not installed: pip install -e '.[ray]'"
    return None


# Where there is no torch, the tests that need none run (`make test-pure`).
WITHOUT_TORCH = importlib.util.find_spec("torch") is None


def what_is_missing(error: BaseException | None) -> str | None:
    """The module without which an import fails here; None: nothing that may be missing is."""
    if not WITHOUT_TORCH or not isinstance(error, ImportError) or error.name is None:
        return None
    if not isinstance(error, ModuleNotFoundError):  # of a file of tests that could not be imported for the same reason
        return f"what {error.name} needs" if error.name.startswith("tests.") else None
    return None if error.name.partition(".")[0] in ("meshbook", "tests") else error.name


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    if call is not None and call.excinfo is not None and (name := what_is_missing(call.excinfo.value.__cause__)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {name} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if (name := what_is_missing(error)) is None:
            raise
        pytest.skip(f"{name} is not installed")


# Seconds that a test takes, about, by its kind. Each of several workers takes next the file or folder of most seconds.
SECONDS = {"soak": 60.0, "browser": 8.0, "kernels": 2.0, "meshes": 1.5, "processes": 0.3, "pure": 0.02}
# Folders that one worker runs: JupyterLab, and machines with a Slurm and a Ray, are started once.
ONE_WORKER = ("browser", "cluster")


def scope_of(nodeid: str) -> str:
    """What one worker runs: a file, or a folder."""
    file = nodeid.partition("::")[0]
    folder = file.split("/")[1]
    return folder if folder in ONE_WORKER else file


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker a file of tests at a time, in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def path_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").as_posix()


def is_thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kinds = {item: kind_of(getattr(item, "fixturenames", ())) for item in items}
    for item, kind in kinds.items():
        item.add_marker(kind)
    if config.getoption("gate"):
        kept = [item for item in items if is_in_gate(kinds[item], path_of(item), is_thorough=is_thorough(item))]
        config.hook.pytest_deselected(items=list(kinds.keys() - set(kept)))
        items[:] = kept
    if hasattr(config, "workerinput"):  # of pytest-xdist
        seconds = Counter[str]()
        for item in items:
            seconds[scope_of(item.nodeid)] += SECONDS[kinds[item]]
        items.sort(key=lambda item: (-seconds[scope_of(item.nodeid)], str(item.path)))
    for item in items:
        for marker in ("gpu", "browser", "cluster", "monarch", "ray"):
            if item.get_closest_marker(marker) and (reason := reason_to_skip(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))


# Whose files share a server with its kernels, and so a runtime folder; every other file of tests has one of its own.
SHARES_A_SERVER = "browser"

RUN: pytest.StashKey[Run] = pytest.StashKey()

# Has a `sitecustomize` for the fork server of a run.
FORK_SERVER = ROOT / "tests" / "fork_server"


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test see no mesh that tests elsewhere have left, or have not ended yet."""
    stash = item.session.stash
    if RUN not in stash:
        stash[RUN] = Run()
        isolate(stash[RUN])
    folder, *rest = item.path.relative_to(ROOT / "tests").parts
    part = folder if folder == SHARES_A_SERVER else "/".join((folder, *rest))
    os.environ["MESHBOOK_RUNTIME_DIR"] = str(stash[RUN].runtime_dir_of(f"tests/{part}"))


@contextmanager
def fork_server(run: Run) -> Iterator[None]:
    """What all meshes of the run branch their fork servers off; until it listens, they start their own.

    Importing torch is most of what a start of a mesh costs.
    """
    from meshbook.controller.launch import FORK_SERVER_VARIABLE
    from meshbook.host.starter import rank_environment

    listen = run.home / "fork.sock"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipe, pipe_write = os.pipe()  # it ends when this process does
    with ours, open(pipe_write, "wb"):
        with theirs, open(pipe, "rb"):
            command = [sys.executable, "-P", "-m", "meshbook.rank.forkserver", str(theirs.fileno()), str(pipe)]
            environment = rank_environment()
            if not Path("/dev/nvidiactl").exists():  # whether its import touches the driver has not been tried there
                environment["PYTHONPATH"] = os.pathsep.join([str(FORK_SERVER), environment["PYTHONPATH"]])
            server = subprocess.Popen(
                [*command, str(listen)],
                pass_fds=[theirs.fileno(), pipe],
                env=environment,
                start_new_session=True,
            )
        os.environ[FORK_SERVER_VARIABLE] = str(listen)
        run.lasting.add(server.pid)
        yield
        run.lasting.discard(server.pid)
        del os.environ[FORK_SERVER_VARIABLE]
    server.kill()  # it may still import torch
    server.wait(WAIT_S)


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
    they began. What is left then, and not of one file (`nothing_is_left`), is an error of the run, shown at the last
    test.
    """
    run = request.session.stash[RUN]
    yield run
    left = run.wait_until_clean(grace_s(), run.reported)
    run.clean()
    if left:
        pytest.fail("the test run left something behind:\n  " + "\n  ".join(left), pytrace=False)


# What a test starts: it uses one of these, or is pure (`suites.kind_of`).


@pytest.fixture(scope="session")
def starts_processes(run: Run) -> None:
    """Processes, but no mesh."""


@pytest.fixture(scope="session")
def starts_meshes(starts_processes: None, run: Run) -> Iterator[None]:
    """Meshes."""
    with fork_server(run):
        yield


@pytest.fixture(scope="session")
def starts_kernels(starts_meshes: None) -> None:
    """Kernels, or what runs one."""


@pytest.fixture(scope="session")
def runs_soak(starts_processes: None) -> None:
    """Random programs and faults, for a while."""


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(run: Run, request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file of tests begins ends with it. Else its last test fails, and what is left is ended."""
    before, processes = run.leftovers(), list(run.processes())
    yield
    if request.path.relative_to(ROOT / "tests").parts[0] in ONE_WORKER:
        return  # the folder shares a server, or machines, of which the run's end takes care
    left = run.wait_until_clean(grace_s(), before)
    if left:
        run.end_processes(apart_from=processes)
        run.reported.update(left)
        raise LeftBehind(f"{request.path.name} has left something behind:\n  " + "\n  ".join(left), pytrace=False)


def grace_s() -> float:
    return float(os.environ.get("MESHBOOK_LEAK_GRACE_S", GRACE_S))


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate. It is opened at the latest when the test has ended."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture(scope="session")
def bed(run: Run) -> Iterator[Bed]:
    """Machines n1 and n2, which the ssh on PATH reaches. What meshes have left on them at the end fails the run."""
    before = set(run.processes())
    bed = Bed(2)
    its_own = set(run.processes()) - before
    run.lasting |= its_own  # until the end of the run, whichever file came first
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{bed.ssh}{os.pathsep}{path}"
    try:
        yield bed
        left = bed.wait_until_clean(GRACE_S)
    finally:
        os.environ["PATH"] = path
        bed.close()
        run.lasting -= its_own
    if left:
        pytest.fail("meshes have left on other machines:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="module")
def slurm(bed: Bed) -> Iterator[Bed]:
    """The machines with a Slurm, whose commands are on PATH. What starts a mesh there is done in `bed.here()`."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    bed.start_slurm()
    yield bed
    bed.stop_slurm()


@pytest.fixture(scope="module")
def ray_cluster(bed: Bed) -> Iterator[RayOnBed]:
    """A Ray on the machines. What starts a mesh there is done in `ray_cluster.here()`."""
    cluster = RayOnBed(bed)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium for tests marked `browser`."""
    return next(path for path in map(shutil.which, CHROMIUM) if path)
