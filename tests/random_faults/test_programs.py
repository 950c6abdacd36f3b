"""Random programs with faults at random places: right afterwards, or the mesh has said what is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.random_faults.programs import Runner

# Few of them kill a rank, which costs a new mesh.
SEEDS = {
    "cells": range(8),
    "training": (0, 4, 5, 6, 9, 14),
    "tensors": (0, 1, 2, 5, 7, 8, 9, 10, 12, 15),
    "modules": (0, 2, 3, 5, 6, 7, 9, 10, 20, 22, 23),
    "actors": range(1, 9),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.mark.numbers
@pytest.mark.timeout(400)  # several programs, each with a deadline of its own that tells more
@pytest.mark.parametrize("kind", SEEDS)
def test_after_a_fault_the_next_numbers_are_right_or_the_mesh_has_said_what_is_lost(kind: str, runner: Runner) -> None:
    failures = [(seed, verdict.failure) for seed in SEEDS[kind] if (verdict := runner.run(kind, seed)).failure]
    shown = "\n\n".join(f"seed {seed}: {failure}" for seed, failure in failures)
    assert not any(failure.startswith("WrongResult") for _, failure in failures), shown
    if failures:  # a program that did not end, or a mesh that could not be started
        pytest.fail(shown)
