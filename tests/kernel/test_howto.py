"""The how-tos run: every block of Python without a title is a cell, and a page's cells end well in their order."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.frontend import FrontEnd, kernel

pytestmark = pytest.mark.usefixtures("starts_kernels")

PAGES = Path(__file__).resolve().parents[2] / "docs" / "howto"
NEEDS = {"huggingface": "transformers"}


@pytest.fixture(scope="module")
def notebook() -> Iterator[FrontEnd]:
    """A kernel for all pages, which share its mesh of two ranks where they start no other."""
    with kernel() as front:
        yield front


# tests/test_marimo.py runs that page
@pytest.mark.parametrize("page", sorted({path.stem for path in PAGES.glob("*.md")} - {"marimo"}))
def test_the_cells_of_a_page_end_well(page: str, notebook: FrontEnd) -> None:
    if page in NEEDS and importlib.util.find_spec(NEEDS[page]) is None:
        pytest.skip(f"needs {NEEDS[page]}")
    cells = re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) >= 2
    for cell in cells:
        done = notebook.run(cell)
        assert done.status == "ok", f"{cell}\n{done.text}"
