"""Which tests are in which suite: what each starts, and what README promises.

`make test` runs the gate: every test that starts no mesh, and those files with real meshes, kernels and browsers that
show a promise of README. `make test-all` runs everything, and `make soak` random programs, faults and load for as long
as one likes.
"""

from __future__ import annotations

from collections.abc import Collection

# By what a test uses (fixtures of tests/conftest.py), the most costly first. Without any of these it is pure.
KINDS = {
    "runs_soak": "soak",
    "chromium": "browser",
    "starts_kernels": "kernels",
    "starts_meshes": "meshes",
    "starts_processes": "processes",
}

# What README promises, and the files whose tests show it with real processes.
GATE: dict[str, tuple[str, ...]] = {
    "a cell runs on every rank, and comes back folded": ("controller/test_run.py", "kernel/test_cells.py"),
    "the ranks stay": ("kernel/test_lifetime.py", "kernel/test_output_survives.py"),
    "Stop works": ("controller/test_sigint.py", "kernel/test_interrupts.py"),
    "it says why it hangs": ("controller/test_inspection.py", "kernel/test_inspection.py", "zoo/test_hangs.py"),
    "nothing dies but what died, and heal": (
        "controller/test_faults.py",
        "controller/test_heal.py",
        "controller/test_heal_contents.py",
    ),
    "more ranks, or fewer": ("controller/test_resize.py",),
    "an elastic loop goes on at its step": ("controller/test_elastic.py",),
    "checkpoints": ("controller/test_checkpoints.py",),
    "when the cluster takes the machine back": ("controller/test_preemption.py",),
    "names are at hand": ("controller/test_values.py", "kernel/test_handles.py"),
    "tensors and modules feel local": (
        "tensors/test_remote.py",
        "tensors/test_replicated_modules.py",
        "tensors/test_training.py",
        "tensors/test_pretrained.py",
        "tensors/test_state_files.py",
    ),
    "loops on remote tensors heal by themselves": ("tensors/test_resilient.py",),
    "actors": ("actors/test_calls.py", "actors/test_faults.py", "actors/test_on_mesh.py", "actors/test_programs.py"),
    "stop and look": ("controller/test_running_debugger.py", "kernel/test_debugger.py"),
    "replay": ("replay/test_replay.py",),
    "several machines": ("engines/test_conformance.py", "cluster/test_ssh.py"),
    "magics": ("kernel/test_magics.py", "kernel/test_extension.py"),
    "the command line": ("cli/test_main.py", "cli/test_run.py", "cli/test_repl.py"),
    "agents and HTTP": ("gateway/test_http.py", "gateway/test_mcp.py"),
    "JupyterLab": ("browser/test_lab.py",),
    "marimo": ("test_marimo.py",),
    "the dashboard": ("browser/test_dashboard.py",),
}


def kind_of(fixtures: Collection[str]) -> str:
    """`pure`, `processes`, `meshes`, `kernels`, `browser` or `soak`, of a test that uses these fixtures."""
    return next((kind for fixture, kind in KINDS.items() if fixture in fixtures), "pure")


def is_in_gate(kind: str, path: str, *, is_thorough: bool = False) -> bool:
    """Whether `make test` runs a test.

    Args:
        path: its file, from tests/ on.
        is_thorough: whether it is marked `thorough`: more of what another test of its file shows.
    """
    return kind in ("pure", "processes") or (not is_thorough and any(path in files for files in GATE.values()))
