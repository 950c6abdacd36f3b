"""Messages about what ranks hold differently."""

from __future__ import annotations

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.payloads import Message


class Comparison(Struct, frozen=True, gc=False):
    """One tensor that `source` sends to `targets`, which count the elements that differ from their own."""

    name: str  # that was described
    path: str  # "model.layers.0.weight"
    source: int
    targets: Ranks


# Commands: controller -> supervisor -> host -> rank


class DescribeState(Message):
    """Describe the tensors and values behind names: shapes, placements, digests. On the ranks' main threads.

    The reply is a `StateDescription`, as builtins.
    """

    call: CallId
    ranks: Ranks
    names: tuple[str, ...]  # "model", "model.layers.3"
    label: str = "compare"
    forward: str = ""  # in place of names: an expression, whose modules' inputs and outputs are described


class CompareTensors(Message):
    """Compare tensors with those of another rank. To all ranks that are named in it, on their main threads.

    The reply is a list of `TensorDifference`, as builtins: one for each comparison in which the rank is a target.
    """

    call: CallId
    ranks: Ranks
    comparisons: tuple[Comparison, ...]
    label: str = "compare"
    forward: str = ""  # all ranks run this expression; what is compared is what its modules take and give


class SetSentinel(Message):
    """Switch the sentinel for numbers that are not finite on or off. On the ranks' main threads."""

    call: CallId
    ranks: Ranks
    on: bool
    label: str = "nan"


class QuerySentinel(Message):
    """Request what the sentinel has found. The service thread replies with a `SentinelReport`, as builtins."""

    call: CallId
    ranks: Ranks


# What replies are made of


class NumberFinding(Struct, frozen=True, gc=False):
    """Where numbers of one rank stopped being finite, or its gradient exploded."""

    kind: str  # "non-finite" or "explosion"
    text: str  # all of it, as it was printed
    step: int | None  # the user's, else the updates since the sentinel was switched on; None: of remote tensors
    module: str  # "model.layers.17.attn"; empty: outside of modules
    op: str  # "softmax"; empty: not known
    # "input", "parameter", "forward", "backward", "loss", "gradient", "remote", "not repeated", "sum over ranks"
    phase: str
    line: str  # "cell 12, line 31 in forward"
    dtype: str = ""  # of the operation's input
    input_max: float | None = None  # the largest magnitude among its finite inputs
    collective: str = ""  # by which it came to other ranks: "all_reduce #44"
    reached: Ranks = ()  # the ranks of that
    parameter: str = ""  # of a module on the ranks: the first one, in the order of backward, with a bad gradient
    num_skipped: int = 0  # steps that a GradScaler has skipped for it, one after the other
    scale: float = 0.0  # with which the last of these was skipped


class SentinelReport(Struct, frozen=True, gc=False):
    """What one rank's sentinel has found since it was switched on."""

    on: bool
    findings: tuple[NumberFinding, ...] = ()
    num_updates: int = 0  # steps of optimizers that it has seen


class StateEntry(Struct, frozen=True, gc=False):
    """A tensor or value behind a name, on one rank."""

    path: str
    type: str  # a tensor's dtype, "float32"; a value's class
    digest: str | None  # of this rank's part; None: it cannot be compared
    shape: tuple[int, ...] | None = None  # of this rank's part; None: not a tensor
    text: str = ""  # a value, shortened
    equal_on: Ranks | None = None  # the ranks that are to hold the same; None: all that have the name
    own: str = ""  # why each rank may hold its own; empty: it may not


class StateDescription(Struct, frozen=True, gc=False):
    """What one rank holds behind names."""

    types: dict[str, str]  # class by name, of the names that are bound
    entries: dict[str, tuple[StateEntry, ...]]  # by name
    last_collective: str = ""  # the one that this rank began last: "all_reduce #119"
    known: tuple[str, ...] = ()  # names that are bound, where one that was asked for is not


class TensorDifference(Struct, frozen=True, gc=False):
    path: str
    num_differing: int
    num_elements: int  # of this rank's part
    max_difference: float  # NaN: of elements that are NaN on one side; of booleans 1.0
