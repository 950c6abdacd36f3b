"""The docs site builds without a warning and fetches nothing as it is viewed; its catalogue of errors is complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
HAVE_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))

# What a browser fetches by itself as it shows a page.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="(https?:[^"]+)"|<link\b[^>]*\brel="(?:stylesheet|preconnect)"[^>]*\bhref="(https?:[^"]+)\""""
)


@pytest.mark.skipif(not HAVE_MKDOCS, reason="needs mkdocs-material and mkdocstrings: pip install -e '.[docs]'")
@pytest.mark.usefixtures("starts_processes")
def test_the_site_builds_without_a_warning_and_its_pages_fetch_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "errors.html", "howto/torchrun.html", "reference/mesh.html", "reference/magics.html"} <= set(
        pages
    )
    assert {page: found for page, text in pages.items() if (found := FETCHED.findall(text))} == {}
    assert "%mesh heal" in pages["reference/magics.html"]
    assert "Put new processes in the place of ranks that have exited" in pages["reference/mesh.html"]


def error_classes() -> set[str]:
    """Names of all classes under meshbook/ that are errors of its own, MeshbookError itself included."""
    bases = dict[str, set[str]]()
    for path in (ROOT / "meshbook").rglob("*.py"):
        for name, above in re.findall(r"^class (\w+)\(([^)]*)\)", path.read_text(), re.MULTILINE):
            bases[name] = set(re.findall(r"\w+", above))
    found = {"MeshbookError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def test_each_error_has_an_entry_with_its_cause_and_what_to_do_and_each_entry_an_error() -> None:
    page = (DOCS / "errors.md").read_text()
    title, *entries = re.split(r"^## ", page, flags=re.MULTILINE)
    by_name = dict(entry.split("\n", 1) for entry in entries)
    assert set(by_name) == error_classes()
    assert [name for name, text in by_name.items() if "\nCause: " not in text or "\nWhat to do: " not in text] == []
    assert set(re.findall(r"`(\w+)`", title.split("```")[0])) >= error_classes() - {"MeshbookError"}
