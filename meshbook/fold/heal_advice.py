"""What can be done about ranks that are lost, as errors, tables and refusals say it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshbook.ids import name_ranks


def heal_advice(num_lost: int, needs: Iterable[str] = ()) -> str:
    """Return what %mesh heal does about so many ranks.

    Args:
        needs: of each rank its `heals_when`: what %mesh heal waits for; "": nothing.
    """
    what = "a new process in its place" if num_lost == 1 else "new processes in their place"
    until = " and ".join(dict.fromkeys(need for need in needs if need))
    return f"%mesh heal puts {what}" + (f" when {until} (it is refused until then)" if until else "")


def advice_without(lost: Collection[int]) -> str:
    """Return how to go on without ranks that cannot be started again."""
    lowest = min(lost)
    if lowest == 0:
        return "without rank 0 there is no smaller mesh: %mesh stop, then %mesh start on other machines"
    return f"%mesh resize goes on with {name_ranks(range(lowest))}"
