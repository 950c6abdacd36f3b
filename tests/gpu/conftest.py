"""`make test-gpu` writes build/gpu.md: which tests passed, on which device, with which driver and torch."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest

from meshbook.host.gpus import Nvml

_REPORT = Path(__file__).parents[2] / "build" / "gpu.md"


def describe_machine() -> str:
    """Name what the tests ran on, as docs/gpu.md quotes it."""
    import torch

    nvml = Nvml.load()
    assert nvml is not None
    names = [nvml.name(uuid) for uuid in nvml.uuids()]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = f"torch {torch.__version__}, NCCL {nccl}, Python {platform.python_version()}"
    return f"{devices}, driver {nvml.driver_version()}, {versions}"


_rows: dict[str, tuple[str, float, str]] = {}  # by test: outcome, seconds, reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "gpu" in report.keywords and (report.when == "call" or not report.passed):
        reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        _rows[report.nodeid] = (report.outcome, report.duration, reason.removeprefix("Skipped: "))


def pytest_sessionfinish() -> None:
    if all(outcome == "skipped" for outcome, _, _ in _rows.values()):
        return
    lines = [f"{time.strftime('%Y-%m-%d')}: {describe_machine()}", "", "| test | result | s |", "| --- | --- | --- |"]
    for test, (outcome, seconds, reason) in sorted(_rows.items()):
        name = test.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        lines.append(f"| {name} | {outcome}{f': {reason}' if reason else ''} | {seconds:.1f} |")
    _REPORT.parent.mkdir(exist_ok=True)
    _REPORT.write_text("\n".join(lines) + "\n")
