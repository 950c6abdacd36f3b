"""`meshbook doctor --gpu` on the GPUs of this machine."""

from __future__ import annotations

import pytest

from meshbook.cli import doctor
from meshbook.cli.doctor_gpu import check_gpus

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_this_machine_passes_the_doctors_checks() -> None:
    results = list(check_gpus())
    print(doctor.format_report(results))
    assert [result.about for result in results if result.state != "ok"] == []
