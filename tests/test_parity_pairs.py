"""Partial and interleaved encodings against stock families that pair features that way.

The sum over the features of a head runs in another order there: `matrix.TOLERANCES` says how far
apart the logits may be. Tables and stored weights are compared bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrix import FAMILIES
from patching import assert_close, converted, patch
from tiny_models import (
    difference,
    logits,
    rebuilt,
    tiny_config,
    tiny_model,
    with_rope,
)

import hf_posenc
from hf_posenc import ModelSpec, make_scheme
from hf_posenc.checkpoint.permute import interleaved_order, permute_heads

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
