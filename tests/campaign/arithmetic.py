"""What the works of the campaign compute, in one process. Pure: what the ranks come to is compared with it."""

from __future__ import annotations

from collections.abc import Sequence

PRIME = 65521
# Kinds of collectives, which take turns, and the factor that each mixes a rank's own number with.
FACTORS = {"all_reduce": 3, "all_gather": 5, "broadcast": 7, "ring": 11}


def kind_of(turn: int) -> str:
    return list(FACTORS)[turn % len(FACTORS)]


def first_number(seed: int, rank: int) -> int:
    return (seed * 31 + rank * 17 + 1) % PRIME


def mix(kind: str, own: int, heard: int, rank: int) -> int:
    """Return a rank's next number, of its own and of what the collective gave it."""
    return (own * FACTORS[kind] + heard + rank) % PRIME


def weighted_sum(numbers: Sequence[int]) -> int:
    """Return a sum that depends on the order of its terms."""
    return sum((place + 1) * number for place, number in enumerate(numbers))


def collect(kind: str, numbers: Sequence[int], rank: int, turn: int) -> int:
    """Return what a collective of this kind gives to a rank, from all ranks' numbers."""
    match kind:
        case "all_reduce":
            return sum(numbers)
        case "all_gather":
            return weighted_sum(numbers)
        case "broadcast":
            return numbers[turn % len(numbers)]
        case _:  # ring: from the rank before
            return numbers[rank - 1]


def numbers_after(seed: int, turns: int, world_size: int) -> list[int]:
    """Return the number of each rank after so many collectives."""
    numbers = [first_number(seed, rank) for rank in range(world_size)]
    for turn in range(turns):
        kind = kind_of(turn)
        numbers = [mix(kind, own, collect(kind, numbers, rank, turn), rank) for rank, own in enumerate(numbers)]
    return numbers


def number_alone(seed: int, turns: int, rank: int) -> int:
    """Return the number of a rank after so many turns of the loop without collectives."""
    number = first_number(seed, rank)
    for turn in range(turns):
        number = (number * 13 + turn) % PRIME
    return number
