"""`meshbook doctor --on monarch:…`: whether there is such a Monarch job. It is made, and not started."""

from __future__ import annotations

from collections.abc import Iterator

from meshbook.cli.doctor import CheckResult
from meshbook.engines.addresses import Address
from meshbook.engines.driver_messages import DescribeJob, JobDescribed
from meshbook.engines.monarch import job_to_allocate
from meshbook.engines.monarch_driver import MonarchDriver
from meshbook.errors import StartError


def check_monarch(address: Address) -> Iterator[CheckResult]:
    """Look at Monarch here, and at the job. Blocks for some seconds."""
    try:
        job = MonarchDriver.ask(DescribeJob(job_to_allocate(address, 1)))
    except StartError as error:
        what, _, remedy = str(error).partition("; ")
        yield CheckResult("missing", "monarch", what, remedy)
        return
    assert isinstance(job, JobDescribed)
    yield CheckResult("ok", "monarch", job.version)
    state = "which its file has started, and which stays" if job.is_started else "not started yet"
    yield CheckResult("ok", "job", f"a {job.kind}, {state}")
