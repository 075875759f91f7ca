"""Reading a plan off a stock config: what exports wrote, and architectures in the wild."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from export_case import FAMILIES, patched
from matrix import SCHEMES
from tiny_models import tiny_config
from transformers import AutoConfig

import hf_posenc
from hf_posenc.checkpoint.native import TARGETS, Unexportable
from hf_posenc.checkpoint.native.source import open_source
from hf_posenc.plan import LayerPlan, PositionPlan

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def read(model_type: str, **values: Any) -> PositionPlan:
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **values})
    return PositionPlan.from_config(type(config).from_dict(config.to_dict()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.id)
def test_every_draft_reads_back_as_the_plan(family: str, row: Any) -> None:
    case = open_source(patched(family, row), merge=True).case
    for name, target in TARGETS.items():
        try:
            config = target.draft(case).config
        except Unexportable:
            continue
        plan = PositionPlan.from_config(type(config).from_dict(config.to_dict()))
        windows = tuple(layer.window and layer.window.size for layer in plan.layers)
        assert windows == case.windows
        if name in ("glm", "glm4_moe", "phi3"):  # rotated pairs come first there
            assert [sorted(layer.inv_freq) for layer in plan.layers] == [
                sorted(layer.inv_freq) for layer in case.layers
            ]
            assert {layer.rope_scale for layer in plan.layers} == {1.0}
        else:
            tables = tuple(dataclasses.replace(layer, window=None) for layer in plan.layers)
            assert tables == case.layers
        assert plan.pairing == ("interleaved" if name in ("glm", "ernie4_5") else "half_split")
        if name == "same_class" and row.scheme in ("p_rope", "nope", "interleaved"):
            assert plan.base == case.plan.base


def rotated(plan: PositionPlan) -> list[int]:
    return [int(layer.rotated) for layer in plan.layers]


def test_architectures_that_skip_rotation_by_layer() -> None:
    smollm3 = read("smollm3", no_rope_layers=[1, 0, 0, 1])
    assert rotated(smollm3) == [1, 0, 0, 1]
    assert smollm3.label == (
        "smollm3: full rotation (theta 2,000,000) in layers 0, 3; no rotation in layers 1-2"
    )
    types = ["sliding_attention", "full_attention"] * 2
    for family in ("exaone_moe", "exaone4", "cohere2"):
        plan = read(family, layer_types=types, sliding_window=8)
        assert rotated(plan) == [1, 0, 1, 0], family
    full = ["full_attention"] * 4
    granite = read("granite_swa", layer_rope_theta=[1e4, 0.0, 1e6, 1e4], layer_types=full)
    assert rotated(granite) == [1, 0, 1, 1]
    assert granite.layers[0] == granite.layers[3] != granite.layers[2]
    assert "no rotation in layer 1" in granite.label


def test_one_table_per_layer_type() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    }
    plan = read("mellum", layer_types=types, rope_parameters=rope, head_dim=16)
    assert [layer.num_rotated for layer in plan.layers] == [8, 2, 8, 2]
    assert plan.label == (
        "mellum: full rotation (theta 10,000), window of 1024 tokens in layers 0, 2; "
        "rotation of the first 2 of 8 pairs (theta 1,000,000) in layers 1, 3"
    )


def test_partial_families_come_out_at_full_width() -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    for family in ("phi3", "glm", "glm4_moe"):
        plan = read(family, rope_parameters=dict(rope), head_dim=16)
        assert plan.num_frequencies == 8
        assert [layer.num_rotated for layer in plan.layers] == [4] * 4
        assert plan.label.endswith("first 4 of 8 pairs (theta 10,000) in all layers")


def test_a_default_config_is_the_plan_of_its_own_base() -> None:
    for family in ("llama", "qwen3", "gemma"):
        config = tiny_config(family)
        spec = hf_posenc.ModelSpec.from_config(config)
        plan = PositionPlan.from_config(config)
        assert plan.layers == spec.layers and plan.base == spec.fingerprint


def test_masks_written_as_longrope_factors_are_masks() -> None:
    factors = [1.0, 1e30] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 256,
    }
    plan = read("llama", rope_parameters=rope)
    assert plan.layers[0].inv_freq[1::2] == (0.0,) * 4
    assert plan.layers[0].stretch is None
    assert plan.label == "llama: rotation of 4 of 8 pairs in all layers"


def test_a_converted_config_answers_with_its_plan() -> None:
    model = patched("llama", "p_rope")
    assert PositionPlan.from_config(model.config) == hf_posenc.get_plan(model)


def test_reading_back_tells_layers_apart() -> None:
    """The check that exports rely on must see one wrong layer."""
    config = AutoConfig.for_model("smollm3", **_SHAPE, no_rope_layers=[1, 1, 1, 0])
    plan = PositionPlan.from_config(config)
    still = LayerPlan((0.0,) * plan.num_frequencies)
    assert plan.layers[3] == still
    config.no_rope_layers = [1, 1, 0, 0]
    assert PositionPlan.from_config(config).layers[2] == still != plan.layers[2]
    assert dataclasses.replace(plan) == plan
