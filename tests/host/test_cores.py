"""Threads per rank, from tables of what systems say."""

from __future__ import annotations

import os

import pytest

from meshbook.host import cores

V2 = {"/proc/self/cgroup": "0::/user.slice/job_7\n"}
V1 = {"/proc/self/cgroup": "12:cpu,cpuacct:/slurm/job_7\n3:memory:/slurm/job_7\n"}


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "quota", "threads"),
    [
        (1, 1, None, 1),
        (4, 8, None, 2),
        (8, 8, None, 1),
        (8, 128, None, 16),
        (8, 8, 4.0, 1),
        (2, 128, 6.0, 3),
        (2, 4, 64.0, 2),
        (2, 8, 0.5, 1),
        (3, 8, None, 2),
        (0, 8, None, 8),
    ],
)
def test_ranks_share_what_their_host_may_use(num_ranks: int, num_cores: int, quota: float | None, threads: int) -> None:
    assert cores.threads_per_rank(num_ranks, num_cores, quota) == threads


OF_JOB, OF_SLICE = "/sys/fs/cgroup/user.slice/job_7/cpu.max", "/sys/fs/cgroup/user.slice/cpu.max"
V1_OF_JOB, V1_OF_ALL = "/sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_", "/sys/fs/cgroup/cpu/cpu.cfs_"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {OF_JOB: "max 100000\n"}, None),
        (V2 | {OF_JOB: "250000 100000\n"}, 2.5),
        (V2 | {OF_JOB: "800000 100000\n", OF_SLICE: "400000 100000\n"}, 4.0),  # the narrowest of all above counts
        # In a container: the path of outside, under a mount that is the container's own.
        ({"/proc/self/cgroup": "0::/docker/abc\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"/proc/self/cgroup": "0::/../../x\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (V1, None),
        (V1 | {f"{V1_OF_JOB}quota_us": "800000\n", f"{V1_OF_JOB}period_us": "100000\n"}, 8.0),
        (V1 | {f"{V1_OF_ALL}quota_us": "-1\n", f"{V1_OF_ALL}period_us": "100000\n"}, None),
    ],
)
def test_a_cgroups_quota_is_read_in_both_versions(files: dict[str, str], quota: float | None) -> None:
    assert cores.cgroup_quota(files.get) == quota


def test_the_cores_that_count_are_those_this_process_may_run_on() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores.num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
