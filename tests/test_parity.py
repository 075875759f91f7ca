"""Converted models against stock transformers models that compute the same encoding.

Same weights, other code: what stock architectures can express must come out of a patched model bit
for bit, at positions up to 100 000, with random biases and norms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix import FAMILIES
from patching import FULL_ROW, assert_equal, converted
from tiny_models import (
    HARD_POSITIONS,
    MAX_POSITIONS,
    THETA,
    difference,
    layer_tables,
    logits,
    rebuilt,
    tiny_config,
    tiny_model,
    tokens,
    with_rope,
)
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_posenc
from hf_posenc import ModelSpec

# Families with one table for all layers, whose config takes any rope_parameters.
FLAT = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")


@pytest.fixture(scope="module", params=FLAT)
def base(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def stock_with(base: Any, **rope_parameters: Any) -> Any:
    return rebuilt(with_rope(base.config, **rope_parameters), base.state_dict())


@pytest.mark.parametrize("p", [1.0, 0.75, 0.5, 0.25, 0.3])
def test_p_rope_is_stock_proportional(base: Any, p: float):
    stock = stock_with(base, rope_type="proportional", partial_rotary_factor=p)
    assert_equal(converted(base, "p_rope", p=p), stock)


def test_nope_is_stock_proportional_that_keeps_nothing(base: Any):
    stock = stock_with(base, rope_type="proportional", partial_rotary_factor=0.0)
    assert_equal(converted(base, "nope"), stock)


def ones(count: int, step: float) -> list[float]:
    return [1.0 + step * i for i in range(count)]


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e4},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-tuned": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": MAX_POSITIONS},
    "longrope-early": {"attention_factor": 0.9, "original_max_position_embeddings": 64},
}


def scaling(name: str, base: Any) -> dict[str, Any]:
    """rope_parameters of a scaling, without theta unless it is the point."""
    rope_type = name.partition("-")[0]
    result = {"rope_type": rope_type, **SCALINGS[name]}
    if rope_type == "longrope":
        count = ModelSpec.from_model(base).num_frequencies
        result |= {"short_factor": ones(count, 0.01), "long_factor": ones(count, 0.5)}
    return result


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_with_scaling_is_stock(base: Any, name: str):
    parameters = scaling(name, base)
    stock = stock_with(base, **parameters)
    theta = parameters.pop("rope_theta", None)
    patched = converted(base, "rope", scaling=parameters, theta=theta)
    hard = logits(patched)
    assert not torch.equal(hard, logits(base))
    assert torch.equal(hard, logits(stock))
    original = parameters.get("original_max_position_embeddings", MAX_POSITIONS)
    for length in (original - 1, original, original + 1):
        row = FULL_ROW[:, :length]
        fresh = stock_with(base, **{"rope_theta": theta or THETA, **parameters})
        assert torch.equal(logits(patched, row, None), logits(fresh, row, None)), length


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaled_checkpoint_keeps_its_own_frequencies(base: Any, name: str):
    scaled = stock_with(base, **scaling(name, base))
    assert_equal(converted(scaled, "rope"), scaled)
    kept = [
        layer.num_rotated for layer in hf_posenc.get_plan(converted(scaled, "p_rope", p=0.5)).layers
    ]
    own = ModelSpec.from_model(scaled)
    assert kept == [own.num_frequencies // 2 if layer.rotated else 0 for layer in own.layers]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_one_long_row_in_a_batch_and_a_cache_that_grows_past_the_trained_length(
    base: Any, name: str
):
    parameters = scaling(name, base)
    patched = converted(base, "rope", scaling=parameters)
    ids = tokens(2, 12)
    short, long = list(range(12)), list(range(MAX_POSITIONS - 4, MAX_POSITIONS + 8))
    inputs = {"position_ids": torch.tensor([short, long]), "attention_mask": torch.ones_like(ids)}
    stock = stock_with(base, **parameters)
    assert torch.equal(logits(patched, ids, None, **inputs), logits(stock, ids, None, **inputs))
    alone = logits(patched, ids[:1], short)
    assert difference(logits(patched, ids, None, **inputs)[:1], alone) > 1e-3  # as stock has it

    row = FULL_ROW[:, : MAX_POSITIONS + 3]
    stock = stock_with(base, **parameters)
    with torch.no_grad():
        for model in (patched, stock):
            cache = DynamicCache(config=model.config)
            model(row[:, : MAX_POSITIONS - 3], cache=cache, use_cache=True)
            steps = [
                model(row[:, i : i + 1], cache=cache, use_cache=True).logits
                for i in range(MAX_POSITIONS - 3, MAX_POSITIONS + 3)
            ]
            if model is patched:
                wanted = torch.cat(steps)
    assert torch.equal(torch.cat(steps), wanted)


def test_static_ntk_is_stock_rope_at_the_stretched_theta(base: Any):
    width = ModelSpec.from_model(base).rotary_dim
    stock = stock_with(base, rope_type="default", rope_theta=THETA * 4.0 ** (width / (width - 2)))
    assert_equal(converted(base, "rope", scaling="ntk:4"), stock)


# NoPE in some layers: SmolLM3 (llama, mistral, qwen2 weights) and Mellum (qwen3 weights).


def smollm3_twin(base: Any, rotated: list[int]) -> Any:
    config = base.config
    bias = config.model_type == "qwen2"
    stock = tiny_config(
        "smollm3",
        num_hidden_layers=config.num_hidden_layers,
        head_dim=getattr(config, "head_dim", None) or 16,
        no_rope_layers=rotated,
        attention_bias=bias,
        rms_norm_eps=config.rms_norm_eps,
        use_sliding_window=False,
    )
    weights = dict(base.state_dict())
    if bias:
        for index in range(config.num_hidden_layers):
            weights[f"model.layers.{index}.self_attn.o_proj.bias"] = torch.zeros(64)
    return rebuilt(stock, weights)


def mellum_twin(base: Any, full: list[int], **rope: dict[str, Any]) -> Any:
    config = base.config
    experts = config.model_type == "qwen3_moe"
    layer_types = ["full_attention" if flag else "sliding_attention" for flag in full]
    from transformers import MellumConfig

    stock = MellumConfig(
        **{
            key: getattr(config, key)
            for key in (
                *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
                *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
                *("tie_word_embeddings", "max_position_embeddings", "pad_token_id"),
            )
        },
        **(
            {
                key: getattr(config, key)
                for key in (
                    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
                    "norm_topk_prob",
                )
            }
            if experts
            else {}
        ),
        rope_parameters=rope,
        layer_types=layer_types,
        mlp_layer_types=["sparse" if experts else "dense"] * len(full),
        sliding_window=1_000_000,
    )
    return rebuilt(stock, base.state_dict())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(
    ("options", "rotated"),
    [
        ({"every": 4}, [1, 1, 1, 0, 1, 1, 1, 0]),
        ({"every": 4, "offset": 0}, [0, 1, 1, 1, 0, 1, 1, 1]),
        ({"every": 3}, [1, 1, 0, 1, 1, 0, 1, 1]),
        ({"layers": [1, 2, 6]}, [1, 0, 0, 1, 1, 1, 0, 1]),
    ],
    ids=["every4", "offset0", "every3", "layers"],
)
def test_nope_interleaved_is_stock_smollm3(family: str, options: dict, rotated: list[int]):
    base = tiny_model(family, num_hidden_layers=8)
    patched = converted(base, "nope_interleaved", **options)
    assert [int(layer.rotated) for layer in hf_posenc.get_plan(patched).layers] == rotated
    stock = smollm3_twin(base, rotated)
    assert_equal(patched, stock)
    # ... and back: the stock SmolLM3 is its own plan.
    assert ModelSpec.from_model(stock).layers == hf_posenc.get_plan(patched).layers
    assert_equal(converted(stock, "rope"), stock)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_nope_interleaved_is_stock_mellum(family: str):
    base = tiny_model(family)
    stock = mellum_twin(
        base,
        [0, 1, 0, 1],
        full_attention={
            "rope_type": "proportional",
            "rope_theta": THETA,
            "partial_rotary_factor": 0.0,
        },
        sliding_attention={"rope_type": "default", "rope_theta": THETA},
    )
    assert_equal(converted(base, "nope_interleaved", every=2), stock)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_dual_is_stock_mellum(family: str):
    base = tiny_model(family)
    stock = mellum_twin(
        base,
        [0, 1, 0, 1],
        full_attention={
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
        sliding_attention={"rope_type": "default", "rope_theta": 1e4},
    )
    patched = converted(base, "dual", every=2, theta_local=1e4, theta_global=1e6, p_global=0.5)
    assert_equal(patched, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_dual_hands_every_layer_the_stock_table_of_its_base(family: str):
    base = tiny_model(family, num_hidden_layers=6)
    patched = converted(base, "dual", every=3, theta_local=1e4, theta_global=1e6)
    rotated = [layer.rotated for layer in ModelSpec.from_model(base).layers]
    positions = torch.tensor([HARD_POSITIONS])
    for index, table in enumerate(layer_tables(patched)):
        theta = 1e6 if index in (2, 5) else 1e4
        config = tiny_config(
            "llama",
            head_dim=ModelSpec.from_model(base).head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
        stock = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        if not rotated[index]:  # SmolLM3's own NoPE layers stay unrotated
            stock = (torch.ones_like(stock[0]), torch.zeros_like(stock[1]))
        assert torch.equal(table[0], stock[0]) and torch.equal(table[1], stock[1]), index
