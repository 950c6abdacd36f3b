"""The words for remote tensors: operations in batches, and values asked for."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.core import Frame, Message, Payload, SharedBuffer


class TensorUpload(Struct, frozen=True, gc=False):
    """A tensor of the controller on its way: bound to `id` before the batch's first operation."""

    id: int
    payload: Payload  # of (tensor, placements or None: as it is, on every rank)


class ShardedUpload(Struct, frozen=True, gc=False):
    """Tensors with rows on their way: bound to `ids`, on each rank its own rows, which stay in the payload's memory."""

    ids: tuple[int, ...]
    payload: Payload  # of (tensors, the placements of each)


class FetchBuffer(Struct, frozen=True, gc=False):
    """Memory of the controller's, as a contiguous tensor; ranks write their boxes of it instead of sending them.

    A rank that cannot, on another machine for one, sends its value all the same.
    """

    memory: SharedBuffer
    shape: tuple[int, ...]
    boxes: dict[int, tuple[tuple[int, int], ...]]  # by rank: first index and the one after the last, of each dim


class Fetch(Struct, frozen=True, gc=False):
    """What is asked for once the batch has run."""

    # item: its one number, from one rank. parts: each different piece, from the first rank that holds it. local: the
    # rank's own piece, from each of `ranks`. nothing: only that everything before has run. state: which steps of
    # optimizers were taken, and hashes of `ids`.
    mode: Literal["item", "parts", "local", "nothing", "state"]
    id: int = 0
    ids: tuple[int, ...] = ()
    ranks: Ranks = ()  # that answer with a value; the others only take part
    buffer: FetchBuffer | None = None


class BatchCallSites(Struct, frozen=True, gc=False):
    """Which lines of the controller issued a batch's operations. `RunOps.issued` is one, encoded by itself: ranks pass
    it by, and only who looks at a rank while it runs the batch reads it."""

    lines: tuple[Frame, ...]  # the user's innermost ones
    line_indices: tuple[int, ...]  # of each operation's line among them
    cell_labels: dict[str, str] = {}  # how people know the cells among the lines' files: "cell 7"


class RunOps(Message):
    """Run operations on tensors, in order, on the main threads of `ranks`.

    A rank keeps, per `engine`, templates (what is called, and how its arguments are put together) and tensors by id.
    `ops` is a msgpack list of numbers; each operation is its template's number, the ids of its inputs and of its new
    outputs, and its floats. In place of a template, 0 takes a count and that many ids that nobody holds any more; -1
    takes those whose faults the user knows, where they kept their values.
    """

    call: CallId
    ranks: Ranks
    engine: str  # whose ids these are: one client's, for one part of the mesh
    first_op: int  # number of the first operation in `ops`; errors name operations by their numbers
    ops: bytes
    templates: tuple[bytes, ...] = ()  # new ones, each pickled
    uploads: tuple[TensorUpload, ...] = ()
    sharded_uploads: tuple[ShardedUpload, ...] = ()
    fetch: Fetch | None = None
    evicted_templates: tuple[int, ...] = ()  # numbers of templates that nothing after this batch uses
    call_sites: bytes = b""  # an `BatchCallSites`; what is fetched counts as one more operation
    is_cancelled: bool = False  # not to be run: it waited for the rank when Stop came, which notes what it leaves out
    label: str = "tensor operations"
