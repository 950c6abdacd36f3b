"""One kernel with two ranks for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kernel.frontend import FrontEnd


class SharedKernel:
    """A kernel whose mesh runs, started at its first use, and anew after a test that has broken it."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._front: FrontEnd | None = None

    def get(self) -> FrontEnd:
        if self._front is None:
            from tests.kernel.frontend import kernel

            self._front = self._running.enter_context(kernel())
            assert self._front.run("import os, time").status == "ok"
        return self._front

    def check(self) -> None:
        """Fail the test that has just ended if the next cell does not end well."""
        if self._front is None:
            return
        try:
            cell = self._front.run("pass", store_history=False)
            problem = "" if cell.status == "ok" else cell.text
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.close()
            pytest.fail(f"this test has left the shared kernel broken: {problem}", pytrace=False)

    def close(self) -> None:
        self._front = None
        self._running.close()


@pytest.fixture(scope="module")
def shared_kernel(starts_kernels: None) -> Iterator[SharedKernel]:
    shared = SharedKernel()
    yield shared
    shared.close()


@pytest.fixture
def shared(shared_kernel: SharedKernel) -> Iterator[FrontEnd]:
    """A front end of a Meshbook kernel whose mesh runs. Tests must not stop it, and must not kill ranks."""
    yield shared_kernel.get()
    shared_kernel.check()
