"""Messages for remote tensors: batches of operations, and fetches of values."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.payloads import Frame, Message, Payload, SharedBuffer


class TensorUpload(Struct, frozen=True, gc=False):
    """A tensor of the controller in transit: bound to `id` before the batch's first operation."""

    id: int
    payload: Payload  # of (tensor, placements or None: replicated as it is)


class ShardedUpload(Struct, frozen=True, gc=False):
    """Row-sharded tensors in transit, bound to `ids`; each rank's own rows stay in the payload's memory."""

    ids: tuple[int, ...]
    payload: Payload  # of (tensors, the placements of each)


class FetchBuffer(Struct, frozen=True, gc=False):
    """Memory of the controller, as a contiguous tensor; ranks write their boxes of it instead of sending them.

    A rank that cannot write there (on another machine, for example) sends its value instead.
    """

    memory: SharedBuffer
    shape: tuple[int, ...]
    boxes: dict[int, tuple[tuple[int, int], ...]]  # by rank: first index and the one after the last, of each dim


class Fetch(Struct, frozen=True, gc=False):
    """What to fetch after the batch has run."""

    # item: its one number, from one rank. parts: each different piece, from the first rank that holds it. local: the
    # rank's own piece, from each of `ranks`. nothing: only confirm that everything before has run. state: which steps
    # of optimizers were taken, and hashes of `ids`. heals: how the store is after ranks were replaced; nothing is run.
    mode: Literal["item", "parts", "local", "nothing", "state", "heals"]
    id: int = 0
    ids: tuple[int, ...] = ()
    ranks: Ranks = ()  # ranks that reply with a value; the others only take part
    buffer: FetchBuffer | None = None


class BatchCallSites(Struct, frozen=True, gc=False):
    """The controller's lines that issued a batch's operations.

    `RunOps.call_sites` is one, encoded separately: ranks do not decode it; only a snapshot of a rank that runs the
    batch does.
    """

    lines: tuple[Frame, ...]  # the user's innermost ones
    line_indices: tuple[int, ...]  # of each operation: the index of its line
    cell_labels: dict[str, str] = {}  # by file: the user's name for the cell, "cell 7"


class RunOps(Message):
    """Run operations on tensors, in order, on the main threads of `ranks`.

    A rank stores, per `engine`, templates (what is called, and how its arguments are built) and tensors by id. `ops` is
    a msgpack list of numbers; each operation is its template's number, the ids of its inputs and of its new outputs,
    and its floats. In place of a template, 0 is followed by a count and that many ids that are no longer referenced; -1
    likewise, by ids whose faults the user knows, if they kept their values.
    """

    call: CallId
    ranks: Ranks
    engine: str  # the namespace of these ids: of one client, for one part of the mesh
    first_op: int  # number of the first operation in `ops`; errors name operations by their numbers
    ops: bytes
    templates: tuple[bytes, ...] = ()  # new ones, each pickled
    uploads: tuple[TensorUpload, ...] = ()
    sharded_uploads: tuple[ShardedUpload, ...] = ()
    fetch: Fetch | None = None
    evicted_templates: tuple[int, ...] = ()  # numbers of templates that nothing after this batch uses
    call_sites: bytes = b""  # a `BatchCallSites`; a fetch counts as one more operation
    # not to be run: it was queued when Stop came, or a rank was lost; the rank records which operations it omits
    is_cancelled: bool = False
    ordinal: int = 0  # its index among the engine's batches
    # how often ranks of the engine were replaced, as far as the client knows; a batch of one that knows less is not run
    num_heals: int = 0
    label: str = "tensor operations"
