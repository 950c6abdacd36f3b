"""The zoo: real ways to hang or stall three ranks, each a cell of its own.

`# guilty` marks the line that a diagnosis must name. Cells leave nothing behind once they are interrupted, for all but
a few share one mesh.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from meshbook.ids import Ranks


@dataclass(frozen=True)
class Hang:
    """A cell that hangs, and what is to be said of it."""

    name: str
    kind: str
    ranks: Ranks  # who is to blame
    cell: str
    others: Ranks | None = None  # who waits because of it; None: all other ranks
    asks: bool = False  # the cell may ask for input
    steps: bool = False  # goes on and on, slowly: what is said may differ from look to look

    @property
    def source(self) -> str:
        return textwrap.dedent(self.cell).strip()

    @property
    def line(self) -> int:
        marked = [number for number, line in enumerate(self.source.splitlines(), 1) if "# guilty" in line]
        assert len(marked) == 1, f"{self.name}: one line is to be marked"
        return marked[0]

    @property
    def waiting(self) -> Ranks:
        return self.others if self.others is not None else tuple(rank for rank in range(3) if rank not in self.ranks)


HANGS = [
    # ---- collectives
    Hang(
        "a rank sleeps before a collective",
        "missing-from-collective",
        (2,),
        """
        import time
        x = torch.ones(4)
        if rank == 2:
            time.sleep(600)  # guilty
        dist.all_reduce(x)
        """,
    ),
    Hang(
        "a rank raised before a collective",
        "raised-before-collective",
        (1,),
        """
        def load(parts):
            return parts[rank]  # guilty

        load({0: "a", 2: "c"})
        dist.barrier()
        """,
    ),
    Hang(
        "a rank has fewer batches",
        "left-early",
        (2,),
        """
        batches = [torch.ones(4)] * (3 if rank == 2 else 4)
        for batch in batches:
            dist.all_reduce(batch)  # guilty
        """,
    ),
    Hang(
        "a rank leaves by sys.exit",
        "raised-before-collective",
        (0,),
        """
        import sys
        if rank == 0:
            sys.exit(3)  # guilty
        dist.all_reduce(torch.ones(1))
        """,
    ),
    Hang(
        "rank 0 alone calls a barrier",
        "alone-in-collective",
        (0,),
        """
        if rank == 0:
            print("saving")
            dist.barrier()  # guilty
        """,
        others=(),
    ),
    Hang(
        "a rank calls another collective",
        "different-collectives",
        (2,),
        """
        x = torch.ones(4)
        if rank == 2:
            dist.broadcast(x, src=0)  # guilty
        else:
            dist.all_reduce(x)
        """,
    ),
    Hang(
        "a rank brings another shape",
        "shape-mismatch",
        (2,),
        """
        x = torch.ones(5 if rank == 2 else 4)
        dist.all_reduce(x)  # guilty
        """,
        others=(),  # gloo lets the others go, with wrong numbers
    ),
    Hang(
        "two groups in a different order",
        "crossed-groups",
        (2,),
        """
        a, b = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
        x = torch.ones(4)
        if rank == 2:
            dist.all_reduce(x, group=b)  # guilty
            dist.all_reduce(x, group=a)
        else:
            dist.all_reduce(x, group=a)
            dist.all_reduce(x, group=b)
        """,
    ),
    Hang(
        "a group of a rank that is not its member",
        "missing-from-collective",
        (1,),
        """
        import time
        pair = dist.new_group([0, 1])
        if rank == 1:
            time.sleep(600)  # guilty
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
        dist.barrier()
        """,
    ),
    Hang(
        "a monitored barrier",
        "missing-from-collective",
        (1,),
        """
        import time
        if rank == 1:
            time.sleep(600)  # guilty
        dist.monitored_barrier()
        """,
    ),
    Hang(
        "the backward pass of DDP",
        "missing-from-collective",
        (1,),
        """
        import time
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(torch.nn.Linear(4, 4))

        def step(batch):
            loss = model(batch).sum()
            if rank == 1:
                time.sleep(600)  # guilty
            loss.backward()

        step(torch.ones(2, 4))
        """,
    ),
    Hang(
        "a DTensor that is gathered",
        "missing-from-collective",
        (1,),
        """
        import time
        from torch.distributed.tensor import Shard, distribute_tensor
        sharded = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        if rank == 1:
            time.sleep(600)  # guilty
        sharded.full_tensor()
        """,
    ),
    # ---- sends and receives
    Hang(
        "a send that nobody receives",
        "send-without-receive",
        (0,),
        """
        if rank == 0:
            dist.send(torch.ones(4), dst=1)  # guilty
        """,
        others=(),
    ),
    Hang(
        "a receive that nobody sends",
        "receive-without-send",
        (1,),
        """
        x = torch.zeros(4)
        if rank == 1:
            dist.recv(x, src=0)  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "two ranks both send first",
        "send-deadlock",
        (0, 1),
        """
        x = torch.ones(4)
        if rank < 2:
            dist.send(x, dst=1 - rank)  # guilty
            dist.recv(x, src=1 - rank)
        dist.barrier()
        """,
    ),
    Hang(
        "a ring in which all receive first",
        "receive-deadlock",
        (0, 1, 2),
        """
        x = torch.ones(4)
        dist.recv(x, src=(rank - 1) % 3)  # guilty
        dist.send(x, dst=(rank + 1) % 3)
        """,
    ),
    Hang(
        "a receive from the wrong rank",
        "wrong-peer",
        (1,),
        """
        x = torch.ones(4)
        if rank == 0:
            dist.send(x, dst=1)
        if rank == 1:
            dist.recv(x, src=2)  # guilty
        dist.barrier()
        """,
    ),
    # ---- a rank that is busy
    Hang(
        "a loop that never ends",
        "python-loop",
        (1,),
        """
        tries = 0
        while rank == 1: tries += 1  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a regular expression keeps the GIL",
        "gil-kept",
        (2,),
        """
        import re
        if rank == 2:
            re.match("(a+)+$", "a" * 64 + "b")  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a C function that sleeps with the GIL",
        "gil-kept",
        (0,),
        """
        import ctypes
        if rank == 0:
            ctypes.PyDLL(None).sleep(600)  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a straggler",
        "straggler",
        (2,),
        """
        import time
        x = torch.ones(4)
        for step in range(10_000):
            if rank == 2:
                time.sleep(0.3)  # guilty
            dist.all_reduce(x)
        """,
        steps=True,
    ),
    # ---- a rank that waits for something else
    Hang(
        "input() on one rank",
        "waits-for-input",
        (0,),
        """
        if rank == 0:
            answer = input("go on? ")  # guilty
        dist.barrier()
        """,
        asks=True,
    ),
    Hang(
        "a lock that is not released",
        "waits-for-lock",
        (0,),
        """
        import threading
        lock = threading.Lock()
        with lock:
            if rank == 0:
                lock.acquire()  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "two threads lock in a different order",
        "thread-deadlock",
        (1,),
        """
        import threading
        first, second, has = threading.Lock(), threading.Lock(), threading.Event()

        def other():
            with second:
                has.set()
                with first:
                    pass

        if rank == 1:
            with first:
                threading.Thread(target=other, daemon=True).start()
                has.wait()
                with second:  # guilty
                    pass
        dist.barrier()
        """,
    ),
    Hang(
        "an empty queue",
        "waits-for-queue",
        (1,),
        """
        import queue
        if rank == 1:
            queue.Queue().get()  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a thread that does not end",
        "waits-for-thread",
        (2,),
        """
        import threading
        ends = threading.Event()
        worker = threading.Thread(target=ends.wait, daemon=True)
        worker.start()
        try:
            if rank == 2:
                worker.join()  # guilty
            dist.barrier()
        finally:
            ends.set()
        """,
    ),
    Hang(
        "an event that nobody sets",
        "waits-for-event",
        (2,),
        """
        import threading
        if rank == 2:
            threading.Event().wait()  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a barrier of threads that too few come to",
        "waits-for-event",
        (1,),
        """
        import threading
        if rank == 1:
            threading.Barrier(2).wait()  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a DataLoader worker is stuck",
        "waits-for-worker",
        (1,),
        """
        import torch.multiprocessing
        from torch.utils.data import DataLoader, Dataset
        stop = torch.multiprocessing.Event()

        class Slow(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if rank == 1 and index >= 4:
                    stop.wait(60)
                return index

        try:
            for batch in DataLoader(Slow(), batch_size=2, num_workers=1, prefetch_factor=1):  # guilty
                dist.all_reduce(torch.ones(1))
        finally:
            stop.set()
        """,
    ),
    Hang(
        "a subprocess",
        "waits-for-subprocess",
        (0,),
        """
        import subprocess
        if rank == 0:
            subprocess.run(["sleep", "600"])  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a pipe that nobody writes to",
        "waits-for-pipe",
        (2,),
        """
        import os
        reading, writing = os.pipe()
        try:
            if rank == 2:
                os.read(reading, 1)  # guilty
            dist.barrier()
        finally:
            os.close(reading), os.close(writing)
        """,
    ),
    Hang(
        "a server that does not answer",
        "waits-for-socket",
        (1,),
        """
        import socket, urllib.request
        with socket.create_server(("127.0.0.1", 0)) as server:
            if rank == 1:
                urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/data")  # guilty
            dist.barrier()
        """,
    ),
    Hang(
        "a lock on a file",
        "waits-for-file",
        (1,),
        """
        import fcntl, os, tempfile
        with open(os.path.join(tempfile.gettempdir(), f"meshbook-zoo-{os.getppid()}"), "w") as file:
            if rank == 0:
                fcntl.flock(file, fcntl.LOCK_EX)
            dist.barrier()
            os.path.exists(file.name) and rank == 2 and os.unlink(file.name)
            if rank == 1:
                fcntl.flock(file, fcntl.LOCK_EX)  # guilty
            dist.barrier()
        """,
    ),
    Hang(
        "a FIFO that nobody opens for writing",
        "waits-for-file",
        (2,),
        """
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/fifo")
            if rank == 2:
                open(f"{folder}/fifo").read()  # guilty
            dist.barrier()
        """,
    ),
    Hang(
        "asyncio awaits what does not come",
        "waits-in-event-loop",
        (0,),
        """
        import asyncio
        if rank == 0:
            await asyncio.Event().wait()  # guilty
        dist.barrier()
        """,
    ),
    Hang(
        "a rank makes a group alone",
        "group-made-by-some",
        (0,),
        """
        if rank == 0:
            pair = dist.new_group([0, 1, 2])  # guilty
        dist.barrier()
        """,
    ),
]
