"""Converted models against stock transformers models that compute the same encoding.

Same weights, other code: what stock architectures can express must come out of a patched model bit
for bit, at positions up to 100 000, with random biases and norms. Where features of a head are
summed in another order, `matrix.TOLERANCES` says how far apart the two may be.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrix import FAMILIES, atol
from patching import patch
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
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_posenc
from hf_posenc import ModelSpec, make_scheme
from hf_posenc.checkpoint.permute import interleaved_order, permute_heads

# Families with one table for all layers, whose config takes any rope_parameters.
FLAT = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
FULL_ROW = tokens(1, MAX_POSITIONS + 44)


@pytest.fixture(scope="module", params=FLAT)
def base(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def converted(base: Any, scheme: Any, **options: Any) -> Any:
    return hf_posenc.patch_model(copy.deepcopy(base), scheme, **options)


def assert_equal(patched: Any, stock: Any) -> None:
    """Bitwise equal logits at hard positions and in a row beyond the trained length."""
    fresh = copy.deepcopy(stock)  # stock dynamic NTK remembers the longest row it has seen
    assert torch.equal(logits(patched), logits(stock))
    assert torch.equal(logits(patched, FULL_ROW, None), logits(fresh, FULL_ROW, None))


def assert_close(patched: Any, stock: Any) -> None:
    """Equal up to the order of a sum over the features of a head."""
    assert difference(logits(patched), logits(stock)) <= atol("reordered_sum")
    long = difference(logits(patched, FULL_ROW, None), logits(stock, FULL_ROW, None))
    assert long <= atol("reordered_long_sum")


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


# Partial RoPE: Glm4Moe with dense layers has Llama's (use_qk_norm: Qwen3's) modules and names.


def glm4_twin(base: Any, fraction: float, order: tuple[int, ...] | None) -> Any:
    config = base.config
    head_dim = getattr(config, "head_dim", None) or 16
    stock = tiny_config(
        "glm4_moe",
        head_dim=head_dim,
        use_qk_norm=config.model_type == "qwen3",
        attention_bias=config.model_type == "qwen2",
        rms_norm_eps=config.rms_norm_eps,
        partial_rotary_factor=fraction,
    )
    moved = (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")
    weights = {
        name: permute_heads(value, order) if order and any(m in name for m in moved) else value
        for name, value in base.state_dict().items()
    }
    return rebuilt(stock, weights)


def matched_order(base: Any, fraction: float) -> tuple[int, ...]:
    """Features so that a stock partial family pairs what `matched` pairs: kept pairs first."""
    spec = ModelSpec.from_model(base)
    layer = make_scheme("partial", fraction=fraction).build(spec).layers[0]
    kept = [i for i, value in enumerate(layer.inv_freq) if value]
    rest = [i for i, value in enumerate(layer.inv_freq) if not value]
    total = spec.num_frequencies
    return (*kept, *(total + i for i in kept), *rest, *(total + i for i in rest))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.75])
@pytest.mark.parametrize("pairs", ["raw", "matched"])
def test_partial_is_stock_glm4_moe(family: str, fraction: float, pairs: str):
    base = tiny_model(family)
    patched = converted(base, "partial", fraction=fraction, pairs=pairs)
    order = matched_order(base, fraction) if pairs == "matched" else None
    stock = glm4_twin(base, fraction, order)
    assert difference(logits(patched), logits(base)) > 1e-2
    assert_close(patched, stock)
    # The tables themselves are the stock ones bit for bit, spread over the full head.
    plan = hf_posenc.get_plan(patched)
    frequencies = torch.tensor([value for value in plan.layers[0].inv_freq if value])
    assert torch.equal(frequencies, stock.model.rotary_emb.inv_freq)


def test_partial_raw_is_stock_stablelm():
    base = tiny_model("stablelm")
    config = with_rope(base.config, rope_type="default", partial_rotary_factor=0.5)
    stock = rebuilt(config, base.state_dict())
    patched = converted(base, "partial", pairs="raw")
    assert difference(logits(patched), logits(base)) > 1e-2
    assert_close(patched, stock)


# Interleaved pairs: Ernie 4.5 (llama weights) and GLM (qwen2 weights, fused MLP).


def ernie_twin(base: Any, weights: dict[str, torch.Tensor]) -> Any:
    stock = tiny_config(
        "ernie4_5",
        head_dim=base.config.head_dim,
        use_bias=False,
        rms_norm_eps=base.config.rms_norm_eps,
    )
    return rebuilt(stock, weights)


def glm_twin(base: Any, weights: dict[str, torch.Tensor]) -> Any:
    stock = tiny_config(
        "glm",
        head_dim=16,
        attention_bias=True,
        partial_rotary_factor=1.0,
        rms_norm_eps=base.config.rms_norm_eps,
    )
    fused = {name: value for name, value in weights.items() if "gate_proj" not in name}
    for name in [name for name in fused if "up_proj" in name]:
        gate = weights[name.replace("up_proj", "gate_proj")]
        fused[name.replace("up_proj", "gate_up_proj")] = torch.cat((gate, fused.pop(name)))
    return rebuilt(stock, fused)


TWINS = {"llama": ernie_twin, "mistral": ernie_twin, "qwen2": glm_twin}


def saved_weights(model: Any, folder: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", TWINS)
def test_interleaved_preserved_stores_what_a_stock_interleaved_family_reads(family: str, tmp_path):
    base = tiny_model(family)
    patched = patch(copy.deepcopy(base), "interleaved")
    assert torch.equal(logits(patched), logits(base))
    stored = saved_weights(patched, tmp_path)
    assert not torch.equal(
        stored["model.layers.0.self_attn.k_proj.weight"],
        base.state_dict()["model.layers.0.self_attn.k_proj.weight"],
    )
    assert_close(base, TWINS[family](base, stored))


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_preserved_permutes_biases_norms_and_kv_heads_in_store(family: str, tmp_path):
    base = tiny_model(family)
    stored = saved_weights(patch(copy.deepcopy(base), "interleaved"), tmp_path)
    order = interleaved_order(ModelSpec.from_model(base).head_dim)
    moved = 0
    for name, value in base.state_dict().items():
        if ".experts." in name:
            continue  # stored one by one
        if any(f".{part}." in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            moved += 1
            value = permute_heads(value, order)
        assert torch.equal(stored[name], value), name
    assert moved == 4 * (2 + 2 * (family in ("qwen2", "qwen3", "qwen3_moe")))


@pytest.mark.parametrize("family", TWINS)
def test_interleaved_repaired_is_the_stock_interleaved_family_on_the_base_weights(
    family: str, tmp_path
):
    base = tiny_model(family)
    patched = patch(copy.deepcopy(base), "interleaved-repaired")
    stock = TWINS[family](base, base.state_dict())
    assert difference(logits(patched), logits(base)) > 1e-2
    assert_close(patched, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_repaired_stores_the_base_weights_bit_for_bit(family: str, tmp_path):
    base = tiny_model(family)
    base.save_pretrained(tmp_path / "base")
    patch(base, "interleaved-repaired").save_pretrained(tmp_path / "patched")
    from safetensors.torch import load_file

    plain = load_file(tmp_path / "base" / "model.safetensors")
    stored = load_file(tmp_path / "patched" / "model.safetensors")
    assert stored.keys() == plain.keys()
    assert all(torch.equal(stored[name], plain[name]) for name in plain)
