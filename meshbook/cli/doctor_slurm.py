"""`meshbook doctor --on slurm://…`: whether a mesh could start in a job of Slurm. Nothing is started."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from meshbook.cli.doctor import CheckResult
from meshbook.engines.addresses import Address
from meshbook.engines.slurm_job import run_slurm, sbatch_environment, sbatch_options
from meshbook.errors import StartError

_TOOLS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")


def check_slurm(address: Address) -> Iterator[CheckResult]:
    """Look at Slurm's commands, the partition, and whether it would take a job of one node. Blocks for a second."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        remedy = "start from a machine from which jobs are submitted, such as the cluster's login node"
        yield CheckResult("missing", "slurm", f"{', '.join(missing)} not found on this machine", remedy)
        return
    try:
        yield CheckResult("ok", "slurm", run_slurm("sinfo", "--version").stdout.strip())
        yield from _check_partition(address.partition)
        yield _check_job(address)
    except StartError as error:
        what, _, remedy = str(error).partition("; ")
        yield CheckResult("missing", "slurm", what, remedy)


def _check_partition(wanted: str) -> Iterator[CheckResult]:
    done = run_slurm("sinfo", "-h", "-o", "%P|%a|%l|%F|%c|%m|%G")
    if done.returncode:
        yield CheckResult("missing", "slurm", done.stderr.strip(), "is its controller up?")
        return
    rows = [line.split("|") for line in done.stdout.splitlines()]
    names = sorted({row[0].rstrip("*") for row in rows})
    found = [row for row in rows if (row[0].rstrip("*") in wanted.split(",") if wanted else row[0].endswith("*"))]
    if not found:
        what = f"there is no partition {wanted}" if wanted else "there is no default partition"
        yield CheckResult("missing", "partition", what, f"name one of these: {', '.join(names)}")
    for name, available, limit, nodes, cores, memory, gres in found:
        idle, total = nodes.split("/")[1], nodes.split("/")[3]
        gpus = "" if gres == "(null)" else f", {gres}"
        yield CheckResult(
            "ok" if available == "up" else "missing",
            f"partition {name.rstrip('*')}",
            f"{available}, {total} nodes ({idle} idle), each with {cores} cores, {memory} MB{gpus}; "
            f"a job may run for {limit}",
        )


def _check_job(address: Address) -> CheckResult:
    done = run_slurm(
        "sbatch", "--test-only", *sbatch_options(address, num_nodes=1, ranks_per_node=1), "--wrap=true",
        env=sbatch_environment(),
    )  # fmt: skip
    words = " / ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode:
        return CheckResult("missing", "job", f'one of a single node is refused ("{words}")', "change what is asked for")
    start = re.search(r"to start at (\S+)", words)
    when = start[1].replace("T", " ") if start is not None else words
    return CheckResult("ok", "job", f"one of a single node could start at {when}")
