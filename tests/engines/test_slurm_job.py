"""What is asked of sbatch, and what squeue's words mean."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from meshbook.engines.addresses import Address
from meshbook.engines.slurm_job import JobState, sbatch_environment, sbatch_options, slurm_environment


def options(on: str) -> list[str]:
    return sbatch_options(Address.parse(on), num_nodes=2, ranks_per_node=4)


def test_sbatch_is_asked_for_nodes_with_a_core_for_each_rank() -> None:
    assert options("slurm://") == ["--nodes=2", "--ntasks-per-node=1", "--signal=TERM@60", "--cpus-per-task=4"]


def test_what_the_user_asks_for_comes_before_our_own() -> None:
    asked_for = options("slurm://gpu?exclusive=&signal=TERM@300&account=x&python=/opt/python")
    assert asked_for == [
        "--nodes=2", "--ntasks-per-node=1", "--signal=TERM@300", "--partition=gpu", "--exclusive", "--account=x",
    ]  # fmt: skip


def test_a_pending_job_is_described_with_its_reason_and_start() -> None:
    today = datetime.now().replace(hour=23, minute=7, second=0, microsecond=0)
    assert JobState.parse(f"PENDING|Priority||{today.isoformat()}\n").describe() == (
        "PENDING (Priority), starts about 23:07"
    )
    later = JobState.parse(f"PENDING|Resources||{(today + timedelta(days=3)).isoformat()}\n").describe()
    assert later == f"PENDING (Resources), starts about {today + timedelta(days=3):%a %d %b} 23:07"
    assert JobState.parse("PENDING|Dependency||N/A\n").describe() == "PENDING (Dependency)"
    assert JobState.parse("PENDING|None||N/A\n").describe() == "PENDING"


def test_a_job_ends_at_its_time_limit_if_it_has_one() -> None:
    end = datetime(2026, 11, 26, 4, 9, 9)
    assert JobState.parse(f"RUNNING|None|n1|2026-11-26T03:09:09|{end.isoformat()}\n").ends_at() == end.timestamp()
    assert JobState.parse("RUNNING|None|n1|2026-11-26T03:09:09|NONE\n").ends_at() is None
    assert JobState("RUNNING").ends_at() is None


@pytest.mark.parametrize(
    ("line", "is_hopeless"),
    [
        ("PENDING|PartitionNodeLimit||N/A", True),
        ("PENDING|QOSMaxWallDurationPerJobLimit||N/A", True),
        ("PENDING|AssocMaxNodePerJobLimit||N/A", True),
        ("PENDING|Priority||N/A", False),
        ("PENDING|QOSMaxJobsPerUserLimit||N/A", False),
        ("PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]||N/A", False),
        ("RUNNING|None|n[1-2]|2026-11-26T03:09:09", False),
    ],
)
def test_a_job_that_would_never_run_is_told_from_one_that_waits(line: str, is_hopeless: bool) -> None:
    assert (JobState.parse(line).why_hopeless() is not None) == is_hopeless


def test_a_job_is_over_when_slurm_has_ended_or_forgotten_it() -> None:
    assert [JobState(state).is_over for state in ("PENDING", "CONFIGURING", "RUNNING", "TIMEOUT", "CANCELLED", "")] == [
        False, False, False, True, True, True,
    ]  # fmt: skip


def test_a_job_takes_no_secrets_along_and_srun_nothing_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_TOKEN", "SLURM_JOB_ID", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "x")
    assert {"API_TOKEN", "SLURM_JOB_ID"}.isdisjoint(sbatch_environment())
    assert {"SLURM_CONF", "SBATCH_ACCOUNT"} <= sbatch_environment().keys()
    assert "SLURM_JOB_ID" not in slurm_environment()
    assert "API_TOKEN" in slurm_environment()
