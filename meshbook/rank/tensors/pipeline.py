"""Pipeline parallelism: the ranks of one axis are stages, and each computes some of a module's repeated blocks.

All else of the module (embeddings, norms, the head, its loss) is computed by every stage alike, on all rows. A forward
calls its blocks one after the other. These calls are recorded, and with the last one the rows go through the stages in
microbatches (GPipe: all forwards, and in backward all backwards); what the last block gave is then on every stage. So
the loss may be computed anywhere, in the module or in the notebook: the schedules of torch.distributed.pipelining take
it within their own step, of one microbatch after the other.

Between steps each parameter of a block is sharded over the axis along dim 0, so that optimizers, checkpoints and
healing know nothing of stages. For a forward, one all_to_all gathers on each stage the parameters of its blocks, which
it holds until the backward; another one gives back shards of their gradients.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from meshbook.errors import UsageError
from meshbook.rank.tensors import dtensor_patches, stage_caches
from meshbook.rank.tensors.blocks import find_chains
from meshbook.rank.tensors.stage_calls import BlockCall, BlockResult, PendingTensor, describe_call
from meshbook.rank.tensors.stage_parameters import StageParameters


def pipeline_blocks(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    microbatches: int | None = None,
    checkpoint_interval: int | None = None,
) -> nn.Module:
    """Have the repeated blocks of a module computed by stages, in place. Every rank of the mesh calls this alike.

    Args:
        mesh: one axis, whose ranks are the stages.
        microbatches: how many parts the rows (dim 0) go through the stages in; None: four for each stage.
        checkpoint_interval: 2 if the forward of every second block runs again in backward; None: of none.

    Raises:
        UsageError: the module has no blocks for so many stages, or they cannot be computed by parts of the rows.
    """
    names = {id(submodule): name for name, submodule in module.named_modules()}
    chains = [blocks for blocks in find_chains(module) if len(blocks) >= mesh.size()]
    if not chains:
        most = max(map(len, find_chains(module)), default=0)
        raise UsageError(
            f"a pipeline of {mesh.size()} stages takes at least as many repeated blocks, and this "
            f"{type(module).__name__} has {most}: siblings of one class with parameters of the same shapes. "
            'strategy="fsdp" takes any module'
        )
    _check_blocks(module, chains, names)
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    microbatches = microbatches or 4 * mesh.size()
    for number, blocks in enumerate(chains):
        block_names = [names[id(block)] for block in blocks]
        chain = BlockChain(blocks, block_names, mesh, number, microbatches, checkpoint_interval)
        for block in blocks:
            kind = type(block)
            if kind not in kinds:
                own = {"__module__": kind.__module__}
                kinds[kind] = type(f"Pipelined{kind.__name__}", (PipelinedBlock, kind), own)
            block.__class__ = kinds[kind]
            block.__dict__["_meshbook_chain"] = chain
    return module


def pipelines_of(module: nn.Module) -> list[BlockChain]:
    """Return the chains of blocks of a module that stages compute."""
    blocks = (submodule for submodule in module.modules() if isinstance(submodule, PipelinedBlock))
    return list({id(chain): chain for chain in (block.__dict__["_meshbook_chain"] for block in blocks)}.values())


def stage_spans(num_blocks: int, num_stages: int) -> list[range]:
    """Return the indices of the blocks of each stage: as many each, the first stages have one more."""
    each, more = divmod(num_blocks, num_stages)
    starts = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _check_blocks(module: nn.Module, chains: Sequence[Sequence[nn.Module]], names: dict[int, str]) -> None:
    uses: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    for blocks in chains:
        for block in blocks:
            prefix = f"{names[id(block)]}."
            for parameter in block.parameters():
                if others := [name for name in uses[id(parameter)] if not name.startswith(prefix)]:
                    own = next(name for name in uses[id(parameter)] if name.startswith(prefix))
                    raise UsageError(f"{own} is also {others[0]}, and a pipeline's block has parameters of its own")
            for submodule in block.modules():
                if isinstance(submodule, _NormBase) and submodule.track_running_stats:
                    raise UsageError(
                        f"{names[id(submodule)]} is a {type(submodule).__name__}, whose statistics are of all rows, "
                        "and a pipeline computes its blocks by parts of them; take a norm of each row, or another "
                        "strategy"
                    )


class PipelinedBlock(nn.Module):
    """A block of a chain. It is put before the block's own class; a call is recorded, and computed by its stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chain: BlockChain = self.__dict__["_meshbook_chain"]
        return super().__call__(*args, **kwargs) if chain.is_running else chain.call(self, args, kwargs)


class BlockChain:
    """Blocks that a forward calls one after the other, each with what the one before gave.

    Attributes:
        num_draws: how many forwards have drawn random numbers in blocks of this stage.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        names: Sequence[str],
        mesh: DeviceMesh,
        number: int,
        microbatches: int,
        checkpoint_interval: int | None,
    ) -> None:
        """
        Args:
            number: of the chain in its module.
        """
        self.blocks, self.names, self.number = list(blocks), list(names), number
        self.microbatches, self.checkpoint_interval = microbatches, checkpoint_interval
        self.group, self.num_stages, self.stage = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.spans = stage_spans(len(blocks), self.num_stages)
        self.num_draws, self.is_running = 0, False
        self._indices = {id(block): index for index, block in enumerate(blocks)}
        self._parameters = StageParameters([[blocks[index] for index in span] for span in self.spans], mesh)
        self._results: dict[Any, BlockResult] = {}  # by kind of call
        self._calls: list[BlockCall] = []
        self._pending: PendingTensor | None = None  # what the last call gave
        self._gathered: list[dict[str, torch.Tensor]] = []
        self._kept: list[dict[str, torch.Tensor]] | None = None  # what `generating` has gathered

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a block; with the last block, compute them all.

        Raises:
            UsageError: the blocks are not called one after the other, or their rows cannot be computed by parts.
        """
        name = self.names[self._indices[id(block)]]
        call = describe_call(self._indices[id(block)], name, args, kwargs)
        for leaf in call.leaves:
            if isinstance(leaf, PendingTensor) and leaf is not self._pending:
                leaf.refuse()
        if call.hidden is not self._pending:
            self._calls, self._gathered = [], self._kept or self._parameters.gather()
        self._calls.append(call)
        result = self._result_of_calls()
        if block is not self.blocks[-1]:
            self._pending = PendingTensor(call.hidden.shape, result.dtype, call.hidden.device, name)
            return result.rebuild(self._pending, call, name)
        calls, parameters = self._calls, self._gathered
        self._calls, self._gathered, self._pending = [], [], None
        extras = list({id(leaf): leaf for each in calls for leaf in each.extras_with_grad()}.values())
        run = StageRun(self, calls, parameters, extras, result)
        if torch.is_grad_enabled():
            is_trained = any(parameter.requires_grad for each in self.blocks for parameter in each.parameters())
            anchor = torch.empty(0, requires_grad=is_trained)
            computed = _ComputeStages.apply(run, anchor, calls[0].hidden, *extras)  # type: ignore[no-untyped-call]
        else:
            computed = run.forward(calls[0].hidden, with_graph=False)
            self._grow_caches(calls)
        return result.rebuild(computed, call, name)

    def _result_of_calls(self) -> BlockResult:
        """Return what blocks give: each stage tries its first one, once for each kind of call.

        Without a collective: a rank that is replaced does not know what the others have tried.
        """
        first = self._calls[0]
        kind = self.blocks[0].training, first.kind  # a block may give more in training
        if kind not in self._results:
            rows = row_spans(len(first.hidden), self.microbatches)
            own = self.spans[self.stage][0]
            with self.running(), torch.no_grad(), dtensor_patches.fork_rng_with_seed(0):
                found = BlockResult.find(self.blocks[own], self._gathered[0], self.names[own], first, rows)
            self._results[kind] = found
        return self._results[kind]

    def _grow_caches(self, calls: Sequence[BlockCall]) -> None:
        """Have the caches of blocks that other stages have computed grow as theirs did."""
        for call in calls:
            if call.index not in self.spans[self.stage]:
                for cache in call.caches:
                    stage_caches.grow(cache, self.blocks[call.index], self.names[call.index], calls[0].hidden)

    @property
    def is_generating(self) -> bool:
        return self._kept is not None

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Context of forwards without gradients in which blocks get caches, and parameters stay gathered."""
        self._kept = self._parameters.gather()
        try:
            yield
        finally:
            self._kept = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which blocks compute when they are called."""
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before

    def fork_rng(self) -> contextlib.AbstractContextManager[None]:
        """Context with random numbers of this stage's own; outside of it every stage draws the same."""
        seed = dtensor_patches.mix_seed(torch.initial_seed(), 1 + self.number * self.num_stages + self.stage)
        return dtensor_patches.fork_rng_with_seed(seed)


class StageRun:
    """The way of one batch through the stages, there and back, as this stage sees it."""

    def __init__(
        self,
        chain: BlockChain,
        calls: Sequence[BlockCall],
        parameters: Sequence[dict[str, torch.Tensor]],
        extras: Sequence[torch.Tensor],
        result: BlockResult,
    ) -> None:
        self._chain, self._result = chain, result
        self._is_last = chain.stage == chain.num_stages - 1
        own = chain.spans[chain.stage]
        self._parameters = parameters
        self._extras = [extra.detach().requires_grad_() for extra in extras]
        by_id = {id(extra): own_leaf for extra, own_leaf in zip(extras, self._extras, strict=True)}
        self._calls = [call.with_leaves(by_id) for call in calls if call.index in own]
        most = 1 if calls[0].caches else chain.microbatches  # a cache has all rows
        self._rows = row_spans(len(calls[0].hidden), most)
        self._dtype = calls[0].hidden.dtype
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each microbatch, input and output

    def forward(self, hidden: torch.Tensor, *, with_graph: bool) -> torch.Tensor:
        """Return what the last block gives, on every stage."""
        chain, dtype = self._chain, self._result.dtype
        inputs = [
            hidden[rows].detach()
            if chain.stage == 0
            else hidden.new_empty((rows.stop - rows.start, *hidden.shape[1:]), dtype=dtype)
            for rows in self._rows
        ]
        arrivals = [] if chain.stage == 0 else [self._receive(part, chain.stage - 1) for part in inputs]
        departures, outputs = [], []
        with torch.set_grad_enabled(with_graph), chain.fork_rng(), self._buffers_unchanged():
            before = rng_states()
            for number, (rows, part) in enumerate(zip(self._rows, inputs, strict=True)):
                if arrivals:
                    arrivals[number].wait()
                # A block may write into what it is called with, which a leaf of autograd's graph does not bear.
                output = self._compute(part.requires_grad_().clone() if with_graph else part, rows)
                outputs.append(output.detach().contiguous())
                if with_graph:
                    self._saved.append((part, output))
                if not self._is_last:
                    departures.append(self._send(outputs[-1], chain.stage + 1))
            chain.num_draws += not all(map(torch.equal, before, rng_states()))
        for departure in departures:
            departure.wait()
        whole = torch.cat(outputs) if self._is_last else hidden.new_empty(hidden.shape, dtype=dtype)
        dist.broadcast(whole, group=chain.group, group_src=chain.num_stages - 1)
        return whole

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of what the first block was called with and of the extras, on every stage."""
        if not self._saved:
            raise RuntimeError("backward a second time through a pipeline: its graph was let go of by the first")
        chain, saved, self._saved = self._chain, self._saved, []
        received = [] if self._is_last else [output.new_empty(output.shape) for _, output in reversed(saved)]
        arrivals = [self._receive(slopes, chain.stage + 1) for slopes in received]
        departures, found = [], []
        for at, rows in enumerate(reversed(self._rows)):
            part, output = saved.pop()
            if arrivals:
                arrivals[at].wait()
            with torch.enable_grad():
                torch.autograd.backward(output, gradient[rows] if self._is_last else received[at])
            del output
            found.append((torch.zeros_like(part) if part.grad is None else part.grad).contiguous())
            if chain.stage > 0:
                departures.append(self._send(found[-1], chain.stage - 1))
        for departure in departures:
            departure.wait()
        chain._parameters.give_back(self._parameters)
        self._parameters = []
        whole = torch.cat(found[::-1]) if chain.stage == 0 else gradient.new_empty(gradient.shape, dtype=self._dtype)
        dist.broadcast(whole, group=chain.group, group_src=0)
        for extra in self._extras:
            extra.grad = (torch.zeros_like(extra) if extra.grad is None else extra.grad).contiguous()
            dist.all_reduce(extra.grad, group=chain.group)
        return [whole, *(extra.grad for extra in self._extras if extra.grad is not None)]

    def _compute(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return what this stage's blocks make of a microbatch."""
        interval = self._chain.checkpoint_interval
        own = self._chain.spans[self._chain.stage]
        for call in self._calls:
            run = self._block_runner(call, own.index(call.index), rows)
            is_again = interval is not None and call.index % interval == interval - 1 and torch.is_grad_enabled()
            hidden = checkpoint(run, hidden, use_reentrant=False) if is_again else run(hidden)
        return hidden

    def _block_runner(self, call: BlockCall, at: int, rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            with self._chain.running():
                block = self._chain.blocks[call.index]
                return self._result.run(block, self._parameters[at], call, hidden, rows)

        return run

    @contextlib.contextmanager
    def _buffers_unchanged(self) -> Iterator[None]:
        """Context after which the buffers of this stage's blocks must be as before: no other stage has heard of it.

        Raises:
            UsageError: a block has written to one.
        """
        span = self._chain.spans[self._chain.stage]
        buffers = [
            (f"{self._chain.names[index]}.{name}", buffer, buffer._version)
            for index in span
            for name, buffer in self._chain.blocks[index].named_buffers()
        ]
        yield
        for name, buffer, version in buffers:
            if buffer._version != version:
                raise UsageError(
                    f"forward writes to {name}, once for each microbatch and on one stage alone; keep such a state "
                    'outside of the blocks of a pipeline, or take another strategy, such as "fsdp"'
                )

    def _send(self, tensor: torch.Tensor, stage: int) -> Any:
        return dist.isend(tensor, group=self._chain.group, group_dst=stage)

    def _receive(self, tensor: torch.Tensor, stage: int) -> Any:
        return dist.irecv(tensor, group=self._chain.group, group_src=stage)


class _ComputeStages(torch.autograd.Function):
    """The way of a batch through the stages, as autograd sees it on each of them.

    The anchor stands for the parameters of all blocks, which get their gradients by `StageRun.backward`.
    """

    @staticmethod
    def forward(
        ctx: Any, run: StageRun, anchor: torch.Tensor, hidden: torch.Tensor, *extras: torch.Tensor
    ) -> torch.Tensor:
        ctx.run = run
        return run.forward(hidden, with_graph=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, *ctx.run.backward(gradient)


def row_spans(num_rows: int, most: int) -> list[slice]:
    """Return the rows of each microbatch: as many each, the first ones have one more."""
    spans = stage_spans(num_rows, max(1, min(num_rows, most)))
    return [slice(span.start, span.stop) for span in spans]


def rng_states() -> list[torch.Tensor]:
    """Return the states of this process's generators."""
    return [source.get_state() for source in dtensor_patches.generators()]


def average_gradients(parameters: Sequence[torch.Tensor], group: Any) -> None:
    """Average the gradients of parameters over a group, those of one dtype together. A collective.

    Where only some ranks have the gradient of a parameter (experts without tokens), it is zero on the others.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    has_gradient = [parameter.grad is not None for parameter in trainable]
    flags = torch.tensor(has_gradient, dtype=torch.uint8, device=trainable[0].device if trainable else "cpu")
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, flag in zip(trainable, flags.tolist(), strict=True):
        if flag:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for dtype in dict.fromkeys(gradient.dtype for gradient in local):
        own = [gradient for gradient in local if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, mean in zip(own, torch.split(flat, [gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(mean.view_as(gradient))
