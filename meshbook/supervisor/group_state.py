"""The process groups of a mesh: whether they can be used, and in which generation they are."""

from __future__ import annotations

from typing import Literal

from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import OutcomeGroup


class GroupState:
    """The state of the mesh's process groups; all of them are formed and broken together.

    Attributes:
        status: as in `MeshInfo.groups`.
        generation: how often they were formed.
        backend: "gloo", "nccl"; None before they were formed.
        axes: of the mesh.
        num_resizes: how often the mesh was given others.
        has_failed: the last attempt to form them failed; the next call that uses them retries.
    """

    def __init__(self, store_address: str) -> None:
        self._store_address = store_address
        self.status: Literal["none", "forming", "ready", "broken"] = "none"
        self.generation = 0
        self.backend: str | None = None
        self.axes: dict[str, int] = {}
        self.num_resizes = 0
        self.has_failed = False

    def request(self) -> None:
        """Record that a mesh with process groups starts."""
        self.status = "forming"

    def resized(self, axes: dict[str, int]) -> None:
        """Record that the mesh has other ranks, whose groups are to be formed."""
        self.axes, self.num_resizes = axes, self.num_resizes + 1
        self.has_failed = False
        if self.status != "none":
            self.status = "broken"

    def begin_forming(self, ranks: Ranks) -> messages.FormGroups:
        """Begin the next generation; return the command that forms it. Ranks of a mesh without groups only reply."""
        self.generation += 1
        if self.status != "none":
            self.status = "forming"
        call = CallId(f"form-{self.generation}")
        return messages.FormGroups(
            call=call,
            ranks=ranks,
            generation=self.generation,
            store_address=self._store_address,
            axes=self.axes,
            num_resizes=self.num_resizes,
        )

    def formed(self, parts: tuple[OutcomeGroup, ...], failure: str) -> str:
        """Record how forming them ended; return why it failed, or "".

        Args:
            failure: the first rank that could not form them and why, if that was reported before.
        """
        failed = [part for part in parts if part.outcome.status != "ok"]
        if failed:
            error = failed[0].outcome.error
            status = failed[0].outcome.status
            text: str = status if status != "skipped" else "took no part in time; %mesh why shows what it does"
            if error is not None:
                text = f"{error.ename}: {error.evalue}"
            self.status, self.has_failed = "broken", True
            return failure or f"{name_ranks(failed[0].ranks)}: {text}"
        if self.status == "forming":
            self.status = "ready"
        self.backend = parts[0].outcome.reply.get("backend") if parts and parts[0].outcome.reply else None
        return ""

    def rank_lost(self) -> None:
        """Record that a member has exited."""
        if self.status in ("ready", "forming"):
            self.status = "broken"

    def mark_broken(self, label: str, ranks: Ranks) -> tuple[messages.RankDisplay, ...]:
        """Record that they must be re-formed; return the notices for the user of the call that broke them.

        Work enqueued behind an aborted collective may still have run (NCCL).
        """
        self.status = "broken"
        if self.backend is None or "nccl" not in self.backend:
            return ()
        return (messages.RankDisplay(ranks=ranks, item=messages.Notice(discard_notice(label))),)


def discard_notice(label: str) -> str:
    """Return the advice to the user when NCCL process groups are re-formed."""
    return (
        f"the process groups are formed anew. Work that {label or 'the call'} had enqueued behind a collective that "
        f"was given up may have run on the GPU with garbage: discard the step in which {label or 'it'} ended (run it "
        "again from the state before it, or load the last checkpoint)"
    )
