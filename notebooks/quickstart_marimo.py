import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")

with app.setup:
    import marimo as mo
    import matplotlib.pyplot as plt

    import meshbook
    from meshbook.errors import CellError, CellInterrupted


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # A model trained on four processes, from one marimo notebook

    marimo has no magics, so here you say what runs on the *ranks*, the four processes of a mesh, and everything else
    runs in the notebook. `@mesh.cell` runs a function's body on every rank as if it were a cell there: the names it
    binds stay on the ranks. `@mesh.remote` makes a function that runs on every rank when it is called. `mesh.run` takes
    source. What the ranks answer comes back folded: said once where they agree.

    A small GPT learns to write Python, trained data-parallel on the sources of Python's own standard library; then it
    is checked against one process, a mistake is made on one rank, and a loop is stopped and resumed.
    """)
    return


@app.cell
def _():
    # Run this cell again and it finds the mesh that is running; it does not start a second one.
    mesh = meshbook.create_mesh(4)
    mesh
    return (mesh,)


@app.cell
def _(mesh):
    mesh.run("rank * 10").values
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Something to read

    The tokens are the bytes of the standard library: nothing to download, no tokenizer to train. `mesh["data"]` is a
    handle: it stands for what is called `data` on the ranks. Naming the handle `data` here too is more than a courtesy.
    marimo sees which cells use it, the bodies of `@mesh.cell` included, and runs them after this one.
    """)
    return


@app.cell
def _(mesh):
    @mesh.cell
    def read():
        import sysconfig
        from pathlib import Path

        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        print(f"{len(files)} files, {len(data):,} bytes")

    data = mesh["data"]
    data
    return (data,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The model

    A GPT, as small as one can be and still be one. In the names of shapes, B is the batch, T the time, C the channels.
    """)
    return


@app.cell
def _(mesh):
    @mesh.cell
    def define():
        from torch import nn
        from torch.nn import functional as F

        VOCAB, T, C, HEADS, LAYERS = 256, 64, 64, 4, 2

        class Attention(nn.Module):
            """Every position asks, and is answered by the positions before it."""

            def __init__(self):
                super().__init__()
                self.qkv = nn.Linear(C, 3 * C, bias=False)
                self.out = nn.Linear(C, C, bias=False)

            def forward(self, x_BTC):
                B, T, C = x_BTC.shape
                parts = self.qkv(x_BTC).split(C, dim=2)
                q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in parts)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return self.out(y.transpose(1, 2).reshape(B, T, C))

        class Block(nn.Module):
            """Look around, then think: each adds what it found to the stream."""

            def __init__(self):
                super().__init__()
                self.attention_norm, self.attention = nn.LayerNorm(C), Attention()
                self.mlp_norm = nn.LayerNorm(C)
                self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

            def forward(self, x_BTC):
                x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
                return x_BTC + self.mlp(self.mlp_norm(x_BTC))

        class GPT(nn.Module):
            def __init__(self):
                super().__init__()
                self.token, self.position = nn.Embedding(VOCAB, C), nn.Embedding(T, C)
                self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
                self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, VOCAB, bias=False)

            def forward(self, tokens_BT):
                positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
                x_BTC = self.token(tokens_BT) + self.position(positions_T)
                return self.head(self.norm(self.blocks(x_BTC)))  # logits, (B, T, VOCAB)

            @torch.no_grad()
            def write(self, tokens, count, seed):
                """`tokens` and `count` more, each drawn from what the model expects next."""
                generator = torch.Generator().manual_seed(seed)
                for _ in range(count):
                    logits = self(torch.tensor([tokens[-T:]], device=device))[0, -1]
                    tokens = [*tokens, torch.multinomial(logits.softmax(0).cpu(), 1, generator=generator).item()]
                return tokens

    GPT = mesh["GPT"]
    return (GPT,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Training, data-parallel

    The batch of step *n* is drawn with seed *n*, the same on every rank, and each rank takes its quarter of it.
    PyTorch's `DistributedDataParallel` averages the gradients, exactly as in a script started with `torchrun`.
    """)
    return


@app.cell
def _(GPT, data, mesh):
    @mesh.cell
    def prepare():
        from torch.nn.parallel import DistributedDataParallel

        BATCH = 32  # of all ranks together

        def batch_of(step):
            """Inputs and targets of a step, (BATCH, T) each: windows of the text, and the same one byte on."""
            at = torch.randint(len(data) - T, (BATCH, 1), generator=torch.Generator().manual_seed(step))
            windows = data[at + torch.arange(T + 1)].long().to(device)
            return windows[:, :-1], windows[:, 1:]

        def loss_on(model, inputs, targets):
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

        torch.manual_seed(0)
        model = DistributedDataParallel(GPT().to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []  # one of each step, so their number is the step we are at

        def train_one_step():
            mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
            inputs, targets = batch_of(len(losses))
            loss = loss_on(model, inputs[mine], targets[mine])
            optimizer.zero_grad()
            loss.backward()  # the ranks meet here
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 20 == 0:
                print(f"step {len(losses):3}  loss {losses[-1]:.3f}")

    model, losses, train_one_step = mesh["model"], mesh["losses"], mesh["train_one_step"]
    return losses, model, train_one_step


@app.cell
def _():
    until = mo.ui.slider(50, 500, step=50, value=200, label="train until step", show_value=True)
    until
    return (until,)


@app.cell
def _(losses, mesh, train_one_step, until):
    mesh.push(last_step=until.value)

    @mesh.cell
    def train():
        while len(losses) < last_step:
            train_one_step()

    curves = mesh.pull("losses")
    return (curves,)


@app.cell
def _(curves, mesh):
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for r in mesh.ranks:
        axes.plot(curves[r], linewidth=0.7, alpha=0.5, label=f"rank {r}")
    mean = [sum(of_one_step) / mesh.size() for of_one_step in zip(*(curves[r] for r in mesh.ranks), strict=True)]
    axes.plot(mean, color="black", label="mean")
    axes.set(xlabel="step", ylabel="loss", title="Learning to write Python, a byte at a time")
    axes.legend()
    figure
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Is it right?

    Four ranks that average their gradients must go the way one process goes with the whole batch, up to the rounding of
    floats added in another order. Rank 0 plays the one process.
    """)
    return


@app.cell
def _(GPT, curves, losses, mesh):
    mesh.push(num_checked=min(200, len(curves[0])))

    @mesh.cell
    def check():
        mean_losses = torch.tensor(losses[:num_checked])
        dist.all_reduce(mean_losses)
        mean_losses /= world_size

        if rank == 0:
            torch.manual_seed(0)
            alone = GPT().to(device)
            optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=3e-3)
            losses_alone = []
            for step in range(num_checked):
                loss = loss_on(alone, *batch_of(step))
                optimizer_alone.zero_grad()
                loss.backward()
                optimizer_alone.step()
                losses_alone.append(loss.item())
            torch.testing.assert_close(mean_losses, torch.tensor(losses_alone), rtol=1e-4, atol=1e-4)
            largest = (mean_losses - torch.tensor(losses_alone)).abs().max()
            print(f"{num_checked} steps, largest difference {largest:.1e}")

    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A mistake on one rank

    Each rank completes a line of its own. One of the four has a π in it, and `ord("π")` is 960, which is not a byte.
    The error names the rank that failed and the ranks that went through, and nothing else has happened.

    `model` is a handle here; as an argument of a `@mesh.remote` function it arrives as the rank's own model.
    """)
    return


@app.cell
def _(curves, mesh, model):
    openings = ["import ", "def __init__(self", "# π is ", "    return "]
    curves  # write when training is done

    @mesh.remote
    def complete_carelessly(model, openings):
        import torch.distributed as dist

        tokens = [ord(character) for character in openings[dist.get_rank()]]
        return bytes(model.module.write(tokens, count=60, seed=0)).decode(errors="replace")

    try:
        answer = complete_carelessly(model, openings)
    except CellError as error:
        answer = mo.callout(mo.plain_text(str(error)), kind="danger")
    answer
    return (openings,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Mended: text becomes bytes by `encode`. What comes back holds one value per rank.
    """)
    return


@app.cell
def _(curves, mesh, model, openings):
    curves

    @mesh.remote
    def complete(model, openings):
        import torch.distributed as dist

        tokens = list(openings[dist.get_rank()].encode())
        return bytes(model.module.write(tokens, count=60, seed=0)).decode(errors="replace")

    completed = complete(model, openings)
    completed
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A loop stopped and resumed

    marimo's stop button reaches every rank as an interrupt. Here the ranks press it themselves, in the middle of a loop
    that is far too long; the model, the optimizer and the count of steps stay as they were, and the loop goes on.
    """)
    return


@app.cell
def _(curves, losses, mesh, train_one_step):
    curves

    try:

        @mesh.cell
        def train_far_too_long():
            import signal

            begun = len(losses)
            while len(losses) < 100_000:
                train_one_step()
                if len(losses) == begun + 20:
                    signal.raise_signal(signal.SIGINT)
    except CellInterrupted:
        print("stopped, and on we go")

    @mesh.cell
    def resume():
        while len(losses) < begun + 40:
            train_one_step()

    mesh.run("sum(parameter.sum() for parameter in model.parameters()).item()").values
    return


@app.cell
def _():
    stop = mo.ui.run_button(label="Stop the mesh", kind="danger")
    stop
    return (stop,)


@app.cell
def _(mesh, stop):
    if stop.value:
        mesh.stop()
    return


if __name__ == "__main__":
    app.run()
