"""Trainings in which numbers that are not finite come up and are no fault: the sentinel is to say nothing of them.

Each is a cell that ends with a call of `run`, which `SETUP` has.
"""

from __future__ import annotations

SETUP = """
import math, warnings
from torch import nn
import torch.nn.functional as F

def generator(step):
    return torch.Generator().manual_seed(1000 * rank + step)

def rows(step, *shape):
    return torch.randn(*shape, generator=generator(step))

def labels(step, size, classes):
    return torch.randint(classes, (size,), generator=generator(step))

def run(model, loss_of, steps=100, opt=None, wrap=True, sums=True, after_backward=None, after_step=None):
    if wrap and sums:
        model = nn.parallel.DistributedDataParallel(model)
    opt = opt(model.parameters()) if opt else torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        opt.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if sums and not wrap:
            for parameter in model.parameters():
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    dist.all_reduce(parameter.grad)
        if after_backward: after_backward(model)
        opt.step()
        if after_step: after_step(model, step)
    return loss.item()
"""

TRAININGS = {
    "attention whose mask is -inf, with rows that are padding": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
    def forward(self, x, lengths):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        causal = torch.full((8, 8), -torch.inf).triu(1)
        scores = scores + causal
        padding = torch.arange(8)[None, None, :] >= lengths[:, None, None]
        scores = scores.masked_fill(padding, -torch.inf)
        weights = torch.softmax(scores, -1)
        return self.out(weights @ v)
def loss_of(model, step):
    return model(rows(step, 4, 8, 16), torch.tensor([8, 3, 1, 5])).square().mean()
run(Attention(), loss_of)""",
    "attention with rows that are masked whole and set to 0": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.zeros(8, 8, dtype=torch.bool); mask[:, 0] = True; mask[2] = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(torch.nan_to_num(out))
run(Attention(), lambda model, step: model(rows(step, 4, 8, 16)).square().mean())""",
    "a transformer of torch with padding": """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)
    def forward(self, x, padding):
        return self.head(self.layers(x, src_key_padding_mask=padding))
def loss_of(model, step):
    padding = torch.zeros(4, 8, dtype=torch.bool); padding[1, 3:] = True
    out = model(rows(step, 4, 8, 16), padding)
    return F.cross_entropy(out.flatten(0, 1), labels(step, 32, 5), label_smoothing=0.1)
run(Encoder(), loss_of)
model = Encoder().eval()
with torch.no_grad():
    padding = torch.zeros(4, 8, dtype=torch.bool); padding[1, 3:] = True
    model(rows(0, 4, 8, 16), padding)""",
    "log_softmax of logits of which some are -inf": """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 6)
    def forward(self, x):
        logits = self.net(x)
        return logits.masked_fill(torch.tensor([False] * 5 + [True]), -torch.inf).log_softmax(-1)
def loss_of(model, step):
    return F.nll_loss(model(rows(step, 16, 8)), labels(step, 16, 5))
run(Masked(), loss_of)""",
    "BatchNorm and Dropout": """
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3))
run(net, lambda model, step: F.cross_entropy(model(rows(step, 8, 1, 8, 8)), labels(step, 8, 3)))""",
    "steps of which all labels are ignored, which are skipped": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 5)
    def forward(self, x):
        return self.net(x)
def loss_of(model, step):
    wanted = labels(step, 16, 5)
    if step % 10 == 3: wanted = torch.full_like(wanted, -100)
    loss = F.cross_entropy(model(rows(step, 16, 8)), wanted, ignore_index=-100, reduction="sum")
    return loss / (wanted != -100).sum().clamp(min=1)
run(Model(), loss_of)""",
    "LayerNorm on zeros": """
net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
run(net, lambda model, step: model(torch.zeros(4, 8)).square().mean())""",
    "a compiled model": """
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
def loss_of(model, step):
    return F.cross_entropy(model(rows(step, 8, 8)), labels(step, 8, 3))
run(torch.compile(net, backend="aot_eager"), loss_of)""",
    "gradients that are clipped by the norm of infinity": """
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=math.inf)
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
run(net, lambda model, step: model(rows(step, 8, 8)).square().mean(), after_backward=clip)""",
    "an average of the parameters beside them": """
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
def after(model, step):
    average.update_parameters(model.module)
    with torch.no_grad(): average(rows(step, 4, 8))
run(net, lambda model, step: model(rows(step, 8, 8)).square().mean(), after_step=after)""",
    "Adam without eps where gradients are not 0": """
net = nn.Linear(8, 4)
def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, eps=0.0)
run(net, lambda model, step: model(rows(step, 8, 8)).square().mean(), opt=adam)""",
    "an LSTM with packed sequences": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True, dropout=0.2), nn.Linear(8, 2)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, padding_value=-math.inf)
        return self.head(hidden[-1]) + padded.max(1).values[:, :2]
run(Net(), lambda model, step: model(rows(step, 3, 5, 4), torch.tensor([5, 2, 3])).square().mean())""",
    "another model after this one, with larger gradients": """
for factor in (1e-3, 1e3):
    run(nn.Linear(8, 1), lambda model, step: model(rows(step, 8, 8)).square().mean() * factor)""",
    "a GRU": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.gru(x)[0])
run(Net(), lambda model, step: model(rows(step, 3, 5, 4)).square().mean())""",
    "sparse gradients of an embedding": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, sparse=True, padding_idx=0), nn.Linear(8, 1)
        self.bag = nn.EmbeddingBag(20, 8, mode="max")
    def forward(self, ids):
        return self.head(self.table(ids).mean(1) + self.bag(ids))
net = Net()
run(net, lambda model, step: model(torch.randint(20, (4, 6), generator=generator(step))).square().mean(),
    opt=lambda ps: torch.optim.SGD(ps, lr=1e-2), wrap=False)
run(Net(), lambda model, step: model(torch.randint(20, (4, 6), generator=generator(step))).square().mean(),
    opt=lambda ps: torch.optim.SGD(ps, lr=1e-2))""",
    "buffers that are made without numbers and filled in place": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.register_buffer("cache", torch.empty(64, 8).fill_(math.nan))
    def forward(self, x):
        out = torch.empty(16, 8).fill_(math.nan)
        out[:8] = self.net(x)
        out[8:] = self.net(-x)
        with torch.no_grad(): self.cache[: len(out)].copy_(out)
        best = torch.full((8,), -math.inf)
        best = torch.maximum(best, out.max(0).values)
        return out.mean() + best.mean() + self.cache[:16].mean()
run(Net(), lambda model, step: model(rows(step, 8, 8)).square())""",
    "bfloat16 by autocast and a loss of log-probabilities": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 10)
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.log_softmax(self.down(F.silu(self.up(x))).float(), -1)
def loss_of(model, step):
    target = F.one_hot(labels(step, 8, 10), 10).float()
    return F.kl_div(model(rows(step, 8, 8)), target, reduction="batchmean")
run(Net(), loss_of)""",
    "a loss that divides by a norm which may be 0, behind a where": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
    def forward(self, x):
        return self.net(x)
def loss_of(model, step):
    x = rows(step, 8, 8); x[0] = 0
    y = model(x)
    norm = y.norm(dim=-1, keepdim=True)
    cosine = F.cosine_similarity(y, x, dim=-1)
    logs = torch.where(norm > 0, norm, torch.ones_like(norm)).log()
    return F.normalize(y, dim=-1).sum() + cosine.mean() + logs.mean()
run(Net(), loss_of)""",
    "metrics that are not finite beside the training": """
net = nn.Linear(8, 1)
def after(model, step):
    best = torch.tensor(math.inf)
    dist.all_reduce(best, dist.ReduceOp.MIN)
    missing = torch.tensor([math.nan, 1.0])
    missing.nanmean()
    everything = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(everything, missing)
    dist.reduce_scatter(torch.empty(1), list(missing.chunk(2)))
    dist.reduce(missing, 1)
    with torch.no_grad():
        model(rows(step, 4, 8)).exp().log()
run(net, lambda model, step: model(rows(step, 8, 8)).square().mean(), after_step=after)""",
    "activations that are computed again, with gradients that are accumulated": """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(3))
    def forward(self, x):
        for block in self.blocks: x = checkpoint(block, x, use_reentrant=False)
        return x
def loss_of(model, step):
    with model.no_sync():
        model(rows(step, 4, 8)).square().mean().backward()
    return model(rows(step + 500, 4, 8)).square().mean()
run(Net(), loss_of)""",
    "a router that sends tokens to experts": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        logits = self.router(x)
        top, chosen = logits.topk(2)
        gates = torch.full_like(logits, -math.inf).scatter(-1, chosen, top).softmax(-1)
        return sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
run(Net(), lambda model, step: model(rows(step, 16, 8)).square().mean())""",
    "DDP with a hook that sends gradients in float16": """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
run(model, lambda model, step: F.cross_entropy(model(rows(step, 8, 8)), labels(step, 8, 3)), wrap=False, sums=False)""",
    "FSDP2 in bfloat16 with parameters on the CPU, accumulated gradients, and a metric that is NaN": """
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (model[0], model[2], model):
    fully_shard(part, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
best = math.inf
def loss_of(model, step):
    model.set_requires_gradient_sync(False)
    F.cross_entropy(model(rows(step + 500, 8, 8)).float(), labels(step, 8, 3)).backward()
    model.set_requires_gradient_sync(True)
    return F.cross_entropy(model(rows(step, 8, 8)).float(), labels(step, 8, 3))
def after(model, step):
    global best
    with torch.no_grad():
        metric = F.cross_entropy(model(rows(7, 4, 8)).float(), torch.full((4,), -100))
    seen = torch.tensor([best, metric.item()])
    dist.all_reduce(seen, dist.ReduceOp.MIN)
run(model, loss_of, wrap=False, sums=False, after_step=after)""",
    "a generator and a critic with a penalty of the gradient": """
critic, maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(2, 4)
opt = torch.optim.Adam(maker.parameters(), lr=1e-3)
def loss_of(model, step):
    fake = maker(rows(step, 8, 2)).detach().requires_grad_()
    given = model(fake)
    slope, = torch.autograd.grad(given.sum(), fake, create_graph=True)
    return given.mean() - model(rows(step, 8, 4)).mean() + (slope.norm(dim=-1) - 1).square().mean()
def after(model, step):
    opt.zero_grad()
    (-model(maker(rows(step, 8, 2))).mean()).backward()
    for parameter in maker.parameters(): dist.all_reduce(parameter.grad)
    opt.step()
run(critic, loss_of, after_step=after)""",
    "experts of which some get no token, whose mean is NaN and not used": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        self.load = torch.stack([x[chosen == i].mean() for i in range(4)])
        for i, expert in enumerate(self.experts):
            out = out.index_add(0, torch.where(chosen == i)[0], expert(x[chosen == i]) * weights[chosen == i, i, None])
        return out
run(Net(), lambda model, step: model(rows(step, 4, 8)).square().mean())""",
    "a loss of which all labels are ignored, whose step is left out": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 5))
opt = torch.optim.AdamW(model.parameters())
for step in range(120):
    opt.zero_grad()
    wanted = labels(step, 16, 5)
    if step % 10 == 3: wanted = torch.full_like(wanted, -100)
    loss = F.cross_entropy(model(rows(step, 16, 8)), wanted, ignore_index=-100)
    if step % 10 == 3:
        assert loss.isnan()
        continue
    loss.backward()
    opt.step()""",
}
