"""Windows, scales, biases and vectors against stock transformers code with the same weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from matrix import atol
from tiny_models import difference, harden, tiny_model, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
from hf_posenc.checkpoint.permute import interleaved_order, permute_heads
from hf_posenc.parts import LearnedAbsolute, PositionScale, QueryBias, T5Bias, alibi_slopes
from hf_posenc.runtime.bias import AlibiTerm, PosencQueryBias, PosencT5Bias, t5_bucket
from hf_posenc.runtime.embedding import PosencPositions, sinusoids
from hf_posenc.runtime.scores import position_factor

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str, attn: str = "sdpa", **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **options})
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None)
    model_class = model_class or getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attn).float().eval()
    harden(model)
    return model


@torch.no_grad()
def run(model: Any, length: int = 40) -> torch.Tensor:
    return model(tokens(2, length), use_cache=False).logits


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_sliding_window_is_mistrals(attn: str) -> None:
    model = tiny_model("mistral", attn=attn)
    stock = type(model)._from_config(
        type(model.config)(**{**model.config.to_dict(), "sliding_window": 7}),
        attn_implementation=attn,
    )
    stock.load_state_dict(model.state_dict())
    full = run(model)
    hf_posenc.patch_model(model, "rope", window=7)
    assert torch.equal(run(model), run(stock.eval()))
    assert not torch.equal(run(model), full)


def test_local_and_global_layers_are_gemma3s() -> None:
    options = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
    pattern = ["sliding_attention", "full_attention"] * 2
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    stock = build("Gemma3Text", layer_types=pattern, rope_parameters=ropes, **options)
    plain = {"full_attention": ropes["full_attention"]}
    model = build(
        "Gemma3Text", layer_types=["full_attention"] * 4, rope_parameters=plain, **options
    )
    model.load_state_dict(stock.state_dict())
    assert not torch.equal(run(model), run(stock))
    hf_posenc.patch_model(model, "dual", every=2, theta_local=1e4, theta_global=1e6, window=6)
    assert torch.equal(run(model), run(stock))


def test_gemma4_tables_are_gemma4s() -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = Gemma4TextConfig(num_hidden_layers=6, head_dim=64, global_head_dim=64)
    rotary = Gemma4TextRotaryEmbedding(config)
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    full = config.rope_parameters["full_attention"]
    base = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 6, "head_dim": 64})
    spec = hf_posenc.ModelSpec.from_config(base)
    plan = hf_posenc.make_scheme(
        "gemma4",
        theta_local=local,
        theta_global=full["rope_theta"],
        p=full["partial_rotary_factor"],
        window=config.sliding_window,
    ).build(spec)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert list(config.layer_types) == kinds
    for kind, layer in zip(kinds, plan.layers, strict=True):
        table = getattr(rotary, f"{kind}_inv_freq")
        assert torch.equal(torch.tensor(layer.inv_freq), table)
        assert (layer.window is not None) == (kind == "sliding_attention")
    assert plan.layers[5].num_rotated == 8  # a quarter of 32 pairs, as 64 of 256 at full width


def test_irope_is_llama4s_text_layers() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    shared = {"rms_norm_eps": 1e-6, "rope_parameters": rope}
    stock = build(
        "Llama4Text",
        "eager",
        head_dim=16,
        intermediate_size_mlp=96,
        moe_layers=[],
        use_qk_norm=False,
        attention_chunk_size=5,
        no_rope_layers=[1, 0, 1, 0],
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.3,
        **shared,
    )
    model = build("Llama", "eager", **shared)
    weights = {}
    for name, value in stock.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # Llama 4 rotates neighbours
            order = interleaved_order(16)
            inverse = [order.index(i) for i in range(16)]
            value = permute_heads(value, inverse)
        weights[name.replace("feed_forward.", "mlp.")] = value
    model.load_state_dict(weights)
    hf_posenc.patch_model(model, "irope", every=2, chunk=5, scale_floor=4, scale_alpha=0.3)
    assert difference(run(model), run(stock)) < atol("reordered_sum")


@pytest.mark.parametrize("floor", [4.0, 8192.0])
def test_scale_forms(floor: float) -> None:
    places = torch.arange(0, 100_001, 371)
    seen = places.float() + 1
    llama4 = torch.log1p(torch.floor(seen / floor)) * 0.1 + 1.0
    assert torch.equal(position_factor(PositionScale("llama4", floor), places), llama4)
    inkling = 1.0 + 0.1 * torch.log((seen / floor).clamp(min=1.0))
    assert torch.equal(position_factor(PositionScale("inkling", floor), places), inkling)
    swan = torch.tensor([max(1.0, math.log(floor + n, floor)) for n in places.tolist()])
    torch.testing.assert_close(
        position_factor(PositionScale("log", floor), places), swan, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("heads", [4, 6, 8, 9, 12])
def test_alibi_is_blooms(heads: int) -> None:
    length = 33
    stock = build_alibi_tensor(torch.ones(1, length), heads, torch.float32)
    stock = stock.view(heads, 1, length)
    places = torch.arange(length)
    ours = AlibiTerm(torch.tensor(alibi_slopes(heads))).slab(slice(0, length), places, places)[0]
    causal = places[:, None] >= places[None, :]
    # Bloom adds slope * key position: the same up to a constant of the row, which softmax drops.
    for ours_head, stock_head in zip(ours, stock.expand(-1, length, -1), strict=True):
        scores = torch.randn(length, length)
        a = (scores + ours_head).masked_fill(~causal, -torch.inf).softmax(-1)
        b = (scores + stock_head).masked_fill(~causal, -torch.inf).softmax(-1)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(4) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert alibi_slopes(6) == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))


@torch.no_grad()
def test_alibi_in_bfloat16_is_the_formula_cast_once() -> None:
    model = tiny_model("llama", attn="sdpa", max_position_embeddings=4096).to(torch.bfloat16)
    places = torch.arange(4096)
    slopes = torch.tensor(alibi_slopes(4))
    slab = AlibiTerm(slopes).slab(slice(0, 1), places[-1:], places)
    exact = -slopes.view(4, 1).double() * (4095 - places).double()
    assert torch.equal(slab[0, :, 0].to(torch.bfloat16), exact.to(torch.bfloat16))
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 16), (16, 500)])
def test_t5_buckets_are_t5s(buckets: int, farthest: int) -> None:
    distance = torch.arange(4096)
    stock = T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=buckets, max_distance=farthest
    )
    ours = t5_bucket(distance, buckets, farthest)
    assert torch.equal(ours, stock)
    assert ours[-1] == buckets - 1
    assert torch.equal(t5_bucket(-distance, buckets, farthest), torch.zeros(4096, dtype=torch.long))


@torch.no_grad()
def test_t5_bias_is_the_t5_decoders() -> None:
    config = transformers.T5Config(
        d_model=64, num_heads=4, d_kv=16, relative_attention_num_buckets=32, is_decoder=True
    )
    stock = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    stock.relative_attention_bias.weight.normal_()
    module = PosencT5Bias(T5Bias(32, 128), 4)
    module.weight.copy_(stock.relative_attention_bias.weight)
    places = torch.arange(300)
    ours = module.term(torch.zeros(1, 300, 64)).slab(slice(0, 300), places, places)
    causal = (places[:, None] >= places[None, :])[None, None]
    theirs = stock.compute_bias(300, 300)
    assert torch.equal(ours.masked_fill(~causal, 0.0), theirs.masked_fill(~causal, 0.0))


@torch.no_grad()
def test_query_bias_is_inklings() -> None:
    torch.manual_seed(0)
    module = PosencQueryBias(QueryBias(rank=4, extent=9), 4, 64)
    module.proj.normal_()
    stock = InklingRelativeLogits(4, 9)
    stock.proj.copy_(module.proj)
    hidden = torch.randn(2, 30, 64)
    places = torch.arange(30)
    ours = module.term(hidden).slab(slice(0, 30), places, places)
    relative = torch.nn.functional.linear(hidden, module.relative).view(2, 30, 4, 4)
    assert torch.equal(ours, stock(relative, places, places))
    assert (ours[:, :, 20, :12] == 0).all() and (ours[:, :, 20, 12:21] != 0).any()


@torch.no_grad()
@pytest.mark.parametrize("extent", [1, 9, 40])
@pytest.mark.parametrize("place", [(0, 30, 0), (11, 30, 0), (11, 30, 7), (3, 4, 0)])
def test_query_bias_of_queries_that_come_last(extent: int, place: tuple[int, int, int]) -> None:
    """The shifted band says what the table of distances says: short extents and long, any rows."""
    torch.manual_seed(0)
    module = PosencQueryBias(QueryBias(rank=4, extent=extent), 4, 64)
    module.proj.normal_()
    first, stop, seen = place
    places, rows = torch.arange(stop), slice(first, stop)
    term = module.term(torch.randn(2, 30, 64))
    looked_up = term.slab(rows, places[rows], places[seen:])
    banded = term.slab(rows, places[rows], places[seen:], level=True)
    assert looked_up.shape == banded.shape and (looked_up != 0).any()
    assert difference(looked_up, banded) < atol("reordered_sum")


@torch.no_grad()
def test_alibi_keeps_the_fused_kernel() -> None:
    """Anything else holds the whole score matrix, which is what the two features are there for."""
    model = tiny_model("llama")
    hf_posenc.patch_model(model, "alibi")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert run(model).isfinite().all()


@torch.no_grad()
def test_learned_absolute_is_gpt2s_sum() -> None:
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=64)
    ).eval()
    model = tiny_model("llama")
    hf_posenc.patch_model(model, "learned_absolute", max_positions=64)
    model.model.embed_tokens.weight.copy_(gpt2.wte.weight)
    model.model.posenc_positions.weight.copy_(gpt2.wpe.weight)
    seen: list[torch.Tensor] = []
    model.model.layers[0].input_layernorm.register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    ids = tokens(2, 20)
    run_ids = {"input_ids": ids, "use_cache": False}
    model(**run_ids)
    assert torch.equal(seen[0], gpt2(ids, output_hidden_states=True).hidden_states[0])
    model(inputs_embeds=gpt2.wte(ids), use_cache=False)
    assert torch.equal(seen[1], seen[0])


def test_absolute_vectors_of_the_literature() -> None:
    table = PosencPositions(LearnedAbsolute(2), 3)
    with torch.no_grad():
        table.weight[0] = torch.tensor([1.1, 1.2, 1.3])
        added = torch.ones(3) + table.weight[torch.tensor(0)]
    torch.testing.assert_close(added, torch.tensor([2.1, 2.2, 2.3]))
    vector = sinusoids(torch.tensor(2), 8)
    expected = [math.sin(2), math.cos(2), math.sin(0.2), math.cos(0.2)]
    torch.testing.assert_close(vector[:4], torch.tensor(expected))
    assert [round(x, 3) for x in vector[:4].tolist()] == [0.909, -0.416, 0.199, 0.98]
    # GPT-2 Medium: 1024 learned vectors are 0.30% of its weights, 100k would be over 22%.
    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    with torch.device("meta"):
        total = sum(p.numel() for p in transformers.GPT2LMHeadModel(config).parameters())
    per_position = 1024
    assert round(100 * 1024 * per_position / total, 2) == 0.30
    longer = total + (100_000 - 1024) * per_position
    assert 100 * 100_000 * per_position / longer > 22


def test_rnope_swa_is_cohere2s_layer_pattern() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    shared = {"logit_scale": 0.5, "layer_norm_eps": 1e-5, "rope_parameters": rope}
    pattern = ["sliding_attention"] * 3 + ["full_attention"]
    stock = build("Cohere2", layer_types=pattern, sliding_window=6, **shared)
    model = build("Cohere", **shared)
    model.load_state_dict(stock.state_dict())
    assert not torch.equal(run(model), run(stock))
    hf_posenc.patch_model(model, "rnope_swa", every=4, window=6)
    assert difference(run(model), run(stock)) < atol("kernel")


def test_smollm3_is_nope_interleaved() -> None:
    spec = hf_posenc.ModelSpec.from_model(tiny_model("llama"))
    by_name = hf_posenc.make_scheme("smollm3", every=2).build(spec)
    assert by_name == hf_posenc.make_scheme("nope_interleaved", every=2).build(spec)


@torch.no_grad()
def test_the_causal_mask_alone_counts_the_prefix() -> None:
    # All keys score alike without rotation when q is 0: attention averages over the prefix.
    model = tiny_model("llama")
    hf_posenc.patch_model(model, "nope")
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight.zero_()
    seen: list[torch.Tensor] = []
    attention.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    model.set_attn_implementation("eager")
    model(tokens(1, 4), use_cache=False, output_attentions=True)
    first = seen[0][0, 0, :, 0]
    torch.testing.assert_close(first, torch.tensor([1.0, 1 / 2, 1 / 3, 1 / 4]))
