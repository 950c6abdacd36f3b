"""The kinds of findings: what each means, what to do next, and its order among others.

This one table is the source of texts for `%mesh why`, the dashboard, the tests and docs/debugging.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class FindingKind(NamedTuple):
    """One kind of finding."""

    weight: int  # higher weights are reported first
    meaning: str
    next_step: str  # fields: {ranks}, {first} as magics take them; {name} in prose; {pids}
    interrupt_hint: str = ""  # appended to it where the ranks run a cell, which can be interrupted


KINDS: Final[dict[str, FindingKind]] = {
    # ---- a rank has exited or cannot run
    "host-silent": FindingKind(
        100,
        "A whole machine does not answer.",
        "Check that the machine is up and that the network reaches it; %mesh stop --now frees what is left.",
    ),
    "out-of-memory": FindingKind(
        97,
        "The kernel's out-of-memory killer ended the rank.",
        "%mesh stop and start again with less memory in use: a smaller batch, fewer ranks or DataLoader workers.",
    ),
    "killed": FindingKind(
        96,
        "The rank's process is gone.",
        "%mesh logs {first} shows what it said last; %mesh heal puts a new process in its place.",
    ),
    "stopped": FindingKind(
        95,
        "The rank's process is stopped (SIGSTOP, Ctrl-Z or a debugger).",
        "Let it go on with: kill -CONT {pids}",
    ),
    "rank-silent": FindingKind(
        90,
        "The rank has not been heard of, and nothing can be seen of it.",
        "%mesh stacks {ranks} looks once more; if it stays silent, %mesh kill {ranks} ends it.",
    ),
    # ---- ranks run diverging code
    "raised-before-collective": FindingKind(
        88,
        "A rank failed with an exception, and others wait for it in a collective.",
        "Stop the cell (it will not go on), mend the error on {name}, run the cell again.",
    ),
    "different-collectives": FindingKind(
        86,
        "Members of a group called different collectives at the same place in their order.",
        "Call the same collectives in the same order on every rank: look for an `if` on the rank or its data.",
    ),
    "shape-mismatch": FindingKind(
        85,
        "Members of a group brought tensors of different shapes to one collective.",
        "Make the shapes equal on all ranks (pad, or drop the last uneven batch); all_gather_object takes uneven data.",
    ),
    "dtype-mismatch": FindingKind(
        84,
        "Members of a group brought tensors of different dtypes to one collective.",
        "Convert to one dtype on all ranks before the collective.",
    ),
    "crossed-groups": FindingKind(
        83,
        "Ranks wait for each other in collectives of different groups.",
        "Call the collectives of the groups in the same order on all ranks that are in more than one of them.",
    ),
    "send-deadlock": FindingKind(
        82,
        "Ranks that want to send to each other all send first.",
        "Let one side receive first, or post both with isend/irecv or dist.batch_isend_irecv and wait afterwards.",
    ),
    "receive-deadlock": FindingKind(
        82,
        "Ranks that want to receive from each other all receive first.",
        "Let one side send first, or post both with isend/irecv or dist.batch_isend_irecv and wait afterwards.",
    ),
    "wrong-peer": FindingKind(
        81,
        "A send or receive names another rank than the one that waits for it.",
        "Compare src= and dst= of the two lines: they are global ranks, not ranks within a group.",
    ),
    "send-without-receive": FindingKind(
        80,
        "A rank sends, and its peer never receives.",
        "Add the matching dist.recv on the peer, or leave the send out.",
    ),
    "receive-without-send": FindingKind(
        80,
        "A rank receives, and its peer never sends.",
        "Add the matching dist.send on the peer, or leave the receive out.",
    ),
    "group-made-by-some": FindingKind(
        79,
        "A process group is made by some ranks only; making one takes all of them.",
        "Call new_group, init_device_mesh and the like on every rank, also on those that will not be members.",
    ),
    "alone-in-collective": FindingKind(
        78,
        "One rank called a collective that hardly anyone else comes to.",
        "Take the call out of the `if` that only {name} enters, or run the cell on all ranks of the group.",
    ),
    "left-early": FindingKind(
        77,
        "A rank ended the cell without making a collective in which others wait.",
        "Look why {name} made fewer calls: an early return or break, sys.exit(), or fewer batches than the others.",
    ),
    "actor-deadlock": FindingKind(
        76,
        "Actors wait for each other's answers in a circle: each is busy with the call that waits.",
        "Make the endpoints of one actor of the circle `async def`, with `await` for `.get()`: it then takes the next "
        "call while it waits. Or do not wait there, and send the answer later through a port.",
    ),
    # ---- a rank waits for something outside the process groups
    "starved": FindingKind(
        75,
        "The rank gets no processor: its machine is overloaded, or its container's share is used up.",
        "Wait, and look with top on its machine what else runs there; fewer ranks or threads per machine need less.",
    ),
    "gil-kept": FindingKind(
        74,
        "A C call keeps the Python interpreter lock, so that no other thread of the rank can run.",
        "If it does not end by itself, %mesh interrupt; a call that ignores that ends with %mesh kill {ranks}.",
    ),
    "thread-deadlock": FindingKind(
        73,
        "Two threads of one rank wait for locks that the other one has.",
        "Take the locks in the same order in both threads, or hold only one at a time.",
    ),
    "waits-for-input": FindingKind(
        72, "A rank waits for somebody to type.", "Answer at the prompt under the cell, or interrupt the cell."
    ),
    "waits-for-lock": FindingKind(
        71,
        "A rank waits for a lock that is not released.",
        "%mesh stacks {ranks} --threads shows what its other threads do: one of them, or this one, has the lock.",
    ),
    "waits-for-queue": FindingKind(
        71,
        "A rank waits for a queue that nobody fills (or empties, if it is full).",
        "Look at the thread or process that should feed the queue: it may have ended.",
    ),
    "waits-for-thread": FindingKind(
        71,
        "A rank waits for a thread or a future that does not end.",
        "%mesh stacks {ranks} --threads shows where that thread is.",
    ),
    "waits-for-event": FindingKind(
        71,
        "A rank waits for an event, condition or threading.Barrier that nobody sets.",
        "Look for who should have set it: %mesh stacks {ranks} --threads.",
    ),
    "waits-for-worker": FindingKind(
        71,
        "A rank waits for a DataLoader worker.",
        "Try num_workers=0 to see the worker's own error, or give the DataLoader a timeout=.",
    ),
    "waits-for-subprocess": FindingKind(
        70,
        "A rank waits for another process that it started.",
        "Look at that process; give the call a timeout=.",
    ),
    "waits-for-pipe": FindingKind(
        70,
        "A rank waits for a pipe: nobody writes at its other end, or nobody reads.",
        "Look at the process at the other end; close the ends that nobody uses.",
    ),
    "waits-for-socket": FindingKind(
        70,
        "A rank waits for the network.",
        "Check the other side, and give the call a timeout=.",
    ),
    "waits-for-file": FindingKind(
        70,
        "A rank waits for a file: a lock on it, a FIFO without an other end, or a slow disk.",
        "Look who has the file: fuser or lsof with its path.",
    ),
    "disk-sleep": FindingKind(
        70,
        "The rank's process is in uninterruptible sleep: the disk or a network file system does not answer.",
        "Check the file system (df, dmesg): such a process cannot even be killed until it answers.",
    ),
    "waits-for-store": FindingKind(
        70,
        "A rank waits for a key of a TCPStore that nobody sets.",
        "Find who should set the key; give the store a timeout.",
    ),
    "waits-for-actor": FindingKind(
        70,
        "A rank waits for the answer of an actor.",
        "mesh.actors() (%mesh actors) says which endpoint that actor is in, and for how long.",
    ),
    "waits-in-event-loop": FindingKind(
        69,
        "A rank awaits something in asyncio that does not come.",
        "Put asyncio.wait_for(..., timeout) around what is awaited.",
    ),
    "waits-for-gpu": FindingKind(
        68,
        "A rank waits until its GPU has done what was asked of it, collectives on the GPU included.",
        "If it stays so: nvidia-smi tells whether the GPU computes, and the other ranks' findings who is missing.",
    ),
    # ---- a rank is busy
    "python-loop": FindingKind(
        66,
        "A rank computes in the same code all the time and calls no collective.",
        "If this takes long by nature, let it: a rank that computes does not hang.",
        "If it does not, %mesh stacks {first} --twice shows where {name} is; interrupt the cell to get it back.",
    ),
    "missing-from-collective": FindingKind(
        65,
        "A rank has not come to a collective in which others wait.",
        "Look at that line: what it does there keeps all the others waiting.",
        "Interrupt the cell to go on.",
    ),
    "straggler": FindingKind(
        50,
        "A rank comes late to collectives, but it moves.",
        "Give {name} less to do, or look what slows it: %mesh stacks --twice shows where its time goes.",
    ),
    # ---- nothing is wrong
    "slow": FindingKind(
        20,
        "Nothing is wrong, it just takes its time.",
        "Wait.",
        "Interrupting the cell ends it.",
    ),
    "idle": FindingKind(10, "Nothing runs.", "Run a cell."),
}

# Kinds that say that nothing is wrong.
BENIGN_KINDS: Final = frozenset(("slow", "idle"))
# Kinds that need no second sample.
CERTAIN_KINDS: Final = frozenset(
    ("killed", "out-of-memory", "shape-mismatch", "stopped", "rank-silent", "waits-for-input")
)
