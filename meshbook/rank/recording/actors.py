"""Records the actors of this rank: what each was, and the messages that it has begun since, in their order.

An actor's thread calls `message_begun` before each message runs. With the first, and whenever the messages take more
memory than they may, the actor itself is copied, and the messages before are no longer needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from meshbook.errors import message_of
from meshbook.rank.cells.tracebacks import error_text, to_frames
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.recording import bundle, copying
from meshbook.rank.recording.collective_log import CollectiveLog
from meshbook.rank.recording.entries import CollectiveEntry
from meshbook.rank.recording.recorder import make_header, mib, sources_of
from meshbook.rank.recording.references import RecordedObjects
from meshbook.rank.state.random_states import random_states
from meshbook.wire import pickling
from meshbook.wire.messages import Payload
from meshbook.wire.pickler import LimitExceeded


class RecordedActor(Protocol):
    """What is asked of an actor."""

    id: str
    name: str
    actor: Any
    point: Any


@dataclass
class MessageRecord:
    """One actor's record.

    Attributes:
        missing: why there is none; "": there is one.
        base: the actor and the generators before the first of the messages.
        messages: of each the method, a function that came with it, arguments and point, pickled.
        end: how the last message ended that failed.
        num_until_end: how many messages there were then; 0: none has failed.
    """

    name: str
    file: str
    missing: str = ""
    nbytes: int = 0
    base: Payload | None = None
    messages: list[Payload] = field(default_factory=list)
    entries: list[CollectiveEntry] = field(default_factory=list)
    files: dict[str, None] = field(default_factory=dict)
    end: bundle.RecordedEnd = field(default_factory=lambda: bundle.RecordedEnd("ok"))
    num_until_end: int = 0
    log: CollectiveLog | None = None


class ActorRecords:
    """The records of all actors of this rank. Called on the actors' threads."""

    def __init__(self, limit: int, groups: Callable[[], ProcessGroups | None]) -> None:
        """
        Args:
            limit: bytes that one actor's record may take.
        """
        self._limit, self._groups = limit, groups
        self._records: dict[str, MessageRecord] = {}
        self._lock = threading.Lock()

    def message_begun(
        self, runner: RecordedActor, method: str, function: Any, args: Any, kwargs: Any, point: Any
    ) -> None:
        """Note a message that is about to run. Raises nothing."""
        record = self._record_of(runner)
        if record.missing:
            return
        objects = RecordedObjects({})
        try:
            if record.base is None or record.nbytes > self._limit // 2:
                self._copy_actor(runner, record)
            sent = function if method[0] == "=" else None  # it came with the message, and is no endpoint
            message = copying.copy((method, sent, args[1:], kwargs, point), objects, self._limit)
        except (LimitExceeded, MemoryError):
            self._drop(record, f"the actor or a message takes more than the {mib(self._limit)} that a record may take")
        except Exception as error:
            self._drop(record, f"it could not be copied: {type(error).__name__}: {message_of(error)}")
        else:
            record.messages.append(message)
            record.nbytes += copying.num_bytes(message)

    def message_failed(self, runner: RecordedActor, error: BaseException) -> None:
        """Note that the message which ran last has failed."""
        record = self._record_of(runner)
        place = bundle.user_place(to_frames(error.__traceback__))
        record.end = bundle.RecordedEnd("error", type(error).__name__, error_text(error), *place)
        record.num_until_end = len(record.messages)

    def close(self) -> None:
        """Stop recording."""
        groups = self._groups()
        for record in self._records.values():
            if groups is not None and record.log in groups.observers:
                groups.observers.remove(record.log)

    def save(self, folder: Path, rank: int, world_size: int, device: str) -> Iterator[tuple[str, Path, int]]:
        """Write a bundle for each actor; yield its name, the path and the size."""
        for record in list(self._records.values()):
            if record.missing or record.base is None:
                continue
            messages = record.messages[: record.num_until_end or None]
            header = make_header(
                self._groups(),
                rank=rank,
                world_size=world_size,
                device=device,
                label=f"actor {record.name}",
                source="",
                file=record.file,
                execution_count=1,
                end=record.end,
                names=("actor", "messages"),
                left_out={},
                sources=sources_of(record.files),
                num_collectives=len(record.entries),
                actor=record.name,
            )
            path = folder / f"rank{rank}.{record.name}{bundle.SUFFIX}"
            folder.mkdir(parents=True, exist_ok=True)
            entries = pickling.dump(record.entries, pool=None)
            yield (
                record.name,
                path,
                bundle.write(path, header, bundle.BundleBody(record.base, entries, tuple(messages))),
            )

    def _record_of(self, runner: RecordedActor) -> MessageRecord:
        with self._lock:
            record = self._records.get(runner.id)
            if record is None:
                record = self._records[runner.id] = MessageRecord(runner.name, bundle.file_of(type(runner.actor)))
            return record

    def _copy_actor(self, runner: RecordedActor, record: MessageRecord) -> None:
        objects = RecordedObjects({})
        content = {
            "values": {"actor": runner.actor},
            "gradients": objects.gradients,
            "random": random_states(),
            "identity": (runner.name, runner.id, runner.point),
        }
        record.base = copying.copy(content, objects, self._limit)
        record.messages, record.nbytes, record.num_until_end = [], copying.num_bytes(record.base), 0
        record.files = {record.file: None}
        record.entries.clear()
        groups = self._groups()
        if record.log is None and groups is not None:
            record.log = CollectiveLog(record.entries, lambda nbytes: self._count(record, nbytes))
            record.log.thread = threading.get_ident()
            groups.observers.append(record.log)

    def _count(self, record: MessageRecord, nbytes: int) -> None:
        record.nbytes += nbytes
        if record.nbytes > self._limit:
            self._drop(record, f"its collectives took more than the {mib(self._limit)} that a record may take")

    def _drop(self, record: MessageRecord, why: str) -> None:
        record.missing, record.base, record.messages = why, None, []
        if record.log is not None:
            record.log.stop()
