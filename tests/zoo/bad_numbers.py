"""Planted faults: numbers that are wrong on rank 1 of two, each with what `%mesh nan` or `%mesh same` says first."""

from __future__ import annotations

from dataclasses import dataclass

SETUP = """
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop, self.fault = nn.Dropout(0.1), None
    def forward(self, x):
        h = self.up(self.norm(x))
        if self.fault is not None:
            h = self.fault(self, h)
        return x + self.drop(self.down(F.gelu(h)))

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 4)
        self.recomputes = False
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)

def make(kind, seed=0):
    torch.manual_seed(seed)
    model = Net()
    model.recomputes = kind == "recomputed"
    if kind == "compiled":
        model = torch.compile(model, backend="aot_eager")
    if kind == "compiled blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if kind == "compiled in place":
        model.compile(backend="aot_eager")
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return model, opt

def blocks_of(model):
    return [part for part in model.modules() if isinstance(part, Block)]

def batch(step, of_rank=rank):
    numbers = torch.Generator().manual_seed(10_000 * of_rank + step)
    return torch.randn(8, 4, generator=numbers)

def mean_square(model, x):
    return (model(x) - x).square().mean()

def train(kind, steps=5, before=None, loss_of=mean_square, batch=batch, after_backward=None):
    model, opt = make(kind)
    for step in range(steps):
        x = batch(step)
        if before is not None and step == 2 and rank == 1:
            before(model)
        opt.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        if kind == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if after_backward is not None:
            after_backward(model, step)
        opt.step()
    return model, opt

def step_of(x):
    made = ((r, step) for r in (0, 1) for step in range(20))
    return next(one for one in made if torch.equal(x, batch(one[1], one[0])))

def plant(fault, at=1):
    def before(model):
        blocks_of(model)[at].fault = fault
    return before
"""


@dataclass(frozen=True)
class Planted:
    """One fault.

    Attributes:
        run: the cell that has it.
        asked: names for `mesh.same`; (): the sentinel is to tell it.
        said: what must be in the first finding's text, in this order.
    """

    name: str
    run: str
    said: tuple[str, ...]
    asked: tuple[str, ...] = ()


def _forward(name: str, kind: str, fault: str, *said: str) -> Planted:
    return Planted(name, f"model, opt = train({kind!r}, before=plant({fault}))", ("step 2, rank 1", *said))


PLANTED = (
    _forward(
        "log of 0", "ddp", "lambda self, h: torch.log(F.relu(h))", "model.blocks.1 log (forward), cell", "all_reduce"
    ),
    _forward(
        "softmax of a row that is masked whole",
        "ddp",
        "lambda self, h: F.softmax(h.masked_fill(torch.ones_like(h, dtype=torch.bool), -torch.inf), -1)",
        "model.blocks.1 softmax (forward)",
    ),
    _forward("exp overflows", "ddp", "lambda self, h: torch.exp(h * 1e4)", "model.blocks.1 exp (forward)", "input max"),
    _forward(
        "float16 overflows",
        "ddp",
        "lambda self, h: (h.half() * 6e4 * 10).float()",
        "model.blocks.1 mul (forward)",
        "in float16",
    ),
    _forward(
        "bfloat16 overflows",
        "ddp",
        "lambda self, h: (h.bfloat16() * 3e38 * 10).float()",
        "model.blocks.1 mul (forward)",
        "in bfloat16; reached ranks 0-1 by all_reduce",
    ),
    _forward(
        "division by a standard deviation of 0",
        "ddp",
        "lambda self, h: (h * 0) / (h * 0).std()",
        "model.blocks.1 div (forward)",
    ),
    _forward(
        "a weight that a flipped bit made infinite",
        "ddp",
        "lambda self, h: (self.down.weight.data[0].fill_(torch.inf), h)[1]",
        "model.blocks.1.down.weight (parameter)",
    ),
    _forward(
        "gradient of sqrt at 0",
        "ddp",
        "lambda self, h: torch.sqrt(h * 0)",
        "model.blocks.1 sqrt (backward), cell",
        "reached ranks 0-1 by all_reduce",
    ),
    _forward(
        "gradient of a root by pow at 0", "ddp", "lambda self, h: (h * 0).pow(0.5)", "model.blocks.1 pow (backward)"
    ),
    _forward(
        "gradient of log behind a where",
        "ddp",
        "lambda self, h: torch.where(h > -1e9, h, torch.log(h * 0))",
        "model.blocks.1 log",
    ),
    _forward("log of 0 in FSDP2", "fsdp", "lambda self, h: torch.log(F.relu(h))", "model.blocks.1 log (forward)"),
    _forward(
        "overflow in a leaf in FSDP2",
        "fsdp",
        # A sum that grows with each term: it overflows in whatever order they are added.
        "lambda self, h: h * 0 + 3e38 * (self.down.weight[0] > 0)",
        "model.blocks.1",
        "(forward)",
    ),
    _forward(
        "gradient of sqrt at 0 in FSDP2", "fsdp", "lambda self, h: torch.sqrt(h * 0)", "model.blocks.1", "(backward)"
    ),
    _forward(
        "a gradient in FSDP2 of which another rank has the bad part",
        "fsdp",
        "lambda self, h: h + torch.sqrt(self.norm.bias[:1] * 0)",  # rank 0 has the bias's first half
        "model.blocks.1.norm.bias (gradient)",
        "reached ranks 0-1 by reduce_scatter_tensor",
    ),
    Planted(
        "a gradient that is summed by hand, part by part, of which another rank has the bad part",
        """
model, _ = make("none")
size = sum(parameter.numel() for parameter in model.parameters())
part = torch.nn.Parameter(torch.zeros(size // 2 + size % 2))
opt = torch.optim.SGD([part], lr=1e-3)
for step in range(5):
    if step == 2 and rank == 1:
        blocks_of(model)[0].fault = lambda self, h: h + torch.sqrt(self.norm.bias[:1] * 0)
    mean_square(model, batch(step)).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()] + [torch.zeros(size % 2)])
    part.grad = torch.empty_like(part)
    dist.reduce_scatter(part.grad, list(flat.chunk(2)))
    opt.step()
    model.zero_grad()""",
        ("step 2, rank 1, model.blocks.0 sqrt (backward), cell", "reached ranks 0-1 by reduce_scatter #"),
    ),
    _forward(
        "a weight's part that is infinite under tensor parallelism",
        "tp",
        "lambda self, h: (self.down.weight.to_local().data.fill_(torch.inf), h)[1]",
        "model.blocks.1.down.weight (parameter)",
    ),
    _forward(
        "log of 0 with gradients that are summed by hand",
        "plain",
        "lambda self, h: torch.log(F.relu(h))",
        "model.blocks.1 log (forward)",
        "reached ranks 0-1 by all_reduce",
    ),
    _forward(
        "gradient of sqrt at 0 in a block whose activations are computed again",
        "recomputed",
        "lambda self, h: torch.sqrt(h * 0)",
        "model.blocks.1 sqrt (backward)",
    ),
    _forward(
        "log of 0 in a compiled model",
        "compiled",
        "lambda self, h: torch.log(F.relu(h))",
        "model.blocks.1 log (forward), cell",
    ),
    _forward(
        "gradient of sqrt at 0 in a block that is compiled in place",
        "compiled blocks",
        "lambda self, h: torch.sqrt(h * 0)",
        "model.blocks.1 sqrt (backward), cell",
    ),
    _forward(
        "log of 0 in a model that is compiled in place",
        "compiled in place",
        "lambda self, h: torch.log(F.relu(h))",
        "the loss, cell",
    ),
    Planted(
        "bad data in one shard",
        "model, opt = train('ddp', batch=lambda step: batch(step) * (torch.nan if step == 2 and rank == 1 else 1))",
        ("step 2, rank 1, the input of model", "reached ranks 0-1 by all_reduce"),
    ),
    Planted(
        "one of two models that one backward trains, with an optimizer for each",
        """
models = [make("none")[0] for _ in range(2)]
opts = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
for step in range(5):
    if step == 2 and rank == 1:
        plant(lambda self, h: h + torch.sqrt(h * 0))(models[1])
    for opt in opts:
        opt.zero_grad()
    (mean_square(models[0], batch(step)) + mean_square(models[1], batch(step))).backward()
    for model in models:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    for opt in opts:
        opt.step()""",
        ("step 2, rank 1, ", "blocks.1 sqrt (backward), cell", "reached ranks 0-1 by all_reduce"),
    ),
    Planted(
        "a second model that is trained after the first in each step",
        """
model, opt = make("ddp")
other, other_opt = make("ddp")
for step in range(5):
    for each, its_opt in ((model, opt), (other, other_opt)):
        if step == 2 and rank == 1 and each is other:
            plant(lambda self, h: h + torch.sqrt(h * 0))(other)
        its_opt.zero_grad()
        mean_square(each, batch(step)).backward()
        its_opt.step()""",
        ("step 2, rank 1, ", "blocks.1 sqrt (backward), cell", "reached ranks 0-1 by all_reduce"),
    ),
    Planted(
        "log of 0 in the loss",
        "model, opt = train('ddp', loss_of=lambda model, x: "
        "-torch.log(model(x).square() * (0 if step_of(x) == (1, 2) else 1)).mean())",
        ("step 2, rank 1, the loss, log",),
    ),
    Planted(
        "a batch a million times too large, from now on",
        "model, opt = train('ddp', steps=20, batch=lambda step: batch(step) * (1e3 if step > 11 and rank == 1 else 1))",
        ("gradient explodes: step 14, rank 1, model.",),
    ),
    Planted(
        "a flipped bit",
        "model, opt = train('ddp')\nif rank == 1: blocks_of(model)[2].down.bias.data.view(torch.int32)[3] ^= 1 << 12",
        ("model.blocks.2.down.bias on rank 1: 1 of 16 differ",),
        ("model", "opt"),
    ),
    Planted(
        "an all_reduce whose result is not taken",
        """
model, opt = make("none")
mean_square(model, batch(0)).backward()
for name, parameter in model.named_parameters():
    summed = parameter.grad.clone()
    dist.all_reduce(summed)
    if rank != 1 or name != "head.weight":
        parameter.grad = summed
opt.step()""",
        ("model.head.weight on rank 1:",),
        ("model",),
    ),
    Planted(
        "another seed", "model, opt = make('none', seed=rank)", ("model.embed.weight on rank 1: 64 of 64",), ("model",)
    ),
    Planted(
        "a stale buffer",
        """
model, opt = make("none")
model.register_buffer("average", torch.zeros(4))
for step in range(3):
    if rank != 1 or step < 2:
        model.average += step""",
        ("model.average on rank 1: 4 of 4 differ, max 2",),
        ("model",),
    ),
    Planted(
        "another learning rate",
        "model, opt = train('ddp')\nif rank == 1: opt.param_groups[0]['lr'] = 1e-2",
        ("opt.param_groups.0.lr on rank 1: 0.01 instead of 0.001",),
        ("model", "opt"),
    ),
    Planted(
        "a moment of the optimizer that was not restored",
        "model, opt = train('ddp')\nif rank == 1: opt.state[model.module.head.bias]['exp_avg'].zero_()",
        ("opt.state.head.bias.exp_avg on rank 1: 4 of 4 differ",),
        ("model", "opt"),
    ),
    Planted(
        "a replica of a DTensor that has drifted",
        """
from torch.distributed.tensor import DTensor, Replicate
model = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
if rank == 1: model.to_local()[2] = 1.5""",
        ("model on rank 1: 1 of 4 differ, max 0.5",),
        ("model",),
    ),
    Planted(
        "a bias that one rank adds twice under tensor parallelism",
        """
model, opt = make("tp")
with torch.no_grad():
    for block in blocks_of(model):
        block.down.bias.to_local().fill_(0.5)
        block.drop.p = 0.0
add = lambda module, inputs, output: output + module.bias.to_local() if rank == 1 else output
blocks_of(model)[1].down.register_forward_hook(add)
mean_square(model, batch(0, 0)).backward()
opt.step()""",
        ("model.", "on rank 1:"),  # the rank; every part that learns from the sum differs by then
        ("model",),
    ),
    Planted(
        "a parameter in another dtype",
        "model, opt = make('none')\nif rank == 1: model.head.to(torch.bfloat16)",
        ("model.head.weight on rank 1: bfloat16 instead of float32",),
        ("model",),
    ),
)
