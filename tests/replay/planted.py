"""Failures that are planted in cells on four ranks: each must be the same in one process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """One planted failure.

    Attributes:
        name: what it is.
        cell: that fails; the last line of it that has `# here` is the line.
        before: cells that run before it, and are not recorded.
    """

    name: str
    cell: str
    before: tuple[str, ...] = ()


MODEL = """
from torch.nn.parallel import DistributedDataParallel as DDP
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x):
        self.seen += 1
        return self.layers(x)
torch.manual_seed(0)
"""

TRAIN = """
def train(model, opt, steps, seed):
    torch.manual_seed(seed + rank)
    for step in range(steps):
        opt.zero_grad()
        loss = (model(torch.randn(4, 8)) ** 2).mean()
        loss.backward()
        opt.step()
    return loss.item()
"""

PLANTED = [
    Planted(
        "data: one shard has a string",
        """
total = 0.0
for number, row in enumerate(rows):
    total += row["price"] * 2.5  # here
    t = torch.tensor(total)
    dist.all_reduce(t)
""",
        ('rows = [{"price": i * 1.5} for i in range(8)]\nif rank == 2: rows[5]["price"] = "n/a"',),
    ),
    Planted(
        "rank: the last one has no neighbour",
        """
neighbours = list(range(world_size))[rank + 1:]
seen = torch.tensor(float(rank)); dist.all_reduce(seen)
first = neighbours[0]  # here
""",
    ),
    Planted(
        "a value that came from another rank",
        """
objects = [None] * world_size
dist.all_gather_object(objects, {"rank": rank, "draw": float(torch.rand(()))})
limit = max(one["draw"] for one in objects)
assert rank != 1 or limit < 0, f"the largest draw is {limit:.9f}"  # here
""",
        ("torch.manual_seed(torch.seed() % 2**31 + rank)",),
    ),
    Planted(
        "NaN check after an all_reduce of bf16 overflow",
        """
def check(t, what):
    if not torch.isfinite(t).all():
        raise FloatingPointError(f"{what}: {int((~torch.isfinite(t)).sum())} of {t.numel()} are not finite")  # here
g = torch.full((64,), 2e38, dtype=torch.bfloat16) * (rank == 3) + torch.rand(64, dtype=torch.bfloat16)
dist.all_reduce(g)
dist.all_reduce(g)
check(g, "gradient")
""",
    ),
    Planted(
        "shape: a batch that is shorter on one rank",
        """
batch = torch.randn(4 - (rank == 0), 8)
out = batch @ weight
dist.all_reduce(torch.zeros(1))
out + bias  # here
""",
        ("weight, bias = torch.randn(8, 3), torch.randn(4, 3)",),
    ),
    Planted(
        "out of memory in Python",
        """
sizes = torch.tensor([rank]); dist.all_reduce(sizes)
block = bytearray(int(sizes) << (58 if rank == 1 else 3))  # here
""",
    ),
    Planted(
        "DDP: a model of an earlier cell, after its buckets were rebuilt",
        """
loss = train(ddp, opt, 3, 17)
if rank == 2:
    raise RuntimeError(f"loss {loss!r} of seen {int(ddp.module.seen)}")  # here
""",
        (MODEL, TRAIN, "ddp = DDP(Net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01); train(ddp, opt, 3, 5)"),
    ),
    Planted(
        "DDP: made in the cell, with a comm hook and no_sync",
        """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model = DDP(Net()); model.register_comm_hook(None, fp16_compress_hook)
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with model.no_sync():
    model(torch.randn(4, 8)).sum().backward()
loss = train(model, sgd, 3, 3)
assert rank != 3, f"{loss!r}"  # here
""",
        (MODEL, TRAIN),
    ),
    Planted(
        "FSDP2: a model of an earlier cell",
        """
loss = train(sharded, optimizer, 2, 11)
norm = sum(p.to_local().square().sum() for p in sharded.parameters())
dist.all_reduce(norm)
if rank == 1:
    raise ValueError(f"loss {loss!r} norm {norm.item()!r}")  # here
""",
        (
            MODEL,
            TRAIN,
            """
from torch.distributed.fsdp import fully_shard
sharded = Net()
for layer in sharded.layers:
    if isinstance(layer, torch.nn.Linear): fully_shard(layer)
fully_shard(sharded)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
train(sharded, optimizer, 2, 1)
""",
        ),
    ),
    Planted(
        "FSDP2: made in the cell",
        """
from torch.distributed.fsdp import fully_shard
fresh = fully_shard(Net(), reshard_after_forward=False)
loss = train(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), 2, 2)
{}[f"{loss!r}"] if rank == 0 else None  # here
""",
        (MODEL, TRAIN),
    ),
    Planted(
        "new_group: of an earlier cell, and one of this cell",
        """
odd = [dist.new_group([1, 3]), dist.new_group([0, 2])][0]
t = torch.arange(4.0) * rank
dist.all_reduce(t, group=pairs[rank // 2])
if rank % 2: dist.all_reduce(t, group=odd)
u = torch.zeros(8); dist.all_gather_into_tensor(u, t, group=pairs[rank // 2])
assert rank != 3, u.tolist()  # here
""",
        ("pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]",),
    ),
    Planted(
        "send and recv around a ring",
        """
token = torch.tensor([float(rank)])
for hop in range(5):
    incoming = torch.zeros(1)
    if rank % 2 == 0:
        dist.send(token, (rank + 1) % world_size); dist.recv(incoming, (rank - 1) % world_size)
    else:
        dist.recv(incoming, (rank - 1) % world_size); dist.send(token, (rank + 1) % world_size)
    token = incoming + rank * 0.125
1 / (token.item() - token.item()) if rank == 2 else None  # here
""",
    ),
    Planted(
        "batch_isend_irecv, and a receive from any rank",
        """
out, into = torch.tensor([rank, 7]), torch.zeros(2, dtype=torch.int64)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, out, (rank + 1) % world_size), dist.P2POp(dist.irecv, into, (rank - 1) % world_size),
]): work.wait()
senders = []
if rank == 0:
    for _ in range(3):
        senders.append((dist.recv(out), out.tolist()))
    raise LookupError(f"{into.tolist()} {senders}")  # here
dist.send(into, 0)
""",
    ),
    Planted(
        "asynchronous collectives, waited for later",
        """
ts = [torch.randn(16) + rank for _ in range(6)]
works = [dist.all_reduce(t, async_op=True) for t in ts]
b = torch.randn(3); works.append(dist.broadcast(b, 2, async_op=True))
for work in reversed(works): work.wait()
if rank == 1: raise ArithmeticError(repr([t.sum().item() for t in ts] + b.tolist()))  # here
""",
    ),
    Planted(
        "functional collectives and DTensor",
        """
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
import torch.distributed._functional_collectives as funcol
y = (table.redistribute(mesh, [Replicate()]).to_local() @ table.full_tensor().T)
z = funcol.all_reduce(torch.rand(2) * rank, "sum", mesh)
if rank == 3: raise ValueError(f"{y.sum().item()!r} {z.tolist()}")  # here
""",
        (
            "from torch.distributed.tensor import Shard, distribute_tensor\n"
            "torch.manual_seed(4); table = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])",
        ),
    ),
    Planted(
        "a function that torch.compile was asked for and that falls back",
        """
@torch.compile(backend="eager", disable=True)
def step(x):
    return (x * scale_by).relu().sum()
v = step(torch.randn(32)); dist.all_reduce(v)
[][int(v * 0)] if rank == 0 else None  # here
""",
        ("scale_by = torch.rand(32) + rank",),
    ),
    Planted(
        "DataLoader with workers, shuffled",
        """
loader = torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1)
for number, batch in enumerate(loader):
    s = batch.sum(); dist.all_reduce(s)
    if rank == 2 and number == 3: raise ValueError(f"{batch.flatten().tolist()} {s.item()}")  # here
""",
        (
            """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, i): return torch.tensor([float(i * (rank + 1))])
""",
        ),
    ),
    Planted(
        "random augmentation by three generators",
        """
import random, numpy as np
crop = random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, (1,)))
own = torch.rand(2, generator=generator).tolist()
dist.barrier()
assert rank != 0, (crop, own)  # here
""",
        (
            "import random, numpy\n"
            "random.seed(); numpy.random.seed(); torch.seed()\n"
            "generator = torch.Generator(); generator.seed(); torch.rand(5, generator=generator)",
        ),
    ),
    Planted(
        "a state that the cell changes before it fails",
        """
state["log"].append(rank); weights.mul_(2); counts += 1
dist.all_reduce(weights)
if rank == 1: raise RuntimeError(f"{state['log']} {weights.tolist()} {counts} {weights.grad.tolist()}")  # here
""",
        (
            'state = {"log": []}; weights = torch.ones(3) * (rank + 1); counts = 0\n'
            "weights.requires_grad_(); (weights ** 2).sum().backward(); weights.requires_grad_(False)",
        ),
    ),
    Planted(
        "an exception of a class of the notebook, in a function of a function",
        """
with Timer() as timer:
    result = [pipeline(number) for number in range(6)]
""",
        (
            """
class BadRow(Exception):
    def __init__(self, row): super().__init__(f"row {row} of rank {rank}")
class Timer:
    def __enter__(self): return self
    def __exit__(self, *of): dist.barrier()
def parse(row):
    if row == 4 and rank == 3: raise BadRow(row)  # here
    return row
def pipeline(row, *, times=2): return parse(row) * times
""",
        ),
    ),
    Planted(
        "a collective that is left by another rank, and its reason",
        """
t = torch.ones(2)
if rank == 0:
    raise KeyError("vocab.json")  # here
try:
    dist.all_reduce(t)
except Exception as error:
    raise LookupError(f"{type(error).__name__}: {error}") from error
""",
    ),
    Planted(
        "arguments: a script that was given none",
        """
import argparse, sys
parser = argparse.ArgumentParser(exit_on_error=False)
parser.add_argument("--lr", type=float, default=0.1)
if sys.argv != ["script.py"]: raise ValueError(sys.argv, parser.parse_args().lr)  # here
""",
    ),
]
