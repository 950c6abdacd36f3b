"""The actors of the campaign: each has a number of its own, which every call changes."""

from __future__ import annotations

import os

from meshbook.actor import Actor, endpoint
from tests.campaign.arithmetic import PRIME


def mix_number(number: int, by: int, place: int) -> int:
    return (number * by + place + 1) % PRIME


class Counter(Actor):
    """One message at a time."""

    def __init__(self, number: int) -> None:
        self.number, self.place = number, int(os.environ["RANK"])

    @endpoint
    def mix(self, by: int) -> int:
        self.number = mix_number(self.number, by, self.place)
        return self.number
