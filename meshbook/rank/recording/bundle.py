"""The file that a recorded cell of one rank becomes, and the key that shows whose it is.

    MESHBOOK BUNDLE <format>\\n | length of the header | header (msgpack) | signature | body (msgpack)

The header says what is in it and can be read without running anything. The body is pickles: whoever loads it runs the
code of whoever wrote it. So a bundle is signed with a key that only this user on this machine has, and `is_own` tells
whether it was made here.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshbook.diagnose.source_files import cell_label, is_cell_file, is_user_file
from meshbook.errors import MeshbookError
from meshbook.wire.folders import runtime_folder, write_atomically
from meshbook.wire.messages import Frame, Payload

FORMAT = 1
SUFFIX = ".bundle"
_MAGIC = b"MESHBOOK BUNDLE "
_LENGTH = struct.Struct("<Q")
_SIGNATURE_BYTES = 32
_KEY_BYTES = 32
_MAX_HEADER_BYTES = 64 << 20

# The environment variables that a bundle tells of; all others may be secrets.
_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONHASHSEED")


class BundleError(MeshbookError):
    """A bundle cannot be read or replayed. The message says why, and what to do."""


class RecordedGroup(Struct, frozen=True):
    """A process group that the rank had when the cell began."""

    name: str
    ranks: tuple[int, ...]  # global ranks of its members


class RecordedEnd(Struct, frozen=True):
    """How the cell ended on the rank."""

    status: str  # "ok", "error", "interrupted"
    ename: str = ""
    evalue: str = ""
    file: str = ""  # of the innermost line of the user's
    line: int = 0
    function: str = ""


class BundleHeader(Struct, frozen=True):
    """What a bundle is of, as plain data."""

    meshbook: str
    python: str  # "3.11"
    torch: str
    versions: dict[str, str]  # of other packages that the cell's values come from
    environment: dict[str, str]
    rank: int
    world_size: int
    device: str
    label: str  # "cell 7"
    source: str
    file: str  # the file name that the cell was compiled under
    execution_count: int
    end: RecordedEnd
    groups: tuple[RecordedGroup, ...]  # the world's first, the others in the order of their making
    num_groups_created: int
    names: tuple[str, ...]
    left_out: dict[str, str]  # names that the cell reads and that cannot be pickled, and why
    sources: dict[str, str]  # of earlier cells whose functions it uses, by file name
    num_collectives: int
    num_threads: int
    argv: tuple[str, ...] = ()  # sys.argv; (): of a bundle that does not tell
    actor: str = ""  # the name of the actor that was recorded; "": a cell was

    @property
    def title(self) -> str:
        return f"{self.label} of rank {self.rank}"


class BundleBody(Struct, frozen=True):
    """The pickles of a bundle."""

    names: Payload  # of a dict with "values", "gradients" and "random"
    collectives: Payload  # of a list of `CollectiveEntry`
    messages: tuple[Payload, ...] = ()  # of an actor: (method, function, args, kwargs, point)


_headers = msgspec.msgpack.Decoder(BundleHeader)
_bodies = msgspec.msgpack.Decoder(BundleBody)
_encoder = msgspec.msgpack.Encoder()


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def write(path: Path, header: BundleHeader, body: BundleBody) -> int:
    """Write a bundle; return its size in bytes. Only this user may read it.

    Raises:
        OSError: it cannot be written.
    """
    head, rest = _encoder.encode(header), _encoder.encode(body)
    signature = _sign(head, rest)
    partial = path.with_name(f".{path.name}.part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for piece in (_MAGIC + b"%d\n" % FORMAT, _LENGTH.pack(len(head)), head, signature, rest):
            file.write(piece)
    os.replace(partial, path)
    return path.stat().st_size


class BundleFile:
    """A bundle on disk, its header read.

    Attributes:
        is_own: it was made by this user on this machine, and is unchanged.
    """

    def __init__(self, path: Path) -> None:
        """Read a file.

        Raises:
            BundleError: it is none, of another format, or damaged.
        """
        self.path = path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror}") from error
        magic = data[:32].partition(b"\n")[0]
        if not magic.startswith(_MAGIC):
            raise BundleError(f"{path} is not a bundle of Meshbook; those are failures/fN/rankR{SUFFIX}")
        if magic != _MAGIC + b"%d" % FORMAT:
            raise BundleError(
                f"{path} has format {magic[len(_MAGIC) :].decode(errors='replace')}, and this Meshbook reads format "
                f"{FORMAT}; replay it with the Meshbook that made it"
            )
        at = len(magic) + 1
        try:
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            head = data[at : at + min(length, _MAX_HEADER_BYTES)]
            at += length
            signature, self._body = data[at : at + _SIGNATURE_BYTES], data[at + _SIGNATURE_BYTES :]
            self.header = _headers.decode(head)
            self._decoded = _bodies.decode(self._body)
        except (struct.error, msgspec.MsgspecError) as error:
            raise BundleError(
                f"{path} is damaged ({error}): it was cut off or changed on its way. Copy it again, or save it again "
                "with %mesh record save"
            ) from None
        self.is_own = hmac.compare_digest(signature, _sign(head, self._body))

    @property
    def body(self) -> BundleBody:
        return self._decoded


def place(file: str, line: int, running_file: str) -> str:
    """Return `line 3` for the recorded cell, `line 3 of cell 2` for another one, `train.py:3` for a file."""
    if file == running_file:
        return f"line {line}"
    cell = "an earlier cell" if is_cell_file(file) else None
    cell = cell_label(file) or cell
    return f"line {line} of {cell}" if cell is not None else f"{os.path.basename(file)}:{line}"


def user_place(frames: Sequence[Frame]) -> tuple[str, int, str]:
    """Return file, line and function of the innermost frame of the user's code."""
    frame = next((frame for frame in reversed(frames) if is_user_file(frame.file)), None)
    return ("", 0, "") if frame is None else (frame.file, frame.line, frame.function)


def file_of(kind: type) -> str:
    """Return the file of a class that has functions; "" without."""
    for attribute in vars(kind).values():
        code = getattr(getattr(attribute, "method", attribute), "__code__", None)
        if code is not None:
            return str(code.co_filename)
    return ""


def describe_versions(modules: dict[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that replays commonly differ by, as far as they are imported."""
    return {name: str(modules[name].__version__) for name in ("numpy", "IPython", "cloudpickle") if name in modules}


def _sign(head: bytes, rest: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    digest.update(_LENGTH.pack(len(head)))
    digest.update(head)
    digest.update(rest)
    return hmac.digest(_own_key(), digest.digest(), "sha256")


def _own_key() -> bytes:
    """Return the key of this user on this machine; it is made with the first bundle."""
    path = runtime_folder() / ".bundle-key"
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        write_atomically(fresh, secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # ranks make it at the same time: the first one's is that of all
            os.link(fresh, path)
        fresh.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise BundleError(f"{path} has {len(key)} bytes instead of {_KEY_BYTES}; remove it, and a new key is made")
    return key
