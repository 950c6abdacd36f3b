"""One attempt to heal a mesh, or to complete its resize: what its steps came to."""

from __future__ import annotations

import math

import msgspec

from meshbook.ids import Ranks
from meshbook.supervisor.call_table import Parts
from meshbook.wire import messages
from meshbook.wire.messages import MeshInfo


class HealAttempt:
    """One attempt, and what its steps came to."""

    def __init__(
        self,
        client: str,
        command: messages.HealMesh,
        new_ranks: Ranks,
        number: int,
        began_at: float,
        resized: messages.ResizeChanges | None = None,
        *,
        is_copy: bool = False,
    ) -> None:
        self.client, self.command, self.new_ranks = client, command, new_ranks
        self.number, self.began_at, self.resized, self.is_copy = number, began_at, resized, is_copy
        size_before = math.prod(resized.before.values()) if resized is not None else None
        self.joined = () if size_before is None else tuple(rank for rank in new_ranks if rank >= size_before)
        self.ran: tuple[str, ...] = ()
        self.num_defined = 0
        self.bound: set[str] = set()  # names that the replayed cells have bound
        self.built: set[str] = set()  # those of setup cells
        self.failed: dict[str, str] = {}
        self.restored: dict[int, dict[str, tuple[int, str]]] = {}
        self.missing: dict[int, dict[str, str]] = {}
        self.kept: dict[int, dict[str, str]] = {}
        self.alike: dict[str, None] = {}  # names that could be copied
        self.num_bytes = 0  # of DTensors, that went from rank to rank

    def replayed(self, parts: Parts) -> None:
        """Take what new ranks say of the cells that they have run."""
        for part in parts:
            reply = part.outcome.reply or {}
            self.ran = tuple(reply.get("ran", ()))
            self.num_defined = reply.get("defined", 0)
            self.bound.update(reply.get("bound", ()))
            self.built.update(reply.get("built", ()))
            self.failed.update(dict(reply.get("failed", ())))

    def shared(self, parts: Parts) -> None:
        """Take what new ranks say of what they have got."""
        for part in parts:
            reply = part.outcome.reply or {}
            for rank in part.ranks:
                if rank in self.new_ranks:
                    self.restored[rank] = {name: (found[0], found[1]) for name, found in reply["restored"].items()}
                    self.missing[rank] = dict(reply["missing"])
                    self.kept[rank] = dict(reply["kept"])
                    self.alike.update(dict.fromkeys(reply["alike"]))

    def moved(self, parts: Parts, ranks: Ranks) -> None:
        """Take what ranks say of the parts of DTensors that they have got."""
        replies = [part.outcome.reply or {} for part in parts]
        self.num_bytes = sum(reply.get("num_bytes", 0) for reply in replies)
        for name in {name for reply in replies for name in reply.get("lost", ())}:
            for rank in ranks:
                self.missing.setdefault(rank, {})[name] = "parts of it were lost with a rank, and are NaN"

    def offered(self, before: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names that can be copied afterwards; `before`: those that could be."""
        if self.is_copy:
            copied = {name for found in self.restored.values() for name in found}
            return tuple(name for name in before if name not in copied)
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.alike))  # of `net.tau`: net

    def why_nothing_was_copied(self, num_ranks: int, groups: str) -> str:
        """Return why the new ranks got nothing from others; "" if they were given what is proven."""
        if len(self.new_ranks) == num_ranks:
            return "no other rank was left that held it"
        if not self.command.share:
            return "copying was turned off"
        return "" if groups == "ready" else "nothing is copied without process groups"

    def reply(
        self, info: MeshInfo, now: float, checkpoint: messages.SavedFolder | None, age_s: float
    ) -> messages.MeshHealed:
        """Return what the client is sent about the attempt, which has succeeded."""
        resized = self.resized
        if resized is not None:
            resized = msgspec.structs.replace(resized, num_bytes=resized.num_bytes + self.num_bytes)
        return messages.MeshHealed(
            call=self.command.call,
            info=info,
            ranks=() if self.is_copy else self.new_ranks,
            seconds=now - self.began_at,
            ran=self.ran,
            num_defined=self.num_defined,
            failed=tuple(self.failed.items()),
            restored=self.restored,
            missing=self.missing,
            kept=self.kept,
            alike=tuple(self.alike),
            copied_to=self.new_ranks if self.is_copy else (),
            checkpoint=checkpoint,
            checkpoint_age_s=age_s,
            resized=resized,
        )
