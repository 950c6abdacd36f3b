"""`meshbook replay`: finds a bundle, asks before it runs a stranger's, replays it, and says whether it ended alike."""

from __future__ import annotations

import os
import pdb
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook.errors import UsageError
from meshbook.rank.recording.bundle import SUFFIX, BundleError, BundleFile, place

if TYPE_CHECKING:  # it imports torch, which takes a second
    from meshbook.replay.cell import ReplayedEnd

_LINE = re.compile(r"(?:line\s+)?(\d+)")


@dataclass(frozen=True)
class ReplayOptions:
    """What `meshbook replay` is asked for.

    Attributes:
        path: a bundle, or a folder of some.
        rank: whose; None: the first in the folder.
        until: "line 40": stop there in the debugger.
        edit: change the cell first, in $EDITOR.
        debug: look at the exception in the debugger.
        trust: run a bundle that was not made here without a question.
    """

    path: Path
    rank: int | None = None
    until: str | None = None
    edit: bool = False
    debug: bool = False
    trust: bool = False


def run(options: ReplayOptions) -> int:
    """Replay a bundle; return 0 if it ended as on the mesh, else 1.

    Raises:
        BundleError: it cannot be replayed.
    """
    bundle = BundleFile(find_bundle(options.path, options.rank))
    _ask_unless_own(bundle, trust=options.trust)
    header = bundle.header
    stop_at = None if options.until is None else (header.file, _line_of(options.until))
    if options.edit and header.actor:
        raise UsageError(
            "--edit changes a cell, and this is the record of an actor: change its class where it is defined"
        )
    source = _edited(header.source) if options.edit else None
    from meshbook.replay.cell import ReplayProcess  # imports torch

    with ReplayProcess(bundle) as process:
        ranks = f"rank {header.rank} of {header.world_size}"
        kept = f"{len(bundle.body.messages)} messages" if header.actor else f"{len(header.names)} names"
        print(f"replaying {header.label} of {ranks}: {header.num_collectives} collectives, {kept}")
        for note in process.notes:
            print(f"  note: {note}")
        sys.stdout.flush()
        end = process.run(source, stop_at=stop_at)
        sys.stdout.flush()
        if options.debug and end.error is not None:
            pdb.post_mortem(end.error.__traceback__)
        if source is not None:
            return _tell_of_edited(end, is_past_end=process.record.is_past_end)
        if difference := end.differs(header):
            print(f"not as on the mesh: {difference}")
            return 1
        if header.end.ename:
            where = place(end.file, end.line, header.file)
            print(f"as on the mesh: {header.end.ename} at {where}")
        else:
            print("as on the mesh: it ran to its end")
        return 0


def find_bundle(path: Path, rank: int | None) -> Path:
    """Return the file of a bundle: `path` itself, or that of a rank in the folder.

    Raises:
        BundleError: there is none.
    """
    if not path.exists() and (Path("failures") / path).exists():
        path = Path("failures") / path
    if path.is_file():
        return path
    found = sorted(path.glob(f"rank*{SUFFIX}"), key=lambda file: (_rank_of(file), file.name)) if path.is_dir() else []
    if not found:
        raise BundleError(f"there is no bundle at {path}; failed cells that are recorded leave them in failures/")
    if rank is None:
        return found[0]
    for file in found:
        if _rank_of(file) == rank:
            return file
    ranks = ", ".join(str(_rank_of(file)) for file in found)
    raise BundleError(f"{path} has no bundle of rank {rank}; it has those of {ranks}")


def _rank_of(path: Path) -> int:
    digits = path.name.removeprefix("rank").partition(".")[0]
    return int(digits) if digits.isdecimal() else -1


def _line_of(text: str) -> int:
    found = _LINE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f'--until {text!r} is no line of the cell; write it like --until "line 40"')
    return int(found[1])


def _ask_unless_own(bundle: BundleFile, *, trust: bool) -> None:
    """
    Raises:
        BundleError: the user does not trust it, or cannot be asked.
    """
    if bundle.is_own or trust:
        return
    why = f"{bundle.path} was not made by you on this machine, or was changed since. A bundle is code: replaying it "
    why += "runs what its author wrote, with your rights"
    if not sys.stdin.isatty():
        raise BundleError(f"{why}. If you trust whoever made it, add --trust")
    if input(f"{why}. Run it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise BundleError("nothing was run")


def _tell_of_edited(end: ReplayedEnd, *, is_past_end: bool) -> int:
    if is_past_end:
        print(
            "the edited cell came past where it failed, to a collective that no rank has answered: run it on the mesh"
        )
        return 0
    print(
        "the edited cell ran to its end" if end.error is None else f"the edited cell raised {type(end.error).__name__}"
    )
    return int(end.error is not None)


def _edited(source: str) -> str:
    """Return what the user makes of a cell in an editor."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cell.py"
        file.write_text(source)
        if subprocess.call([*editor.split(), str(file)]) != 0:
            raise BundleError(f"the editor ({editor}) failed; nothing was run. VISUAL or EDITOR chooses another")
        return file.read_text()
