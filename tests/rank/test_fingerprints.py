"""Fingerprints by which a save sees what differs between ranks: the same on a device as in CPU memory."""

from __future__ import annotations

import numpy
import pytest
import torch

from meshbook.rank.checkpoints.fingerprints import device_digest, fingerprint_tensor
from meshbook.rank.state.memory_digests import ROW_BYTES, ROW_WORDS, digest


@pytest.mark.parametrize("num_bytes", [0, 5, ROW_BYTES, 3 * ROW_BYTES + 7, 4100 * ROW_BYTES + 8])
def test_a_device_makes_the_same_digest_as_the_cpu(num_bytes: int) -> None:
    flat = torch.from_numpy(numpy.random.default_rng(0).integers(0, 256, num_bytes, dtype=numpy.uint8))
    assert fingerprint_tensor(flat).endswith(f":{device_digest(flat)}")


@pytest.mark.parametrize("change", ["rows and columns are swapped", "two opposite changes", "rows", "columns"])
def test_what_leaves_the_sums_of_rows_and_columns_as_they_are_has_another_digest_on_a_device(change: str) -> None:
    words = torch.zeros(64, ROW_WORDS, dtype=torch.int64)
    words[3, 5] = words[7, 11] = 9
    other = words.clone()
    match change:
        case "rows and columns are swapped":
            other[3, 5] = other[7, 11] = 0
            other[3, 11] = other[7, 5] = 9
        case "two opposite changes":
            other[[3, 7], [11, 5]] = 1
            other[[3, 7], [5, 11]] -= 1
        case "rows":
            other[[3, 7]] = other[[7, 3]]
        case _:
            other[:, [5, 11]] = other[:, [11, 5]]
    one, two = (device_digest(each.view(torch.uint8).reshape(-1)) for each in (words, other))
    assert one != two


def test_a_part_of_another_tensor_has_a_digest_on_a_device_wherever_it_begins() -> None:
    memory = torch.arange(3 * ROW_BYTES, dtype=torch.int32).view(torch.uint8)
    for begin in (0, 1, 4, 8):
        part = memory[begin : begin + 2 * ROW_BYTES + 3]
        assert device_digest(part) == digest(part.clone().numpy()).hex()


def test_a_fingerprint_says_shape_and_dtype_too() -> None:
    zeros = torch.zeros(8, 4)
    others = [zeros.reshape(4, 8), zeros.int(), torch.zeros(8, 5)]
    assert fingerprint_tensor(zeros) == fingerprint_tensor(zeros.clone())
    assert fingerprint_tensor(zeros) not in [fingerprint_tensor(other) for other in others]


def test_a_lazily_conjugated_tensor_has_the_fingerprint_of_its_numbers() -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    assert fingerprint_tensor(numbers.conj()) == fingerprint_tensor(numbers.conj().resolve_conj())
    assert fingerprint_tensor(numbers.conj()) != fingerprint_tensor(numbers)
