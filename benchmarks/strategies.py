"""`meshbook.distribute(strategy=...)` against what people write instead under torchrun: FSDP2, GPipe, transformers' tp.

The script's ranks are processes of torchrun's own beside the mesh's, and both train in turns. What is sent for a step
in the notebook costs the notebook's process too, which the clock shows where cores are left for it. One round of fsdp
differs from the next by a tenth, so that a limit a twentieth above the script takes many of them.

    python -m benchmarks.strategies [--quick]

This file is also what torchrun runs: `torchrun -m benchmarks.strategies SOCKET STRATEGY WIDTH LAYERS BATCH LENGTH`, or
`... SOCKET tp FOLDER` for `generate` of the model in a folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

import meshbook
from benchmarks import gpt, workbench
from benchmarks.report import Report
from benchmarks.training import cost, loop
from meshbook.controller.starting import create_mesh
from meshbook.tensors.creation import engine_of

SIZES = ((256, 4, 16, 64, 4), (512, 4, 16, 64, 2))  # width, layers, batch, length; steps that are timed together
PEERS = {"fsdp": "FSDP2 by torchrun", "pp": "ScheduleGPipe by torchrun"}  # what each strategy is held against
CPU_LIMIT, CLOCK_LIMIT = 1.05, 1.10  # of fsdp

PROMPTS, WRITTEN = 4, 16  # tokens of each
GENERATE_LIMIT = 0.5
ONE_PROCESS, BY_TRANSFORMERS = "generate in one process", "generate, transformers' own tp by torchrun"


def measure(quick: bool, folder: Path) -> Report:
    report = Report("strategies", "a GPT's step by distribute against a script of torchrun's, and generate")
    torch.set_num_threads(1)
    for ranks in (2,) if quick else (2, 4):
        with create_mesh({"dp": ranks}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
            for size in SIZES[: 1 if quick else None]:
                steps(report, mesh, folder, "fsdp", *size, rounds=2 if quick else 15)
            steps(report, mesh, folder, "pp", *SIZES[0], rounds=2 if quick else 9)
            if ranks == 2:
                writing(report, mesh, folder, rounds=2 if quick else 7)
    return report


def steps(
    report: Report,
    mesh: Any,
    folder: Path,
    strategy: str,
    width: int,
    layers: int,
    batch: int,
    length: int,
    iters: int,
    rounds: int,
) -> None:
    """A training step of a GPT of one size."""
    engine, pids = engine_of(mesh), list(mesh.execute(os.getpid).values())
    given = gpt.remote_data(mesh, batch, length, is_cut=strategy == "fsdp")
    peer, lines = PEERS[strategy], f"distribute(strategy={strategy!r})"

    def stepper() -> Callable[[], Any]:
        to_ranks = functools.partial(meshbook.distribute, mesh=mesh, strategy=strategy, axis="dp")
        return gpt.remote_step(to_ranks, width, layers, length, given)

    by_lines, recorded = stepper(), meshbook.record(stepper())
    with script(folder, len(pids), strategy, width, layers, batch, length) as (train, script_pids):
        contestants = {
            peer: cost(lambda: train(iters), script_pids, iters),
            lines: cost(loop(by_lines, iters, engine), pids, iters),
            f"{lines}, recorded": cost(loop(recorded, iters, engine), pids, iters),
        }
        found = workbench.take_turns(contestants, rounds, warm_up=2)
    where = f"d={width} L={layers}, {len(pids)} ranks"
    for name, samples in found.items():
        taken, rank_cpu, own_cpu = zip(*samples, strict=True)
        for what, figures, limit in (("", taken, CLOCK_LIMIT), (", CPU of a rank", rank_cpu, CPU_LIMIT)):
            row, against = f"{where}: {name}{what}", f"{where}: {peer}{what}"
            report.add(row, figures, "ms", against=None if name == peer else against)
            # With a core for each rank and for the notebook the clock is promised, otherwise it shows who had to wait.
            is_promised = name != peer and strategy == "fsdp"
            if is_promised and (what or (os.cpu_count() or 1) > len(pids)):
                report.promise(f"{row}, against torchrun", report.ratio(row), limit, "x")
        if name != peer:
            report.add(f"{where}: {name}, CPU of this process", own_cpu, "ms")


def writing(report: Report, mesh: Any, folder: Path, rounds: int) -> None:
    """`generate` of a model of Hugging Face by each strategy."""
    try:
        import transformers
    except ImportError:
        report.note("transformers is not installed, so generate is not measured: pip install 'meshbook[hf]'")
        return
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(folder / "model")

    def speed_of(write: Callable[[], Any]) -> Callable[[], float]:
        def speed() -> float:
            started = time.perf_counter()
            write()
            return PROMPTS * WRITTEN / (time.perf_counter() - started)

        return speed

    models = {
        f"generate, {name}": meshbook.distribute(plain, mesh, strategy=name, axis="dp")
        for name in ("ddp", "fsdp", "tp", "pp")
    }
    with script(folder, mesh.size(), "tp", folder / "model") as (train, _):
        contestants = {
            ONE_PROCESS: speed_of(writer(plain)),
            BY_TRANSFORMERS: speed_of(lambda: train(1)),
            **{name: speed_of(writer(model)) for name, model in models.items()},
        }
        found = workbench.take_turns(contestants, rounds, warm_up=1)
    for name, speeds in found.items():
        report.add(name, speeds, "tokens/s", against=None if name == ONE_PROCESS else ONE_PROCESS)
        if name in models:
            # As a limit from below: what one process writes, over what is written.
            report.promise(f"{ONE_PROCESS} over {name}", 1 / report.ratio(name), 1 / GENERATE_LIMIT, "x")


def writer(model: Any) -> Callable[[], Any]:
    """Return a function that has a model write `WRITTEN` tokens after each of some prompts."""
    given = torch.randint(1, 1024, (PROMPTS, 32), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(given), "max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN,
        "do_sample": False,
    }  # fmt: skip
    return lambda: model.generate(given, **options)


def transformers_writer(folder: str) -> Callable[[], Any]:
    """The same by a rank of a script, whose model transformers has cut."""
    import transformers
    from transformers.distributed import DistributedConfig

    cut = DistributedConfig(tp_plan="auto")
    return writer(transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=cut).eval())


# ---------------------------------------------------------------------------------------------------------------------
# The script


@contextlib.contextmanager
def script(
    folder: Path, ranks: int, strategy: str, *given: object
) -> Iterator[tuple[Callable[[int], None], list[int]]]:
    """The script under torchrun; yields a function that has it do some steps, and the process IDs of its ranks."""
    address = str(folder / "torchrun.sock")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with Listener(address, "AF_UNIX", backlog=ranks) as listener:
        process = subprocess.Popen(
            [*command, "-m", "benchmarks.strategies", address, strategy, *map(str, given)],
            cwd=workbench.ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        connections: list[Connection] = []
        try:
            connections += [listener.accept() for _ in range(ranks)]  # type: ignore[misc]
            pids = [connection.recv() for connection in connections]

            def train(iters: int) -> None:
                for connection in connections:
                    connection.send(iters)
                for connection in connections:
                    connection.recv()

            yield train, pids
        finally:
            for connection in connections:
                connection.close()  # which ends it
            process.wait()


def serve(address: str, strategy: str, given: list[str]) -> None:
    """A rank of the script: makes as many steps as it is sent numbers for."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    if strategy == "tp":
        step = transformers_writer(*given)
    else:
        make = gpt.pipeline_step if strategy == "pp" else gpt.fsdp_step
        step = make(mesh, int(os.environ["RANK"]), *map(int, given))
    with Client(address, "AF_UNIX") as connection, contextlib.suppress(EOFError):
        connection.send(os.getpid())
        while True:
            for _ in range(connection.recv()):
                step()
            connection.send(None)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        serve(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        workbench.run_alone(measure, __doc__)
