"""The recording of cells, as clients ask for it: armed or not, and records that become bundles on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshbook.controller.config import current_folder
from meshbook.controller.session import Session
from meshbook.controller.tables import format_bytes
from meshbook.errors import MeshbookError, UsageError
from meshbook.fold.outcomes import ranks_with_status
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.rank.recording.door import arm
from meshbook.rank.recording.door import save as save_on_rank
from meshbook.wire import messages
from meshbook.wire.messages import OutcomeGroup

# Where bundles go, in the folder of this process: failures/f1, failures/f2, …
FOLDER = "failures"

# What a session's `extras` call the command that replays its last bundle.
REPLAY_COMMAND = "replay command"

# Bytes of memory that a record may take on each rank, unless the user says otherwise.
DEFAULT_LIMIT = 1 << 30

# Ranks that failed alike and whose records are written unasked: their bundles differ in little, and take as much each.
_MAX_ALIKE = 8


@dataclass(frozen=True)
class SavedRecords:
    """Bundles that were written.

    Attributes:
        folder: that they are in; None: nothing was written.
        num_bytes: sizes by rank.
        missing: by rank, why there is no bundle.
        left_out: names that the cell reads and that could not be kept, and why.
    """

    folder: Path | None
    num_bytes: dict[int, int]
    missing: dict[int, str]
    left_out: dict[str, str]

    def __str__(self) -> str:
        lines = []
        if self.folder is not None:
            name, first = self.folder.name, min(self.num_bytes)
            largest = format_bytes(max(self.num_bytes.values()))
            each = largest if len(self.num_bytes) == 1 else f"of {name_ranks(sorted(self.num_bytes))}, {largest} each"
            lines.append(
                f"bundle {FOLDER}/{name} ({each}); %mesh replay {name}, or on any machine: "
                f"meshbook replay {FOLDER}/{name} --rank {first}"
            )
        if self.left_out:
            lines.append("not in it: " + "; ".join(f"{name} ({why})" for name, why in self.left_out.items()))
        for why in dict.fromkeys(self.missing.values()):
            ranks = [rank for rank, reason in self.missing.items() if reason == why]
            lines.append(f"no bundle of {name_ranks(ranks)}: {why}")
        return "\n".join(lines)


def set_recording(session: Session, on: bool, limit: int) -> None:
    """Have this process's cells on the mesh recorded from now on, or no longer; and all actors of its ranks. Blocks.

    Raises:
        UsageError: the limit is none.
        RankLost: a rank is lost meanwhile.
    """
    if limit <= 0:
        raise UsageError(f"a record of {limit} bytes holds nothing; the usual limit is {format_bytes(DEFAULT_LIMIT)}")
    session.record_bytes = limit if on else 0
    ranks = session.living(tuple(rank.rank for rank in session.info.ranks))
    command = session.call_command(arm, (session.record_bytes,), {}, ranks, retain=False, label="mesh.record()")
    session.run_for_values(command)


def save(session: Session, ranks: Ranks, call: str | None = None) -> SavedRecords:
    """Write the last records of some ranks as bundles. Blocks.

    Args:
        call: of the recorded cell; None: the last one, whichever it was.

    Raises:
        CellError, RankLost: a rank could not be asked.
    """
    folder = _new_folder()
    try:
        command = session.call_command(
            save_on_rank, (str(folder), call), {}, ranks, retain=False, label="saving records"
        )
        answers: dict[int, dict[str, Any]] = dict(session.run_for_values(command))
        saved = {rank: answer["nbytes"] for rank, answer in answers.items() if "nbytes" in answer}
        missing = {rank: answer["missing"] for rank, answer in answers.items() if "missing" in answer}
        left_out = {name: why for answer in answers.values() for name, why in answer.get("left_out", {}).items()}
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # it is empty if nothing was written here
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
    if saved:
        session.extras[REPLAY_COMMAND] = f"meshbook replay {folder} --rank {min(saved)}"
    return SavedRecords(folder if saved else None, saved, missing, left_out)


def save_failed(session: Session, command: Any, finished: messages.CallFinished) -> str:
    """Write the records of the ranks that a recorded cell failed on; return a sentence about it, "" if there is none.

    Raises nothing: the cell's own failure is what the user is to see.
    """
    if not getattr(command, "record_bytes", 0):
        return ""
    failed = failed_ranks(finished.outcomes)
    if not failed:
        return ""
    if stuck := ranks_with_status(finished.outcomes, "skipped"):  # saving would wait for them, as every command does
        return f"no bundle was written, because {name_ranks(stuck)} still run the cell; later: %mesh record save"
    chosen = tuple(sorted(rank for ranks in failed for rank in ranks[:_MAX_ALIKE]))
    left = sorted({rank for ranks in failed for rank in ranks} - set(chosen))
    try:
        text = str(save(session, session.living(chosen), command.call))
    except (MeshbookError, OSError) as error:
        return f"no bundle was written: {error}"
    if left:
        text += f"\n{format_ranks(left)} failed alike; %mesh record save writes their records too"
    return text


def failed_ranks(outcomes: Sequence[OutcomeGroup]) -> list[Ranks]:
    """Return the ranks whose records tell why a cell failed, those that failed alike together.

    These are the ranks that raised something of their own; else those that were stopped.
    """
    raised = [
        part.ranks
        for part in outcomes
        if part.outcome.status == "error" and part.outcome.error is not None and not part.outcome.error.released_from
    ]
    return raised or [part.ranks for part in outcomes if part.outcome.status == "interrupted"]


def _new_folder() -> Path:
    """Make and return the next free folder for bundles. Two notebooks in one folder get different ones."""
    parent = current_folder() / FOLDER
    parent.mkdir(exist_ok=True)
    taken = [int(path.name[1:]) for path in parent.glob("f*") if path.name[1:].isdecimal()]
    number = max(taken, default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            folder = parent / f"f{number}"
            folder.mkdir()
            return folder
