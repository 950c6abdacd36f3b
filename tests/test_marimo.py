"""marimo notebooks on a mesh: as scripts, in pytest, edited in a real server, and read by several people at once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.budget import WAIT_S, when
from tests.kernel.frontend import has_exited, shows, strip_ansi
from tests.ports import unused_port

pytestmark = pytest.mark.usefixtures("starts_meshes")

pytest.importorskip("marimo")
websockets = pytest.importorskip("websockets.sync.connection")
connect = pytest.importorskip("websockets.sync.client").connect

from meshbook import list_meshes  # noqa: E402  (marimo decides whether there is anything to test)
from meshbook.marimo import page  # noqa: E402
from meshbook.marimo.executor import is_marked  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "notebooks" / "quickstart_marimo.py"
TIMEOUT_S = WAIT_S

# What an installed Meshbook has in its metadata: how marimo finds the executor.
_ENTRY_POINTS = "[marimo.cell.executor]\nmeshbook = meshbook.marimo.executor:MeshExecutor\n"


@pytest.fixture(scope="module", autouse=True)
def installed(run: Any) -> Iterator[None]:
    """Every process of these tests finds the entry point, and none reads or writes this user's settings."""
    site = run.home / "site"
    info = site / "meshbook-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: meshbook\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{site}")
        patch.setenv("MPLBACKEND", "agg")
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
            patch.setenv(name, str(run.home / name.lower()))
        patch.syspath_prepend(str(site))
        yield


def notebook(folder: Path, *cells: str, name: str = "book.py") -> Path:
    """A marimo notebook; names that cells share are passed as marimo itself would write it."""
    from marimo._convert.converters import MarimoConvert
    from marimo._schemas.notebook import NotebookV1

    made: NotebookV1 = {
        "version": "1",
        "metadata": {"marimo_version": "0"},
        "cells": [
            {"id": None, "code": code, "code_hash": None, "name": "_", "config": {}}  # type: ignore[typeddict-item]
            for code in cells
        ],
    }
    path = folder / name
    path.write_text(MarimoConvert.from_notebook_v1(made).to_py())
    return path


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def end_meshes() -> None:
    """End the meshes of this file that nobody uses any more; one may be about to end by itself."""
    for mesh in list_meshes():
        with suppress(ProcessLookupError):
            os.kill(mesh.pid, signal.SIGTERM)
    when(lambda: not list_meshes(), "the end of the meshes")


@pytest.fixture(autouse=True)
def no_mesh_goes_on() -> Iterator[None]:
    yield
    end_meshes()


MAKE = "import meshbook\nmesh = meshbook.create_mesh(2)\nmesh"


# ---- as a script, and in pytest


def test_the_quickstart_passes_marimos_own_check() -> None:
    command = [sys.executable, "-m", "marimo", "check", "--strict", str(QUICKSTART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_the_quickstart_runs_as_a_script() -> None:
    done = subprocess.run([sys.executable, str(QUICKSTART)], capture_output=True, text=True, timeout=2 * WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "step 200" in done.stdout
    assert "stopped, and on we go" in done.stdout
    assert re.search(r"200 steps, largest difference \d", done.stdout)
    assert list_meshes()[:] == ()


@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_the_quickstart_runs_in_pytest_with_fewer_steps() -> None:
    _, names = load(QUICKSTART).app.run(defs={"until": SimpleNamespace(value=20)})
    assert names["mesh"].size() == 4
    assert [len(curve) for curve in names["curves"].values()] == [20] * 4


def test_running_an_app_twice_finds_the_same_mesh(tmp_path: Path) -> None:
    app = load(notebook(tmp_path, MAKE, "where = mesh.run('import os; os.getpid()').values")).app
    _, first = app.run()
    try:
        _, second = app.run()
        assert second["mesh"].name == first["mesh"].name
        assert dict(second["where"]) == dict(first["where"])
    finally:
        first["mesh"].stop()
    _, third = app.run()
    try:
        assert third["mesh"].name != first["mesh"].name  # that one was stopped
    finally:
        third["mesh"].stop()


def test_a_mesh_that_lost_a_rank_is_not_found_again(tmp_path: Path) -> None:
    app = load(notebook(tmp_path, MAKE)).app
    _, first = app.run()
    _, second = None, None
    try:
        first["mesh"].kill([1])
        when(lambda: bool(first["mesh"].session.lost), "the end of rank 1")
        _, second = app.run()
        assert second["mesh"].name != first["mesh"].name
        assert second["mesh"].run("rank").values[1] == 1
    finally:
        first["mesh"].stop()
        if second is not None:
            second["mesh"].stop()


def test_two_meshes_of_one_cell_are_two(tmp_path: Path) -> None:
    app = load(notebook(tmp_path, "import meshbook\na, b = meshbook.create_mesh(1), meshbook.create_mesh(1)")).app
    _, first = app.run()
    try:
        _, second = app.run()
        assert first["a"].name != first["b"].name
        assert (second["a"].name, second["b"].name) == (first["a"].name, first["b"].name)
    finally:
        first["a"].stop()
        first["b"].stop()


def test_a_mesh_made_outside_a_cell_is_nobodys() -> None:
    assert page.running_cell() is None


# ---- whole cells, marked


@pytest.mark.parametrize(
    ("code", "marked"),
    [
        ("# mesh\nx = 1", True),
        ("\n#mesh  \nx = 1", True),
        ("# mesh", True),
        ("x = 1\n# mesh", False),
        ("# meshes are fine\nx = 1", False),
        ("# mesh: not this\nx", False),
        ("", False),
    ],
)
def test_the_marker_is_a_first_line_of_its_own(code: str, marked: bool) -> None:
    assert is_marked(code) is marked


def test_a_marked_cell_runs_on_every_rank_and_its_names_are_handles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(
        tmp_path,
        MAKE,
        "# mesh\nimport torch\nx = torch.ones(2) * (mesh.get_rank() + 1)\nx.sum().item()",
        "total = float((x.sum() * 0 + 3).item())",
        "# mesh\nimport asyncio\ny = x * 2\nprint('doubled')\nawait asyncio.sleep(0)\nmesh.size() * 10",
        "pulled = mesh.pull(y)",
    )
    outputs, names = load(path).app.run()
    assert outputs[3].same() == 20  # a marked cell may await
    assert "doubled\n" in capsys.readouterr().out
    assert dict(outputs[1]) == {0: 2.0, 1: 4.0}
    assert names["total"] == 3.0
    assert [value.tolist() for value in names["pulled"].values()] == [[2.0, 2.0], [4.0, 4.0]]


def test_the_how_tos_cells_end_well(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "marimo.md").read_text().replace("create_mesh(4)", "create_mesh(2)")
    cells = re.findall(r'^```python title="cell"\n(.*?)\n```$', page, re.MULTILINE | re.DOTALL)
    assert len(cells) == 4
    outputs, _ = load(notebook(tmp_path, *cells)).app.run()
    assert outputs[1].same() == 2.0
    assert dict(outputs[2]) == {0: 0.0, 1: 2.0}
    assert dict(outputs[3]) == {0: 2.0, 1: 2.0}


def test_a_marked_cell_without_a_mesh_starts_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOOK_RANKS", "2")
    outputs, _ = load(notebook(tmp_path, "# mesh\nheld = rank\nworld_size")).app.run()
    assert outputs[0].same() == 2


def test_a_cell_without_the_marker_is_left_to_marimo(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import book\n"
        "print(book.app.run()[1]['x'])\n"
        "print([name for name in sys.modules if name.endswith('executor.executor')])\n"
    )
    notebook(tmp_path, "x = 1 + 1")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout.startswith("2\n")
    assert list_meshes()[:] == ()


def test_an_error_on_the_ranks_is_the_cells_and_says_where_a_missing_name_lives(tmp_path: Path) -> None:
    from meshbook.errors import CellError

    module = load(notebook(tmp_path, MAKE, "lr = 0.1", "# mesh\nmesh\nlr * 2"))
    with pytest.raises(CellError, match="NameError: name 'lr' is not defined") as raised:
        module.app.run()
    assert "`lr` lives in the notebook, not on the ranks; mesh.push(lr=lr) copies it" in raised.value.__notes__


# ---- in a server


class Server:
    """`marimo edit` or `marimo run` of one notebook, without its browser.

    Attributes:
        url: where it listens.
    """

    def __init__(self, mode: str, path: Path) -> None:
        port = unused_port()
        options = ["--headless", "--no-token", "-p", str(port)]
        options += ["--no-skew-protection", "--skip-update-check"] if mode == "edit" else []
        self.url = f"http://127.0.0.1:{port}"
        self._log = (path.parent / "server.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "marimo", mode, str(path), *options], stdout=self._log, stderr=self._log
        )
        when(self._answers, "the start of marimo")

    def _answers(self) -> bool:
        assert self._process.poll() is None
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=WAIT_S):
                return True
        except OSError:
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()


class Page:
    """A browser's side of marimo's protocol, as far as these tests need it.

    Attributes:
        ids, codes: of the cells of the notebook.
        cells: what each cell shows, by id: `status`, `output` and what it printed, `console`.
    """

    def __init__(self, server: Server, path: Path) -> None:
        self._server, self._session = server, f"s_{secrets.token_hex(3)}"
        with urllib.request.urlopen(server.url, timeout=WAIT_S) as page:
            token = re.search(r'"serverToken"\s*:\s*"([^"]+)"', page.read().decode())
        self._token = token[1] if token else ""
        self.cells: dict[str, dict[str, Any]] = {}
        self.ids: list[str] = []
        self.codes: list[str] = []
        self._num_runs = 0
        self._news = threading.Condition()
        address = f"{server.url.replace('http', 'ws')}/ws?session_id={self._session}&file={path}"
        self._ends = ExitStack()
        self._socket = self._ends.enter_context(connect(address, max_size=None))
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self.until(lambda: bool(self.ids), "kernel-ready")

    def _listen(self) -> None:
        with suppress(websockets.ConnectionClosed):  # a restarted session closes it from its side
            for text in self._socket:
                message = json.loads(text)
                with self._news:
                    self._take(message["op"], message.get("data") or {})
                    self._news.notify_all()

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "kernel-ready":
            self.ids, self.codes = data["cell_ids"], data["codes"]
        elif kind == "completed-run":
            self._num_runs += 1
        elif kind == "cell-op":
            cell = self.cells.setdefault(data["cell_id"], {"status": None, "output": None, "console": ""})
            cell["status"] = data.get("status") or cell["status"]
            cell["output"] = data.get("output") or cell["output"]
            console = data.get("console")
            if console == []:
                cell["console"] = ""
            for piece in console if isinstance(console, list) else [console] if console else []:
                cell["console"] += str(piece["data"])

    def until(self, seen: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        with self._news:
            assert self._news.wait_for(seen, timeout_s), f"{what} did not come within {timeout_s} s: {self.cells}"

    def post(self, action: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{self._server.url}/api/kernel/{action}",
            data=json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Marimo-Session-Id": self._session,
                "Marimo-Server-Token": self._token,
            },
        )
        with urllib.request.urlopen(request, timeout=WAIT_S):
            pass

    def run_all(self) -> None:
        """What opening the notebook does where cells run on opening."""
        self._and_wait("instantiate", objectIds=[], values=[], autoRun=True)

    def run(self, id: str, code: str) -> dict[str, Any]:
        """Run a cell, a new one if there is none of that id, and all that depends on it."""
        self._and_wait("run", cellIds=[id], codes=[code])
        return self.cells[id]

    def begin(self, id: str, code: str, said: str) -> None:
        """Run a cell, and wait only until it has printed something."""
        self.post("run", cellIds=[id], codes=[code])
        self.until(lambda: said in self.cells.get(id, {"console": ""})["console"], said)

    def reply(self, text: str, prompt: str | None = None) -> None:
        """Type at the prompt below a cell, and wait for another prompt; None: for the end of the cell."""
        if prompt is None:
            self._and_wait("stdin", text=text)
            return
        before = sum(cell["console"].count(prompt) for cell in self.cells.values())
        self.post("stdin", text=text)
        self.until(lambda: sum(cell["console"].count(prompt) for cell in self.cells.values()) > before, prompt)

    def interrupt(self) -> None:
        """The Stop button."""
        self._and_wait("interrupt")

    def _and_wait(self, action: str, **body: Any) -> None:
        runs = self._num_runs
        self.post(action, **body)
        self.until(lambda: self._num_runs > runs, action)

    def close(self) -> None:
        self._ends.close()
        self._listener.join(WAIT_S)


@contextmanager
def page_of(server: Server, path: Path) -> Iterator[Page]:
    page = Page(server, path)
    try:
        yield page
    finally:
        page.close()


@contextmanager
def served(mode: str, path: Path) -> Iterator[Server]:
    """A server, and after it nothing: its meshes, which outlive it for a while, are stopped."""
    server = Server(mode, path)
    try:
        yield server
    finally:
        server.close()
        end_meshes()


def mesh_names() -> list[str]:
    return [mesh.name for mesh in list_meshes()]


def text_of(cell: dict[str, Any]) -> str:
    """A cell's output as text, its markup taken away."""
    data = cell["output"]["data"]
    return re.sub(r"<[^>]*>", "", data if isinstance(data, str) else json.dumps(data)).strip()


@pytest.mark.timeout(300)
def test_an_edited_notebook_keeps_its_mesh_and_shows_what_the_ranks_do(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        MAKE,
        "mesh.run(\"print('from', rank)\\nrank * 10\").values",
        "@mesh.cell\ndef body():\n    y = rank + 1\n    return y",
        "body",
        "y = mesh['y']\ny",
        "# mesh\nfrom IPython.display import display, HTML\ndisplay(HTML(f'<b>{mesh.get_rank()}</b>'))\nmesh.size()",
        "mesh.run('1 / rank')",
        "# mesh\nmesh\n2 / rank",
    )
    with served("edit", path) as server, page_of(server, path) as page:
        page.run_all()
        make, values, _, body, handle, rich, error, marked = (page.cells[id] for id in page.ids)
        assert re.fullmatch(r"&lt;Mesh &#x27;book-\w+&#x27; rank=2&gt;", text_of(make))
        assert shows(strip_ansi(values["console"]), "from 0…1\n", "[0] from 0\n", "[1] from 1\n")
        # As typed text, not with the colour codes that a terminal would read.
        for cell, shown in ((values, "[0] 0\n[1] 10"), (body, "[0] 1\n[1] 2"), (handle, "[0] 1\n[1] 2")):
            assert cell["output"]["mimetype"] == "text/html"
            assert cell["output"]["data"].startswith("<pre")
            assert text_of(cell) == shown
        assert "<b>0</b>" in rich["output"]["data"]
        assert "rank 1" in rich["output"]["data"]
        assert "2</pre>" in rich["output"]["data"]
        assert error["output"]["mimetype"] == "application/vnd.marimo+error"
        assert "rank 0: ZeroDivisionError" in json.dumps(error["output"]["data"])
        (shown,) = marked["output"]["data"]
        assert shown["msg"] == "rank 0: ZeroDivisionError: division by zero (rank 1 ran to the end)"
        assert strip_ansi(re.sub(r"<[^>]*>", "", marked["console"])).count("2 / rank") == 1

        (name,) = mesh_names()
        pid = page.run("pid", "mesh.run('import os; os.getpid()').values[0]")["output"]["data"]
        page.run(page.ids[0], page.codes[0])
        assert mesh_names() == [name]
        assert page.cells["pid"]["output"]["data"] == pid
        page.run(page.ids[0], page.codes[0] + "  # another remark")
        assert mesh_names() == [name]

        page.run(page.ids[0], page.codes[0].replace("create_mesh(2)", "create_mesh({'dp': 2})"))
        (other,) = mesh_names()  # it replaced the first, whose variable is gone
        assert other != name
        assert text_of(page.cells[page.ids[1]]) == "[0] 0\n[1] 10"


@pytest.mark.timeout(300)
def test_a_breakpoint_takes_its_commands_from_the_page(tmp_path: Path) -> None:
    path = notebook(tmp_path, MAKE)
    with served("edit", path) as server, page_of(server, path) as page:
        page.run_all()
        page.begin(
            "stops", "# mesh\nx = rank + 40\ndist.barrier()\nbreakpoint()\nx + 1", "(ranks 0-1 · h lists the commands)"
        )
        page.reply("p x", "(ranks 0-1) ")
        page.reply("c")
        cell = page.cells["stops"]
        assert "{40, 41}" in cell["console"]
        assert text_of(cell) == "[0] 41\n[1] 42"


@pytest.mark.timeout(300)
def test_stopping_works_for_every_kind_of_cell(tmp_path: Path) -> None:
    path = notebook(tmp_path, MAKE)
    sleep = "import time\nprint('be' + 'gun')\nwhile True: time.sleep(60)"
    with served("edit", path) as server, page_of(server, path) as page:
        page.run_all()
        for id, code in (
            ("call", f"mesh.run({sleep!r})"),
            ("function", "@mesh.remote\ndef f():\n    import time\n    print('begun')\n    time.sleep(1000)\nf()"),
            ("marked", "# mesh\nmesh\nimport time as clock\nprint('be' + 'gun')\nwhile True: clock.sleep(60)"),
            ("healing", "print('be' + 'gun')\nwhile True: mesh.heal()"),
            ("awaiting", "# mesh\nmesh\nimport asyncio as aio\nprint('be' + 'gun')\nawait aio.sleep(1000)"),
        ):
            page.begin(id, code, "begun")
            page.interrupt()
            assert page.cells[id]["output"]["data"] == [{"type": "interruption"}], id
            assert text_of(page.run("after", "mesh.run('rank + 5').values")) == "[0] 5\n[1] 6"


@pytest.mark.timeout(300)
def test_a_restarted_kernel_finds_the_mesh_of_the_one_before(tmp_path: Path) -> None:
    path = notebook(tmp_path, MAKE)
    with served("edit", path) as server:
        with page_of(server, path) as page:
            page.run_all()
            page.run("keep", "mesh.run('kept = rank + 40')")
            (name,) = mesh_names()
            page.post("restart_session")
        with page_of(server, path) as page:
            page.run_all()
            assert mesh_names() == [name]
            assert text_of(page.run("see", "mesh.pull('kept')")) == "[0] 40\n[1] 41"


@pytest.mark.timeout(300)
def test_readers_of_a_running_notebook_share_its_mesh_and_have_a_dashboard_each(tmp_path: Path) -> None:
    path = notebook(
        tmp_path, MAKE, "mesh.run('seen = globals().get(\"seen\", 0) + 1\\nseen').values", "mesh.dashboard()"
    )
    with served("run", path) as server, ExitStack() as readers:
        pages: list[Page] = []
        for number in (2, 1):  # two at once, and a later one
            pages += [readers.enter_context(page_of(server, path)) for _ in range(number)]
            for page in pages:
                page.until(lambda page=page: len(page.cells) == 3, "the cells")  # type: ignore[misc]
                page.until(lambda page=page: all(cell["output"] for cell in page.cells.values()), "their outputs")  # type: ignore[misc]
        assert len(mesh_names()) == 1
        shown = [list(page.cells.values()) for page in pages]
        assert sorted(text_of(cells[1]) for cells in shown) == ["1", "2", "3"]
        dashboards = [re.search(r"data-model-id='(\S+)'", cells[2]["output"]["data"]) for cells in shown]
        assert len({found and found[1] for found in dashboards}) == 3


def test_a_script_that_ends_takes_its_mesh_with_it(tmp_path: Path) -> None:
    path = notebook(tmp_path, MAKE, "print('pid', mesh.run('import os; os.getpid()').values[0])")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=WAIT_S)
    found = re.search(r"pid (\d+)", done.stdout)
    assert found is not None
    assert has_exited(int(found[1]))
    assert mesh_names() == []
