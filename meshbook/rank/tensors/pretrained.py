"""Models of Hugging Face on a rank: read from a folder into the parts that this rank has, `generate`, and saved again.

transformers reads the files itself: into a model on the meta device whose parameters a strategy has cut already, it
reads what this rank has of each.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.errors import MeshbookError, UsageError, message_of
from meshbook.rank.process_groups.interrupted_steps import fsdp_param_groups, fsdp_state
from meshbook.rank.state.modules import reshard
from meshbook.rank.tensors.file_tensors import GatheredTensors
from meshbook.rank.tensors.mesh_speed import free_bytes
from meshbook.rank.tensors.pipeline import pipelines_of

INSTALL = "pip install 'meshbook[hf]'"

# Of a file of a model that is saved, and so what the rank that writes it holds at one time. transformers' own is 50 GB,
# one file for most models; before, and in huggingface_hub, it was this.
FILE_SIZE = "5GB"


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder that `save_pretrained` has written, or on the Hugging Face hub, as a source of a module.

    Attributes:
        path: of the folder, or the model's name on the hub.
        dtype: of its parameters; None: as they were saved.
    """

    path: str
    dtype: torch.dtype | None = None

    def __call__(self) -> nn.Module:
        """Return a model of this structure with new values: what plans are compared with."""
        config = self._config()
        dtype = self.dtype or config.dtype
        return self._class_of(config)._from_config(config, **({"dtype": dtype} if dtype is not None else {}))  # type: ignore[no-any-return]

    def load(self, device: torch.device, cut: Callable[[nn.Module], object] | None) -> nn.Module:
        """Read the model.

        Args:
            cut: is called with the model on the meta device, and turns parameters into DTensors, of which only this
                rank's parts are read. Where the files have parameters in another form, that cannot be read by parts, it
                is called again, with a model that has been read. None: all of it is read.
        """
        try:
            return self._read(device, cut)
        except _NotByPartsError:
            assert cut is not None
            model = self._read(device, None)
            cut(model)
            return model

    def _read(self, device: torch.device, cut: Callable[[nn.Module], object] | None) -> nn.Module:
        from transformers.distributed import configuration_utils

        config = self._config()
        kind = self._class_of(config)
        options: dict[str, Any] = {"dtype": "auto" if self.dtype is None else self.dtype}
        if device.type != "cpu":
            options["device_map"] = {"": device}
        with self._explained(), _distributed_by(kind, cut) if cut is not None else nullcontext():
            if cut is not None:
                options["distributed_config"] = configuration_utils.DistributedConfig()
            model: Any = kind.from_pretrained(self.path, **options)
        model.config.distributed_config = None  # what it is distributed by is not transformers' own
        _own_memory(model)
        return model  # type: ignore[no-any-return]

    def _config(self) -> Any:
        try:
            from transformers import AutoConfig
        except ImportError as error:
            text = f"reading {self.path} takes transformers, which the ranks do not have: {INSTALL}"
            raise UsageError(text) from error
        with self._explained():
            return AutoConfig.from_pretrained(self.path)

    def _class_of(self, config: Any) -> Any:
        import transformers

        name = (config.architectures or ["none"])[0]
        found = getattr(transformers, name, None)
        if found is None:
            raise UsageError(
                f"{self.path} is of the class {name}, which transformers {transformers.__version__} does not have; "
                "give a function that makes the model: meshbook.distribute(lambda: ..., mesh)"
            )
        return found

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context in which the errors of transformers say what to do, and one rank shows how far it is."""
        import transformers

        logging: Any = transformers.utils.logging
        was_enabled = logging.is_progress_bar_enabled()
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            logging.disable_progress_bar()
        try:
            yield
        except (MeshbookError, _NotByPartsError):
            raise
        except (OSError, ValueError) as error:
            if os.path.isdir(self.path):
                raise UsageError(f"the folder {self.path} cannot be read as a model: {message_of(error)}") from error
            raise UsageError(
                f"{self.path} is no folder on this machine, and as a name on the Hugging Face hub it cannot be read: "
                f"{message_of(error)}\nGive the path of a folder that save_pretrained has written, and that all "
                "machines have"
            ) from error
        finally:
            if was_enabled:
                logging.enable_progress_bar()


@contextmanager
def _distributed_by(kind: Any, cut: Callable[[nn.Module], object]) -> Iterator[None]:
    """Context in which transformers has models of a class cut by this function before it reads their values."""

    def distribute(model: nn.Module, *_: Any) -> nn.Module:
        converters = _converters_of(model)
        cut(model)
        if not _can_be_read_by_parts(model, converters):
            raise _NotByPartsError
        return model

    kind.maybe_distribute_model = staticmethod(distribute)
    try:
        yield
    finally:
        del kind.maybe_distribute_model


class _NotByPartsError(Exception):
    """Parameters of a model lie in its files in a form of which a rank's part cannot be read."""


def _converters_of(model: Any) -> list[Any]:
    """Return what transformers does with tensors of files that are not parameters as they are."""
    from transformers import conversion_mapping

    return [one for one in conversion_mapping.get_model_conversion_mapping(model) if hasattr(one, "operations")]


def _can_be_read_by_parts(model: nn.Module, converters: Sequence[Any]) -> bool:
    """Whether what transformers does with the tensors of files gives the part of a parameter from parts of them.

    It cuts each tensor of a file as the parameter is cut, and converts it afterwards.
    """
    for name, parameter in model.named_parameters():
        dims = {placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()}
        for converter in converters if dims else ():
            patterns = [pattern.replace("*", ".*") for pattern in converter.target_patterns]
            if not any(re.search(pattern, name) for pattern in patterns):
                continue
            if any(not _keeps_dims(operation, dims) for operation in converter.operations):
                return False
    return True


def _keeps_dims(operation: Any, dims: set[int]) -> bool:
    """Whether a conversion of transformers may be done after tensors are cut along these dims."""
    kind = type(operation).__name__
    if kind == "MergeModulelist":  # of experts, along a new dim 0: transformers takes those of this rank
        return bool(operation.dim == 0)
    return kind in ("Concatenate", "Chunk", "Split", "Interleave") and operation.dim not in dims


def _own_memory(module: nn.Module) -> None:
    """Copy what lies in the pages of a file: whoever saved a model there again would change it, or end this process."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if isinstance(tensor, DTensor):
                tensor._local_tensor = tensor._local_tensor.clone()
            elif tensor.device.type == "cpu":
                tensor.data = tensor.data.clone()


def forward_without_cache(module: nn.Module) -> None:
    """Have a model fill no cache of keys and values where gradients are computed.

    A block whose forward runs again would fill it twice.
    """

    def leave_out(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"use_cache": False, **kwargs} if torch.is_grad_enabled() else kwargs

    if hasattr(getattr(module, "config", None), "use_cache"):
        module.register_forward_pre_hook(leave_out, with_kwargs=True)


# What a model of Hugging Face gives of each block, which a pipeline's stages have of their own blocks only.
_CACHES = ("cache", "past_key_values", "cache_params")  # the same by the names of several versions
_KEPT_BY_BLOCKS = ("use_cache", *_CACHES, "output_hidden_states", "output_attentions", "output_router_logits")


def refuse_what_blocks_keep(module: nn.Module) -> None:
    """Have a model of stages fill a cache in `generate` only, and refuse to give what each block has."""
    config = getattr(module, "config", None)
    if config is None:
        return

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        is_generating = pipelines_of(module)[0].is_generating
        for name in _KEPT_BY_BLOCKS:
            is_of_caches = name in ("use_cache", *_CACHES)
            given = kwargs.get(name, not is_of_caches and getattr(config, name, False))
            if is_of_caches and is_generating:
                continue
            if given is not None and given is not False:
                raise UsageError(
                    f"{name} is of every block, and each stage of a pipeline has its own blocks only; leave it out, or "
                    'take another strategy, such as "fsdp"'
                )
        leaves_out = hasattr(config, "use_cache") and not is_generating
        return args, {**kwargs, "use_cache": False} if leaves_out else kwargs

    module.register_forward_pre_hook(check, with_kwargs=True)


def generate(module: Any, rng_state: torch.Tensor, args: Any, kwargs: Any) -> tuple[Any, torch.Tensor]:
    """Have a model generate, in eval mode and without gradients. Every rank of a mesh calls this alike.

    Args:
        rng_state: of the generator whose numbers it samples with: every rank draws the same.

    Returns:
        What it gave, with tensors on the CPU, and the state of that generator afterwards.
    """
    if not callable(getattr(module, "generate", None)):
        raise UsageError(f"a {type(module).__name__} has no generate(); models of Hugging Face that write text have it")
    device = next(module.parameters()).device
    chains = pipelines_of(module)
    if chains and (given := [name for name in _CACHES if kwargs.get(name) is not None]):
        raise UsageError(f"{given[0]}: each stage of a pipeline makes the cache of its own blocks; leave it out")
    devices = [] if device.type == "cpu" else [torch.get_device_module(device).current_device()]
    training = {one: one.training for one in module.modules()}  # a part may be in another mode than the whole
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_gathered(module, device))
        for chain in chains:
            stack.enter_context(chain.generating())
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type))
        torch.set_rng_state(rng_state)
        if devices:
            torch.get_device_module(device).manual_seed(int(torch.randint(1 << 62, ())))
        try:
            found = module.eval().generate(*args, **kwargs)
        finally:
            for one, was_training in training.items():
                one.training = was_training
        if chains and dataclasses.is_dataclass(found):  # a cache has the keys of this stage's blocks only
            names = {field.name for field in dataclasses.fields(found)}.intersection(_CACHES)
            found = dataclasses.replace(found, **dict.fromkeys(names))  # type: ignore[type-var]
        found = pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, found)
        return found, torch.get_rng_state()


@contextmanager
def _gathered(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which FSDP2 leaves parameters gathered after a forward, where the memory is there.

    Each token is a forward. Those of the root are gathered here: an adapter around a model calls the forward of that.
    All ranks decide alike: otherwise some would gather, and others not.
    """
    shards = [one for one in module.modules() if isinstance(one, FSDPModule)]
    if not shards:
        yield
        return
    groups = [group for one in shards for group in fsdp_param_groups(fsdp_state(one))]
    before = [group.post_forward_mesh_info for group in groups]
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    fits = torch.tensor([2 * num_bytes < free_bytes(device)], dtype=torch.uint8, device=device)
    torch.distributed.all_reduce(fits, torch.distributed.ReduceOp.MIN)
    for one in shards if fits.item() else ():
        one.set_reshard_after_forward(False, recurse=False)
    if isinstance(module, FSDPModule):
        fsdp_state(module)._lazy_init()
        module.unshard()
    try:
        yield
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        reshard(module)


@torch.no_grad()
def save(module: Any, folder: str, options: dict[str, Any]) -> None:
    """Save a model as a folder that plain transformers reads. A collective; the first rank writes.

    It gathers the tensors of a file when it writes that, and lets go of them.
    """
    if not callable(getattr(module, "save_pretrained", None)):
        raise UsageError(
            f"a {type(module).__name__} has no save_pretrained(), which models of Hugging Face have; save "
            "model.state_dict(full=True)"
        )
    state: dict[str, Any] = get_model_state_dict(module)
    names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
    tensors = GatheredTensors([state[name] for name in names], next(module.parameters()).device)
    if torch.distributed.get_rank() > 0:
        tensors.take_part()
        return
    if "max_shard_size" in inspect.signature(module.save_pretrained).parameters:
        options = {"max_shard_size": FILE_SIZE, **options}
    state.update(zip(names, tensors.for_files(), strict=True))
    try:
        module.save_pretrained(folder, state_dict=state, **options)
    except Exception:  # a Stop has ended it on the other ranks too
        tensors.end()
        raise
    tensors.end()
