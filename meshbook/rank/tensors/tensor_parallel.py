"""Tensor parallelism of a module: which of its layers are cut, how, and whether the cut module computes the same.

A Hugging Face model says it itself (`_tp_plan`). Of other modules, attention and MLPs are recognised by their Linears:
those that come first are cut by columns, the last one by rows, so that one sum over the ranks makes the result whole.
Names are only a guess: at the first forward one module of each kind is compared with the whole one, gradients too
(`CutCheck`). What is not recognised stays whole on each rank, and `TensorCut.whole` has the reason.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from meshbook.errors import PlacementError
from meshbook.rank.tensors.cut_checks import CutCheck
from meshbook.rank.tensors.cut_styles import (
    COLWISE,
    CONV1D_COLWISE,
    CONV1D_PACKED,
    CONV1D_ROWWISE,
    EXPERTS,
    PER_HEAD,
    ROWWISE,
    STYLES,
    cuts_experts,
)


def other_dim(parameter: nn.Parameter) -> Shard | None:
    """Return how FSDP2 shards a parameter that is cut along dim 0: along the last; None: along dim 0, as others.

    Shards of shards along one dim are not in the order of the ranks; much of torch cannot read them. Dim 1 of experts
    is what files have in two tensors, of which parts could not be read.
    """
    is_cut = isinstance(parameter, DTensor) and any(placement.is_shard(0) for placement in parameter.placements)
    return Shard(parameter.dim() - 1) if is_cut else None


# Tables of models that have none of their own, by `config.model_type`, from the model's base on.
_KNOWN_TABLES: dict[str, dict[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": CONV1D_PACKED,
        "h.*.attn.c_proj": CONV1D_ROWWISE,
        "h.*.crossattention.q_attn": CONV1D_COLWISE,
        "h.*.crossattention.c_attn": CONV1D_PACKED,
        "h.*.crossattention.c_proj": CONV1D_ROWWISE,
        "h.*.mlp.c_fc": CONV1D_COLWISE,
        "h.*.mlp.c_proj": CONV1D_ROWWISE,
    },
    "t5": {
        **{
            f"*.block.*.layer.*.{attention}.{layer}": COLWISE
            for attention in ("SelfAttention", "EncDecAttention")
            for layer in ("q", "k", "v", "relative_attention_bias")
        },
        "*.block.*.layer.*.SelfAttention.o": ROWWISE,
        "*.block.*.layer.*.EncDecAttention.o": ROWWISE,
        "*.block.*.layer.*.DenseReluDense.wi*": COLWISE,
        "*.block.*.layer.*.DenseReluDense.wo": ROWWISE,
    },
}
_KNOWN_TABLES["mt5"] = _KNOWN_TABLES["t5"]

_QUERY = {"q", "wq", "q_proj", "query", "to_q", "q_lin", "query_proj", "q_linear"}
_KEY = {"k", "wk", "k_proj", "key", "to_k", "k_lin", "key_proj", "k_linear"}
_VALUE = {"v", "wv", "v_proj", "value", "to_v", "v_lin", "value_proj", "v_linear"}
_FUSED = {"qkv", "wqkv", "qkv_proj", "c_attn", "in_proj", "query_key_value", "to_qkv", "attn_qkv", "kv", "to_kv"}
_ATTENTION_OUT = {"o", "wo", "o_proj", "out_proj", "out", "proj", "dense", "c_proj", "to_out", "out_lin"}
_UP = {
    "up", "up_proj", "w1", "w3", "fc1", "c_fc", "lin1", "fc_in", "gate", "gate_proj", "wi", "wi_0", "wi_1",
    "dense_h_to_4h", "linear1", "fc", "intermediate.dense",
}  # fmt: skip
_DOWN = {
    "down", "down_proj", "w2", "fc2", "c_proj", "lin2", "fc_out", "wo", "dense_4h_to_h", "linear2", "proj",
    "output.dense",
}  # fmt: skip
# Modules that compute each element of their input by itself.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU,
    nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.Dropout, nn.Identity,
)  # fmt: skip
_NORMS = ("LayerNorm", "RMSNorm")


@dataclass
class TensorCut:
    """How the layers of a module are cut over `size` ranks."""

    size: int
    source: str  # who says so: "the model's own table", "the table for gpt2", "recognised", "tp_plan"
    styles: dict[str, str] = field(default_factory=dict)  # how a submodule is cut, by its name
    # Attributes of submodules that count heads, and what they are on one rank: name -> {"num_heads": 4}.
    heads: dict[str, dict[str, int]] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)  # one module of each kind that is compared with the whole one
    whole: dict[str, str] = field(default_factory=dict)  # why a submodule with parameters is not cut, by its name


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_cut(module: nn.Module, size: int, table: Mapping[str, str] | None = None) -> TensorCut:
    """Return how the layers of a module can be cut over `size` ranks. Looks at names and shapes only.

    Args:
        table: `Plan.tp_plan`; None: the model's own, or what is recognised.

    Raises:
        PlacementError: heads or widths that cannot be cut evenly, an entry that is not known, or nothing to cut.
    """
    tied = _tied_names(module)
    if table is not None:
        cut = TensorCut(size, "tp_plan")
        _apply_table(module, "", table, cut, tied)
        if not cut.styles:
            raise PlacementError(f"no submodule has a name of tp_plan ({', '.join(table)})")
    elif owners := list(_modules_with_table(module, "")):
        cut = TensorCut(size, owners[0][3])
        for prefix, owner, own_table, _ in owners:
            _check_config_heads(getattr(owner, "config", None), size)
            _apply_table(owner, prefix, own_table, cut, tied)
    else:
        cut = TensorCut(size, "recognised")
        _recognise(module, "", cut, tied)
    if table is not None or cut.source.startswith(_TABLE_FOR):  # heads are counted all the same
        for name, attention in module.named_modules():
            if (found := _attention_layers(attention)) and all(_join(name, q) in cut.styles for q in found[0]):
                _cut_heads(name, attention, found[0], cut)
                if table is not None:
                    cut.checked.append(name)
    for name, style in cut.styles.items():
        _count_parts(module, name, style, cut)
    if not cut.styles:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(cut.whole.items())[:3])
        raise PlacementError(
            f"no layer of this {type(module).__name__} was recognised as attention with Linears q, k, v and an output, "
            f"or as an MLP{f' ({reasons})' if reasons else ''}; say how they are cut: "
            'meshbook.Plan(tp=…, tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})'
        )
    for name, style in cut.styles.items():
        if style != EXPERTS:
            _check_width(name, module.get_submodule(name), style, size)
    _keep_one_of_each_kind(module, cut)
    return cut


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Return the submodules that share a parameter with another one, and the parameter's first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name.rpartition(".")[0]: shared[0] for shared in names.values() if len(shared) > 1 for name in shared}


_TABLE_FOR = "the table for "


def _modules_with_table(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, Mapping[str, str], str]]:
    """Yield the outermost modules that have a table, of their own or a known one, and whose it is."""
    config = getattr(module, "config", None)
    own_table = getattr(module, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
    if isinstance(own_table, Mapping) and own_table:
        yield prefix, module, own_table, "the model's own table"
        return
    kind = getattr(config, "model_type", None)
    if kind in _KNOWN_TABLES and getattr(module, "base_model", None) is module:
        yield prefix, module, _KNOWN_TABLES[kind], f"{_TABLE_FOR}{kind}"
        return
    for name, child in module.named_children():
        yield from _modules_with_table(child, _join(prefix, name))


def _apply_table(
    module: nn.Module, prefix: str, table: Mapping[str, str], cut: TensorCut, tied: Mapping[str, str]
) -> None:
    for name, submodule in module.named_modules():
        style = next((style for pattern, style in table.items() if _matches(name, pattern)), None)
        if style is None:
            continue
        full_name = _join(prefix, name)
        if style not in STYLES:
            raise PlacementError(
                f'{full_name}: {cut.source} has "{style}" for it; known: {", ".join(STYLES)}. {_GIVE_LAYERS}'
            )
        kinds = STYLES[style].kinds
        if full_name in tied:
            cut.whole[full_name] = f"its parameter is also {tied[full_name]}, which is whole"
        elif kinds and not any(kind.__name__ in kinds for kind in type(submodule).mro()):
            cut.whole[full_name] = f"a {type(submodule).__name__}, and {style} is for {' and '.join(kinds)}"
        elif style == EXPERTS and not cuts_experts(submodule):
            raise PlacementError(
                f"{full_name}: the experts of a {type(submodule).__name__} are not known: its parameters or its "
                f"forward have another form than those of Mixtral. {_GIVE_LAYERS}"
            )
        else:
            cut.styles[full_name] = style
    for name, _ in module.named_parameters():
        style = next((style for pattern, style in table.items() if _matches(name, pattern)), None)
        if style is not None and cut.styles.get(_join(prefix, name.rpartition(".")[0])) != EXPERTS:
            raise PlacementError(
                f'{_join(prefix, name)}: {cut.source} has "{style}" for it, and parameters that are no layer\'s are '
                f"not cut. {_GIVE_LAYERS}"
            )


_GIVE_LAYERS = "Give the layers that are to be cut: meshbook.Plan(tp=…, tp_plan={…})"


def _count_parts(module: nn.Module, name: str, style: str, cut: TensorCut) -> None:
    """Note the attributes of a layer that say how wide it is, or how many experts it has, and what they become."""
    layer: Any = module.get_submodule(name)
    if style == EXPERTS:
        _check_even(layer.num_experts, f"experts of {name}", cut.size)
        cut.heads[name] = {"num_experts": layer.num_experts // cut.size}
    elif style in (CONV1D_COLWISE, CONV1D_PACKED):
        cut.heads[name] = {"nf": layer.nf // cut.size}
        if style == CONV1D_PACKED:
            owner_name = name.rpartition(".")[0]
            owner: Any = module.get_submodule(owner_name)
            cut.heads[owner_name] = {
                "split_size": owner.split_size // cut.size,
                "num_heads": owner.num_heads // cut.size,
            }


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _check_config_heads(config: Any, size: int) -> None:
    for attribute, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "key-value heads")):
        count = getattr(config, attribute, None)
        if isinstance(count, int):
            _check_even(count, what, size)


def _check_even(count: int, what: str, size: int) -> None:
    if count % size:
        fitting = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
        raise PlacementError(
            f"{count} {what} over tp={size}: {count} = {count // size} x {size} + {count % size}; tp may be {fitting}"
        )


def _check_width(name: str, layer: nn.Module, style: str, size: int) -> None:
    dim = STYLES[style].dims[0]
    width = 0 if dim is None else layer.weight.shape[dim]  # type: ignore[index]
    if isinstance(layer, nn.Embedding) and style == COLWISE:
        width = layer.embedding_dim
    if width % size and style != "embedding_rowwise":
        raise PlacementError(
            f"{name}: {style} cuts its width of {width} over tp={size}: "
            f"{width} = {width // size} x {size} + {width % size}"
        )


def _recognise(module: nn.Module, name: str, cut: TensorCut, tied: Mapping[str, str]) -> None:
    """Find the attention and MLPs at and below a module."""
    if isinstance(module, nn.MultiheadAttention):
        cut.whole[name] = "torch's own attention holds q, k and v in one parameter"
        return
    if layers := _attention_layers(module):
        first, last = layers
        if reason := _reason_for_whole_attention(module, first, last, cut.size):
            cut.whole[name] = reason
        else:
            _cut_heads(name, module, first, cut)
            _cut_layers(name, first, last, cut)
            owner_name = first[0].rpartition(".")[0]  # BERT has q, k and v in a child
            for child_name, child in module.get_submodule(owner_name).named_children():
                full_name = _join(owner_name, child_name)
                if full_name not in (*first, last) and any(True for _ in child.parameters()):
                    cut.styles[_join(name, full_name)] = PER_HEAD
            if any(_join(name, layer) in tied for layer in (*first, last)):
                raise PlacementError(f"{name}: its layers share parameters with others, which would come apart")
    elif fused := [child for child, _ in _linears(module) if child in _FUSED]:
        cut.whole[_join(name, fused[0])] = "one Linear makes q, k and v, and an even cut of it would mix them"
    if mlp := _mlp_layers(module):
        first, last = mlp
        if not any(_join(name, layer) in {*tied, *cut.styles} for layer in (*first, last)):
            _cut_layers(name, first, last, cut)
    for child_name, child in module.named_children():
        if _join(name, child_name) not in cut.styles and not _is_cut_below(name, child_name, cut):
            _recognise(child, _join(name, child_name), cut, tied)
    for child_name, _ in (*_linears(module), *_embeddings(module)):
        full_name = _join(name, child_name)
        if full_name not in cut.styles and full_name not in cut.whole:
            cut.whole[full_name] = "neither in attention nor in an MLP"


def _is_cut_below(name: str, child_name: str, cut: TensorCut) -> bool:
    """Whether something of a child is cut already: BERT's attention has its Linears in children of its own."""
    prefix = f"{_join(name, child_name)}."
    return any(cut_name.startswith(prefix) for cut_name in cut.styles)


def _linears(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, child) for name, child in module.named_children() if type(child) is nn.Linear]


def _embeddings(module: nn.Module) -> list[tuple[str, nn.Embedding]]:
    return [(name, child) for name, child in module.named_children() if isinstance(child, nn.Embedding)]


def _attention_layers(module: nn.Module) -> tuple[list[str], str] | None:
    """Return the names of q, k and v and of the output's Linear, from the module's own name on; None: no attention."""
    children = dict(_linears(module))
    for inner_name, inner in module.named_children():  # BERT: attention.self.query and attention.output.dense
        inner_children = dict(_linears(inner))
        output = getattr(module, "output", None)
        if not (triple := _triple(inner_children)) or _output_of(inner_children) or not isinstance(output, nn.Module):
            continue
        if "dense" in dict(_linears(output)):
            return [f"{inner_name}.{layer}" for layer in triple], "output.dense"
    triple, last = _triple(children), _output_of(children)
    return (triple, last) if triple and last else None


def _triple(children: Mapping[str, nn.Linear]) -> list[str] | None:
    found = [next((name for name in children if name in names), None) for names in (_QUERY, _KEY, _VALUE)]
    return None if None in found else [name for name in found if name is not None]


def _output_of(children: Mapping[str, nn.Linear]) -> str | None:
    query = next((child for name, child in children.items() if name in _QUERY), None)
    return next(
        (
            name
            for name, child in children.items()
            if name in _ATTENTION_OUT and query is not None and child.in_features == query.out_features
        ),
        None,
    )


def _reason_for_whole_attention(module: nn.Module, first: list[str], last: str, size: int) -> str | None:
    layers = {*first, last}
    owners = {name.rpartition(".")[0] for name in layers}
    for owner_name in owners:
        owner = module.get_submodule(owner_name)
        if own := [name for name, value in owner._parameters.items() if value is not None]:
            return f"its parameter {own[0]} may have a part for each head"
        for child_name, child in owner.named_children():
            full_name = _join(owner_name, child_name)
            if full_name in layers or not any(True for _ in child.parameters()) or full_name in owners:
                continue
            if owner_name and owner_name == last.rpartition(".")[0]:
                continue  # after the sum over ranks, as BERT's norm is
            is_norm = any(word in type(child).__name__ for word in _NORMS)
            sizes = {parameter.shape for parameter in child.parameters()}
            width = _width_of(module, first[0])
            if not is_norm or any(len(shape) != 1 or width % shape[0] or shape[0] * size > width for shape in sizes):
                return f"{child_name} has parameters, and whether it works on each head by itself is not known"
    return None


def _width_of(module: nn.Module, name: str) -> int:
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer.out_features


def _cut_heads(name: str, module: nn.Module, first: list[str], cut: TensorCut) -> None:
    """Note the attributes of attention that count heads, or their width, and what they become."""
    owner_name = _join(name, first[0]).rpartition(".")[0]
    owner = module.get_submodule(first[0].rpartition(".")[0])
    width = _width_of(module, first[0])
    found: dict[str, int] = {}
    for attribute, value in vars(owner).items():
        if type(value) is not int:
            continue
        if _counts_heads(attribute):
            what = "key-value heads" if "kv" in attribute or "key" in attribute else "heads"
            _check_even(value, f"{what} of {name or 'the module'}", cut.size)
            found[attribute] = value // cut.size
        elif value == width and ("all_head" in attribute or "inner" in attribute):
            found[attribute] = value // cut.size
    if found:
        cut.heads[owner_name] = found


def _counts_heads(attribute: str) -> bool:
    words = re.split(r"_+", attribute.lower())
    is_count = any(word in ("head", "heads", "nhead", "nheads", "nh") for word in words)
    return is_count and not {"dim", "size", "width", "per", "dims"} & set(words)


def _cut_layers(name: str, first: list[str], last: str, cut: TensorCut) -> None:
    cut.styles |= {_join(name, layer): COLWISE for layer in first} | {_join(name, last): ROWWISE}
    cut.checked.append(name)


def _mlp_layers(module: nn.Module) -> tuple[list[str], str] | None:
    """Return the names of an MLP's Linears: those that widen, and the one that comes last; None: no MLP."""
    children = dict(_linears(module))
    if isinstance(module, nn.Sequential):
        return _sequential_mlp(module)
    for name in ("intermediate", "output"):  # BERT: intermediate.dense and output.dense
        child = getattr(module, name, None)
        if isinstance(child, nn.Module) and type(dense := getattr(child, "dense", None)) is nn.Linear:
            children[f"{name}.dense"] = dense
    downs = [name for name in children if name in _DOWN]
    for down in downs:
        last = children[down]
        ups = [
            name
            for name, child in children.items()
            if name in _UP
            and name != down
            and (child.in_features, child.out_features) == (last.out_features, last.in_features)
        ]
        if ups:
            return ups, down
    return None


def _sequential_mlp(module: nn.Sequential) -> tuple[list[str], str] | None:
    layers = list(module.named_children())
    for at, (name, child) in enumerate(layers):
        if type(child) is not nn.Linear:
            continue
        for later_name, later in layers[at + 1 :]:
            if type(later) is nn.Linear and later.in_features == child.out_features:
                return [name], later_name
            if not isinstance(later, _ELEMENTWISE):
                break
    return None


def _keep_one_of_each_kind(module: nn.Module, cut: TensorCut) -> None:
    """Let one module of each kind be checked: equal classes with equal shapes compute alike."""
    seen, kept = set(), []
    for name in dict.fromkeys(cut.checked):
        checked = module.get_submodule(name)
        shapes = tuple((inner, tuple(tensor.shape)) for inner, tensor in checked.named_parameters())
        if (kind := (type(checked), shapes)) not in seen:
            seen.add(kind)
            kept.append(name)
    cut.checked = kept


# ---------------------------------------------------------------------------------------------------------------------
# Cutting


def apply_cut(module: nn.Module, cut: TensorCut, mesh: DeviceMesh, *, whole_biases: bool) -> list[CutCheck]:
    """Cut the layers of a module over a mesh of one axis, in place. Every rank has the same values; nothing is sent.

    Args:
        whole_biases: leave biases whole on every rank. FSDP2 shards what is left, and has only one dim of them for it.

    Returns:
        the checks that are to run with the first forward.
    """
    checks = [CutCheck.prepare(name, module.get_submodule(name), mesh) for name in cut.checked]
    for name, attributes in cut.heads.items():
        for attribute, value in attributes.items():
            setattr(module.get_submodule(name), attribute, value)
    for name, style_name in cut.styles.items():
        layer = module.get_submodule(name)
        bias = layer.bias if isinstance(layer, nn.Linear) else None
        style = STYLES[style_name].make(module.get_submodule(name.rpartition(".")[0]))
        parallelize_module(layer, mesh, style, src_data_rank=None)
        if bias is not None and whole_biases:
            whole = DTensor.from_local(bias.detach(), mesh, [Replicate()], run_check=False)
            layer.register_parameter("bias", nn.Parameter(whole, requires_grad=bias.requires_grad))
    return checks
