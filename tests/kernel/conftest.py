"""One kernel with two ranks for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.frontend import FrontEnd, kernel


@pytest.fixture(scope="package")
def shared(run: object) -> Iterator[FrontEnd]:
    """A front end of a Meshbook kernel whose mesh runs. Tests must not stop it, and must not kill ranks."""
    with kernel() as front:
        assert front.run("import os, time").status == "ok"
        yield front
