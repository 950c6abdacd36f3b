"""Models of Hugging Face on the ranks: families by strategies, from a folder and back, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, UsageError
from meshbook.rank.tensors import pretrained
from meshbook.rank.tensors.cut_styles import _GATHERED_BYTES, STYLES, _of_all_ranks, plain_layers
from tests.cli.commands import meshbook as meshbook_command

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")

pytestmark = pytest.mark.usefixtures("starts_meshes")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
IDS = torch.randint(1, 96, (4, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)


def text_batch() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


def class_batch() -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 1, 1, 0])}


def image_batch() -> dict[str, torch.Tensor]:
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1, 0])}


def sound_batch() -> dict[str, torch.Tensor]:
    features = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "labels": IDS}


def family(config: str, model: str, batch: Callable[[], dict[str, torch.Tensor]], **options: Any) -> Any:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options)), batch


GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WHISPER = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 32,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
FAMILIES = {
    "Llama": family("LlamaConfig", "LlamaForCausalLM", text_batch, **GROUPED),
    "Llama, tied": family("LlamaConfig", "LlamaForCausalLM", text_batch, **GROUPED, tie_word_embeddings=True),
    "Qwen3": family("Qwen3Config", "Qwen3ForCausalLM", text_batch, **GROUPED, head_dim=8),
    "Mixtral": family("MixtralConfig", "MixtralForCausalLM", text_batch, **GROUPED, num_local_experts=4),
    "DeepSeek V2": family(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", text_batch,
        **{**GROUPED, "num_key_value_heads": 4, "num_hidden_layers": 3},
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
    ),
    "Phi-3": family("Phi3Config", "Phi3ForCausalLM", text_batch, **GROUPED, attention_dropout=0.0),
    "Gemma2": family("Gemma2Config", "Gemma2ForCausalLM", text_batch, **GROUPED, head_dim=8),
    "GPT-2": family("GPT2Config", "GPT2LMHeadModel", text_batch, **GPT2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0),
    "OPT": family(
        "OPTConfig", "OPTForCausalLM", text_batch, vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, pad_token_id=0,
    ),
    "BERT": family("BertConfig", "BertForSequenceClassification", class_batch, **SIZES, **NO_DROPOUT),
    "Nomic BERT": family("NomicBertConfig", "NomicBertForSequenceClassification", class_batch, **SIZES, **NO_DROPOUT),
    "ViT": family(
        "ViTConfig", "ViTForImageClassification", image_batch, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4, **NO_DROPOUT,
    ),
    "Whisper": family("WhisperConfig", "WhisperForConditionalGeneration", sound_batch, **WHISPER),
    "T5": family(
        "T5Config", "T5ForConditionalGeneration", text_batch, vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=3,
        num_heads=4, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
    ),
}  # fmt: skip
WRITERS = ("Llama", "Llama, tied", "Qwen3", "Mixtral", "DeepSeek V2", "Gemma2", "Phi-3", "GPT-2", "OPT", "T5")


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def make(name: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[name][0]().eval()


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def check_training(model: Any, plain: Any, name: str) -> None:
    """Check that a step's loss and gradients are those of one process, whose batch is cut over the ranks."""
    batch = FAMILIES[name][1]()
    expected = plain(**batch)
    expected.loss.backward()
    found = model(**batch)
    found.loss.backward()
    assert type(found) is type(expected)
    torch.testing.assert_close(found.loss.full_tensor().detach(), expected.loss.detach(), rtol=1e-5, atol=1e-6)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for full, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[full].full_tensor(), parameter.grad, rtol=2e-4, atol=1e-6)


def losses_of(model: Any, after_step: Callable[[], object] = lambda: None) -> list[float]:
    """Return the losses of three steps."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**text_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        losses.append(float(loss.detach()))
    return losses


def pairs() -> list[Any]:
    shown = {
        ("Llama", "fsdp"),
        ("Llama, tied", "ddp"),
        ("GPT-2", "tp"),
        ("Mixtral", "tp"),
        ("BERT", "ddp"),
        ("Nomic BERT", "fsdp"),
        ("Llama, tied", "pp"),
    }
    found = [(name, strategy) for name in FAMILIES for strategy in ("ddp", "fsdp", "tp", "pp")]
    return [pytest.param(*pair, marks=() if pair in shown else pytest.mark.thorough) for pair in found]


@pytest.mark.parametrize(("name", "strategy"), pairs())
def test_a_model_from_a_folder_trains_writes_and_is_saved_as_in_one_process(
    name: str, strategy: str, mesh2: Mesh, tmp_path: Path
) -> None:
    plain = make(name)
    axis = {"axis": "dp"} if strategy in ("tp", "pp") else {}
    model = meshbook.distribute(save(plain, tmp_path / "here"), mesh2, strategy=strategy, **axis)
    assert not model.training  # as from_pretrained gives it
    if name in WRITERS:
        for options in ({"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 2}):
            torch.manual_seed(5)
            expected = plain.generate(IDS[:2], attention_mask=MASK[:2], max_new_tokens=5, **options)
            numbers = torch.rand(2)
            torch.manual_seed(5)
            found = model.generate(IDS[:2], attention_mask=MASK[:2], max_new_tokens=5, **options)
            assert torch.equal(found, expected)
            assert torch.equal(torch.rand(2), numbers)  # as if it had been sampled here
    check_training(model, plain, name)
    model.save_pretrained(tmp_path / "there")
    back = type(plain).from_pretrained(tmp_path / "there")
    for full, tensor in plain.state_dict().items():
        assert torch.equal(back.state_dict()[full], tensor)


@pytest.mark.parametrize("strategy", ["fsdp+tp", pytest.param("hsdp", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name", [name if name == "Llama, tied" else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_two_axes_give_what_one_process_gives(name: str, strategy: str, mesh22: Mesh, tmp_path: Path) -> None:
    plain = make(name)
    plan = meshbook.Plan(ddp="dp", fsdp="tp") if strategy == "hsdp" else strategy
    model = meshbook.distribute(save(plain, tmp_path / "here"), mesh22, strategy=plan)
    if name in WRITERS:
        expected = plain.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False), expected)
    check_training(model, plain, name)
    back = type(plain).from_pretrained(save(model, tmp_path / "there")).state_dict()
    for full, tensor in plain.state_dict().items():
        assert torch.equal(back[full], tensor)


def without_choice() -> Any:
    """Return a Mixtral that computes expert by expert, and sends all tokens to the first two."""
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4, experts_implementation="eager")
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.zero_()
    return model


def test_a_rank_whose_experts_get_no_token_takes_part_in_the_step(mesh2: Mesh) -> None:
    plain, batch = without_choice(), text_batch()
    model = meshbook.distribute(without_choice, mesh2, strategy="tp", axis="dp")
    plain(**batch).loss.backward()
    model(**batch).loss.backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name].grad, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Gemma2", pytest.param("Whisper", marks=pytest.mark.thorough)])
def test_blocks_that_are_computed_again_fill_no_cache(name: str, mesh2: Mesh) -> None:
    plain = make(name)
    check_training(meshbook.distribute(plain, mesh2, strategy=meshbook.Plan(fsdp="dp", ac="every block")), plain, name)


# Has a rank note the most bytes that it holds at one time of what it gathers for files, and makes of that.
COUNT_GATHERED = """
import weakref
from torch.distributed.tensor import DTensor
from meshbook.rank.tensors.file_tensors import GatheredTensors
gather, compute = DTensor.full_tensor, GatheredTensors.compute
held, most = {}, 0
def count(tensor):
    global most
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in held:
        weakref.finalize(storage, held.pop, storage.data_ptr())
        held[storage.data_ptr()] = storage.nbytes()
        most = max(most, sum(held.values()))
    return tensor
DTensor.full_tensor = lambda self: count(gather(self).clone())
GatheredTensors.compute = lambda self, what: [count(tensor) for tensor in compute(self, what)]
"""


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("tp", marks=pytest.mark.thorough), "pp"])
@pytest.mark.parametrize("name", ["Llama, tied", "Mixtral"])
def test_the_rank_that_saves_a_model_gathers_what_one_file_takes(
    name: str, strategy: str, mesh2: Mesh, tmp_path: Path
) -> None:
    plain, file_size = make(name), 30_000
    model = meshbook.distribute(make(name), mesh2, strategy=strategy, axis="dp")
    mesh2.run(COUNT_GATHERED)
    try:
        model.save_pretrained(tmp_path, max_shard_size=file_size)
        most = mesh2.run("most").values
    finally:
        mesh2.run("DTensor.full_tensor, GatheredTensors.compute = gather, compute")
    sizes = [tensor.nbytes for tensor in plain.parameters()]
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) >= sum(sizes) / file_size
    assert 0 < most[0] <= file_size + 2 * max(sizes) < sum(sizes)  # a file, a tensor and what is made of it
    assert 0 < most[1] <= max(sizes)
    back = type(plain).from_pretrained(tmp_path)
    for full, tensor in plain.state_dict().items():
        assert torch.equal(back.state_dict()[full], tensor)


def test_a_model_is_saved_to_the_folder_that_it_was_read_from(mesh2: Mesh, tmp_path: Path) -> None:
    plain = make("Llama")
    model = meshbook.distribute(save(plain, tmp_path), mesh2, strategy="fsdp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(tmp_path)
    back = type(plain).from_pretrained(tmp_path).state_dict()
    for full, tensor in plain.state_dict().items():
        assert torch.equal(back[full], 2 * tensor)


def test_a_save_that_fails_ends_on_all_ranks_and_the_next_one_is_right(mesh2: Mesh, tmp_path: Path) -> None:
    plain = make("Llama")
    model = meshbook.distribute(make("Llama"), mesh2, strategy="fsdp")
    (tmp_path / "file").touch()
    with pytest.raises(CellError, match="NotADirectoryError"):
        model.save_pretrained(tmp_path / "file" / "folder")
    back = type(plain).from_pretrained(save(model, tmp_path / "folder")).state_dict()
    for full, tensor in plain.state_dict().items():
        assert torch.equal(back[full], tensor)


class Emptied(torch.nn.Sequential):
    """Writes into what it saves, of which nothing would come into the file."""

    def save_pretrained(self, folder: str, state_dict: Any) -> None:
        torch.save({name: tensor.T for name, tensor in state_dict.items()}, folder)
        next(iter(state_dict.values())).zero_()


def test_a_save_of_ones_own_gets_tensors_that_torch_saves_and_that_nothing_is_written_into(
    mesh2: Mesh, tmp_path: Path
) -> None:
    plain = Emptied(torch.nn.Linear(4, 6, bias=False))
    model = meshbook.distribute(plain, mesh2, strategy="fsdp")
    with pytest.raises(CellError, match=r"runs aten.zero_.default on a tensor that lies on several ranks"):
        model.save_pretrained(tmp_path / "file")
    assert torch.equal(torch.load(tmp_path / "file")["0.weight"], plain[0].weight.T)


@pytest.mark.parametrize("name", ["streamer", "assistant_model"])
def test_what_generate_would_use_here_is_refused(name: str, mesh2: Mesh) -> None:
    model = meshbook.distribute(make("Llama"), mesh2, strategy="fsdp")
    with pytest.raises(UsageError, match=f"{name}= is here, and generate runs on the ranks"):
        model.generate(IDS, max_new_tokens=2, **{name: object()})


def test_a_step_after_generate_is_that_of_one_process(mesh2: Mesh, tmp_path: Path) -> None:
    plain = make("Llama")
    model = meshbook.distribute(save(plain, tmp_path), mesh2, strategy="fsdp")
    write = {"input_ids": IDS[:1], "attention_mask": MASK[:1], "max_new_tokens": 3, "do_sample": False}
    found = losses_of(model, lambda: model.generate(**write))
    assert found == pytest.approx(losses_of(plain), rel=1e-4)


def test_parts_in_another_mode_than_the_whole_keep_it_when_the_model_writes() -> None:
    model = make("Llama").train()
    model.lm_head.eval()
    options = {"attention_mask": MASK, "max_new_tokens": 2, "do_sample": False}
    pretrained.generate(model, torch.get_rng_state(), (IDS,), options)
    assert (model.training, model.lm_head.training) == (True, False)


CUT_LAYERS = {"table": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}


def compare_cut_layers(num_tokens: int) -> None:
    """On a rank: layers that are cut give without DTensors what whole ones give, the same bits on each rank."""
    torch.manual_seed(0)
    layers = nn.ModuleDict(
        {"table": nn.Embedding(12, 8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "head": nn.Linear(8, 6)}
    )
    ids = torch.arange(num_tokens).view(2, -1) % 12

    def compute() -> torch.Tensor:
        return layers["head"](layers["down"](layers["up"](layers["table"](ids)).relu()))  # type: ignore[no-any-return]

    with torch.no_grad():
        whole = compute()
        ranks = DeviceMesh("cpu", range(torch.distributed.get_world_size()), mesh_dim_names=("tp",))
        for name, style in CUT_LAYERS.items():
            parallelize_module(layers[name], ranks, STYLES[style].make(layers), src_data_rank=None)
        with plain_layers(layers, CUT_LAYERS, ranks):
            assert not any(layer._forward_hooks for layer in layers.values())
            found = compute()
    torch.testing.assert_close(found, whole)
    assert all(torch.equal(found, other) for other in _of_all_ranks(found, ranks.get_group()))


def test_cut_layers_give_the_same_numbers_without_dtensors_for_few_tokens_and_for_many(mesh2: Mesh) -> None:
    mesh2.execute(compare_cut_layers, 6)
    mesh2.execute(compare_cut_layers, _GATHERED_BYTES)  # more bytes than are gathered


def test_a_cache_stays_on_the_ranks_and_is_given_back_to_the_model(mesh2: Mesh) -> None:
    plain = make("Llama")
    model = meshbook.distribute(plain, mesh2, strategy="ddp")
    with torch.no_grad():
        first = model(input_ids=IDS[:, :6])
        assert repr(first.past_key_values) == "RemoteObject(DynamicCache on the ranks)"
        found = model(input_ids=IDS[:, 6:7], past_key_values=first.past_key_values).logits
        expected = plain(input_ids=IDS[:, :7]).logits[:, -1:]
    torch.testing.assert_close(found.full_tensor(), expected)
    options = {"attention_mask": MASK[:, :8], "max_new_tokens": 3, "do_sample": False}
    written = model.generate(IDS[:, :8], past_key_values=first.past_key_values, **options)
    assert torch.equal(written, plain.generate(IDS[:, :8], **options))
    with pytest.raises(AttributeError, match="this DynamicCache stays on the ranks"):
        first.past_key_values.get_seq_length()


# Has a rank note how many positions its stage computes in each forward, and how wide the keys of each layer are.
WATCH_CACHES = """
from meshbook.rank.tensors.pipeline import StageRun
forward, positions, widths = StageRun.forward, [], []
def watched(self, hidden, **options):
    found = forward(self, hidden, **options)
    positions.append(hidden.shape[1])
    layers = [layer for cache in self._calls[0].caches for layer in cache.layers]
    widths[:] = [0 if layer.keys is None else layer.keys.shape[-1] for layer in layers]
    return found
StageRun.forward = watched
"""


def test_each_stage_keeps_the_keys_of_its_own_blocks_and_computes_each_position_once(mesh2: Mesh) -> None:
    plain = make("Llama")
    model = meshbook.distribute(make("Llama"), mesh2, strategy="pp", axis="dp")
    write: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    expected = plain.generate(IDS, **write)
    mesh2.run(WATCH_CACHES)
    try:
        assert torch.equal(model.generate(IDS, **write), expected)
        assert mesh2.run("positions").values == {0: [10, 1, 1, 1], 1: [10, 1, 1, 1]}
        assert mesh2.run("widths").values == {0: [8, 1], 1: [1, 8]}  # one number stands for the others' keys
        mesh2.run("positions.clear()")
        assert torch.equal(model.generate(IDS, use_cache=False, **write), expected)
        assert mesh2.run("positions").values[0] == [10, 11, 12, 13]
    finally:
        mesh2.run("StageRun.forward = forward")
    found = model.generate(IDS, return_dict_in_generate=True, output_logits=True, **write)
    assert torch.equal(found.sequences, expected)
    assert not {"cache", "past_key_values"}.intersection(found)
    check_training(model, plain, "Llama")
    with pytest.raises(CellError, match=r"use_cache is of every block"):
        model(input_ids=IDS, use_cache=True)
    with pytest.raises(CellError, match=r"cache is of every block"):
        model(input_ids=IDS, cache=transformers.DynamicCache())
    with pytest.raises(CellError, match=r"makes the cache of its own blocks; leave it out"):
        model.generate(IDS, past_key_values=transformers.DynamicCache(), **write)
    with pytest.raises(CellError, match=r"a StaticCache of StaticLayer(.|\n)*give use_cache=False"):
        model.generate(IDS, cache_implementation="static", disable_compile=True, **write)
    assert torch.equal(model.generate(IDS, **write), expected)


def test_stages_write_what_one_process_writes_of_padded_rows_within_a_sliding_window(mesh2: Mesh) -> None:
    sizes = {**GROUPED, "num_hidden_layers": 5}

    def windowed() -> Any:
        torch.manual_seed(0)
        config = transformers.Gemma2Config(**sizes, head_dim=8, sliding_window=4)
        return transformers.Gemma2ForCausalLM(config).eval()

    plain = windowed()
    model = meshbook.distribute(windowed, mesh2, strategy="pp", axis="dp")
    mask = torch.stack([torch.arange(10) >= blank for blank in (0, 3, 5, 8)]).long()
    for options in ({"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}):
        torch.manual_seed(1)
        expected = plain.generate(IDS, attention_mask=mask, max_new_tokens=9, **options)
        torch.manual_seed(1)
        assert torch.equal(model.generate(IDS, attention_mask=mask, max_new_tokens=9, **options), expected)


def adapted(folder: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return peft.get_peft_model(model, options)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of peft
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_an_adapter_writes_trains_alone_and_is_saved_alone(strategy: str, mesh2: Mesh, tmp_path: Path) -> None:
    folder = save(make("Llama"), tmp_path / "here")
    plain, model = adapted(folder), meshbook.distribute(lambda: adapted(folder), mesh2, strategy=strategy)
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**options), plain.generate(**options))  # before any forward of the whole
    assert losses_of(model) == pytest.approx(losses_of(plain), rel=1e-4)
    assert torch.equal(model.generate(**options), plain.generate(**options))
    model.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    back = pytest.importorskip("peft").PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()
    for full, tensor in plain.state_dict().items():
        torch.testing.assert_close(back[full], tensor, rtol=1e-4, atol=1e-5)


def test_a_dtype_is_converted_to_and_kept_where_none_is_said(mesh2: Mesh, tmp_path: Path) -> None:
    folder = save(make("Llama").bfloat16(), tmp_path)
    assert next(meshbook.distribute(folder, mesh2).parameters()).dtype == torch.bfloat16
    assert next(meshbook.distribute(folder, mesh2, dtype=torch.float32).parameters()).dtype == torch.float32
    with pytest.raises(UsageError, match="dtype= is for models that are read from a folder"):
        meshbook.distribute(torch.nn.Linear(2, 2), mesh2, dtype=torch.float32)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_plans_are_compared_for_a_model_in_a_folder(name: str, mesh2: Mesh, tmp_path: Path) -> None:
    folder = save(make(name), tmp_path)
    model = meshbook.distribute(folder, mesh2, strategy=meshbook.Plan(tp="dp"), sample=text_batch())
    assert "fsdp over dp=2" in str(model.plan)
    assert "tp over dp=2" in str(model.plan)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("Mixtral", {"num_local_experts": 3}, r"3 experts of model\.layers\.0\.mlp\.experts over tp=2: 3 = 1 x 2 \+ 1"),
        ("GPT-2", {"n_embd": 30, "n_head": 3}, r"3 heads over tp=2: 3 = 1 x 2 \+ 1"),
    ],
)
def test_what_cannot_be_cut_evenly_shows_the_sum(name: str, change: dict[str, int], says: str, mesh2: Mesh) -> None:
    config = type(make(name).config)(**{**(GPT2 if name == "GPT-2" else GROUPED), **change})
    with pytest.raises(CellError, match=says):
        meshbook.distribute(
            lambda: transformers.AutoModelForCausalLM.from_config(config), mesh2, strategy="tp", axis="dp"
        )


def test_a_word_of_a_table_that_is_not_known_names_what_to_give(mesh2: Mesh) -> None:
    plan = meshbook.Plan(tp="dp", tp_plan={"model.layers.*.mlp": "sequence_parallel"})
    with pytest.raises(
        CellError, match=r'model\.layers\.0\.mlp: tp_plan has "sequence_parallel"(.|\n)*Give the layers'
    ):
        meshbook.distribute(make("Llama"), mesh2, strategy=plan)
    plan = meshbook.Plan(tp="dp", tp_plan={"model.layers.*.mlp.up_proj.weight": "colwise"})
    with pytest.raises(CellError, match=r"parameters that are no layer's are not cut"):
        meshbook.distribute(make("Llama"), mesh2, strategy=plan)


@pytest.mark.thorough
def test_the_notebook_trains_writes_saves_and_reads_with_another_plan(tmp_path: Path) -> None:
    notebook = Path(__file__).resolve().parent.parent.parent / "notebooks" / "fine_tune_a_model.ipynb"
    done = meshbook_command("run", str(notebook), "--out", str(tmp_path), cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "one process writes the same" in done.out
    assert "self_attn.o_proj is cut rowwise" in done.out


def test_what_is_no_model_says_what_to_give(mesh2: Mesh, tmp_path: Path) -> None:
    with pytest.raises(CellError, match=r"is no folder on this machine(.|\n)*Give the path of a folder"):
        meshbook.distribute(str(tmp_path / "none"), mesh2)
    with pytest.raises(CellError, match=f"the folder {tmp_path} cannot be read as a model"):
        meshbook.distribute(tmp_path, mesh2)
    save(make("Llama"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaForNothing"))
    with pytest.raises(CellError, match=r"is of the class LlamaForNothing, which transformers .* does not have"):
        meshbook.distribute(tmp_path, mesh2)
    plain = meshbook.distribute(lambda: torch.nn.Linear(2, 2), mesh2)
    with pytest.raises(CellError, match=r"a FSDPLinear has no generate\(\)|a Linear has no generate\(\)"):
        plain.generate(IDS)
    with pytest.raises(CellError, match=r"has no save_pretrained\(\)(.|\n)*state_dict\(full=True\)"):
        plain.save_pretrained(tmp_path / "other")
