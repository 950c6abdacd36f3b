"""How many threads each rank of a host may use: the cores that this process may run on, divided.

`os.cpu_count` counts the machine's cores. Slurm, taskset and containers give a process fewer, by a set of cores
(affinity) or by a share of their time (a cgroup's quota).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

ReadText = Callable[[str], str | None]


def threads_per_rank(num_ranks: int, cores: int, quota: float | None) -> int:
    """Return the number of threads for each of `num_ranks` ranks, at least 1.

    Args:
        cores: cores that the ranks may run on.
        quota: CPU time that their cgroup may use, in cores; None: no limit.
    """
    usable = float(cores) if quota is None else min(float(cores), quota)
    return max(1, int(usable / max(1, num_ranks)))


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS
        return os.cpu_count() or 1


def cgroup_quota(read: ReadText | None = None) -> float | None:
    """Return the CPU quota, in cores, of this process's cgroup and all above it; None if no limit is known.

    Args:
        read: returns the text of a file, or None if there is none.
    """
    read = _read if read is None else read
    found: list[float] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _quotas_up_to_root(path, "/sys/fs/cgroup", lambda folder: _cgroup_v2_quota(read, folder))
        elif "cpu" in controllers.split(","):
            for mount in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"):
                found += _quotas_up_to_root(path, mount, lambda folder: _cgroup_v1_quota(read, folder))
    return min(found, default=None)


def _quotas_up_to_root(path: str, mount: str, quota: Callable[[str], float | None]) -> list[float]:
    """Return the quotas of a cgroup and all above it.

    In a container, its own cgroup is the mount itself, whatever its path outside.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    folders = ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return [found for folder in folders if (found := quota(folder)) is not None]


def _cgroup_v2_quota(read: ReadText, folder: str) -> float | None:
    fields = (read(f"{folder}/cpu.max") or "").split()  # "200000 100000", or "max 100000"
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0].isdigit() else None


def _cgroup_v1_quota(read: ReadText, folder: str) -> float | None:
    quota, period = (read(f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    return int(quota) / int(period) if quota.strip().isdigit() and period.strip().isdigit() else None  # -1: no limit


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None
