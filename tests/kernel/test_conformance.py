"""jupyter_kernel_test's suite on the Meshbook kernel: every sample runs on the ranks.

Whatever the suite asks of a kernel it asks here of two ranks whose answers are one.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import jupyter_kernel_test
import pytest

from tests.budget import WAIT_S

TINY_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.usefixtures("starts_kernels")
class TestConformance(jupyter_kernel_test.KernelTests):  # type: ignore[misc]  # its own types end at unittest's
    """The samples are the suite's own for Python, and one display for each kind that IPython has."""

    kernel_name = "meshbook"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [  # noqa: RUF012  # as the suite declares them
        {"text": "zi", "matches": {"zip"}},
        {"text": "torch.ara", "matches": {"arange"}},
    ]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n", "%timeit 1"]  # noqa: RUF012
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]  # noqa: RUF012
    invalid_code_samples = ["import = 7q"]  # noqa: RUF012
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('x')"
    code_execute_result = [  # noqa: RUF012
        {"code": "6*7", "result": "42"},
        {"code": "'text'", "result": "'text'"},
    ]
    code_display_data = [  # noqa: RUF012
        {"code": f"from IPython.display import {kind}, display; display({kind}({argument}))", "mime": mime}
        for kind, argument, mime in (
            ("HTML", "'<b>test</b>'", "text/html"),
            ("Math", "r'\\frac{1}{2}'", "text/latex"),
            ("Markdown", "'*a*'", "text/markdown"),
            ("JSON", "{'a': 1}", "application/json"),
            ("Javascript", "'1'", "application/javascript"),
            ("SVG", "'<svg xmlns=\"http://www.w3.org/2000/svg\"/>'", "image/svg+xml"),
            ("Image", f"__import__('base64').b64decode({TINY_PNG!r})", "image/png"),
        )
    ]
    code_history_pattern = "6?7*"
    # Not "range": IPython numbers the running session 0 there and 1 elsewhere, and the suite takes that for a fault.
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    @classmethod
    def setUpClass(cls) -> None:
        with patch.dict(os.environ, {"MESHBOOK_RANKS": "2"}):
            super().setUpClass()
        # The suite gives a cell 15 s; the start of a mesh is not what it is about.
        reply = cls.kc.execute_interactive("pass", timeout=WAIT_S)
        assert reply["content"]["status"] == "ok"
        # A rank has 0.3 s to complete and to inspect, a cell's next output 0.1 s to come: not on a loaded machine.
        patient = "%%controller\nfrom meshbook.kernel import queries\nqueries.QUERY_TIMEOUT_S = 60.0"
        assert cls.kc.execute_interactive(patient, timeout=WAIT_S)["content"]["status"] == "ok"
        for channel in (cls.kc.shell_channel, cls.kc.iopub_channel):
            channel.get_msg = lambda timeout=None, get=channel.get_msg: get(timeout=WAIT_S)

    def flush_channels(self) -> None:
        """Take what the requests of other tests have left: all that comes before the end of one of our own."""

        def is_end(message: dict[str, Any]) -> bool:
            is_ours = message["parent_header"].get("msg_id") == request
            return is_ours and message["content"].get("execution_state", "idle") == "idle"

        request = self.kc.execute("", silent=True)
        for channel in (self.kc.shell_channel, self.kc.iopub_channel):
            while not is_end(channel.get_msg()):
                pass

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        cls.km.cleanup_resources()
