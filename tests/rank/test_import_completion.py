"""What may stand at the end of an `import` line, found without importing anything."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshbook.rank.previews.import_completion import complete_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that must not be imported."""
    folder = tmp_path / "unloaded_package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import os\nfrom json import loads as read\nLIMIT = 3\nratio: float = 1.0\n"
        "class Model: ...\ntry:\n    def step(): ...\nexcept ImportError:\n    pass\nraise RuntimeError('imported')\n"
    )
    (folder / "data.py").write_text("")
    (folder / "broken.py").write_text("def (")
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "deep.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def test_modules_of_a_package_are_found_in_its_folder(package: str) -> None:
    found = complete_import(f"import {package}.")
    assert found == [f"{package}.{name}" for name in ("broken", "data", "inner")]
    assert complete_import(f"from {package}.inner.d") == [f"{package}.inner.deep"]
    assert package not in sys.modules


def test_what_a_module_binds_is_read_in_its_source(package: str) -> None:
    found = complete_import(f"from {package} import ")
    assert {"LIMIT", "Model", "data", "os", "ratio", "read", "step"} <= set(found)
    assert complete_import(f"from {package}.broken import ") == []


def test_a_loaded_module_is_looked_into() -> None:
    assert "json.decoder" in complete_import("import json.dec")
    assert "JSONDecoder" in complete_import("from json import J")


@pytest.mark.parametrize("line", ["import no_such_module.x", "from no_such_module import x", "import os x", "print(x"])
def test_where_nothing_can_be_known_there_is_nothing(line: str) -> None:
    assert complete_import(line) == []


def test_after_the_module_comes_import() -> None:
    assert complete_import("from json imp") == ["import "]


def test_a_first_word_is_any_module() -> None:
    assert {"json", "pytest"} <= set(complete_import("import "))


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.usefixtures("starts_processes")
def test_a_shell_completes_inside_torch_without_loading_it() -> None:
    source = """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        from meshbook.rank.previews import import_completion
        shell = InteractiveShell.instance()
        import_completion.install(shell)
        print(shell.complete("torch.distri", "import torch.distri")[1], "torch" in sys.modules)
    """
    lines = "\n".join(line.strip() for line in source.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout == "['torch.distributed', 'torch.distributions'] False\n"
