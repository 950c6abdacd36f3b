"""Random programs with faults at random places: right afterwards, or the mesh has said what is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.random_faults.programs import Runner

# Few of them kill a rank, which costs a new mesh.
SEEDS = {
    "cells": range(8),
    "training": range(5),
    "tensors": range(8, 16),
    "modules": (1, 2, 3, 5, 14),
    "actors": range(1, 9),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.mark.timeout(400)  # several programs, each with a deadline of its own that tells more
@pytest.mark.parametrize("kind", SEEDS)
def test_after_a_fault_the_next_numbers_are_right_or_the_mesh_has_said_what_is_lost(kind: str, runner: Runner) -> None:
    failures = [(seed, verdict.failure) for seed in SEEDS[kind] if (verdict := runner.run(kind, seed)).failure]
    assert not failures, "\n\n".join(f"seed {seed}: {failure}" for seed, failure in failures)
