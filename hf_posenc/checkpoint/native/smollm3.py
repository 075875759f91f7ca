"""SmolLM3: no rotation in any chosen layers, one table in the others.

`no_rope_layers` says 1 for a layer that IS rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import SmolLM3Config

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    Weights,
    carried,
    form_notes,
    require,
    row_changes,
    spell_kind,
    stay,
)
from hf_posenc.checkpoint.native.rope_forms import RopeForm
from hf_posenc.checkpoint.native.target import Target


def rotated_and_not(case: Case, architecture: str) -> RopeForm | None:
    """The one table of the rotated layers; refused unless the others have none at all."""
    rotated = [kind for kind in case.kinds if kind.rotated]
    plain = [kind for kind in case.kinds if not kind.rotated]
    require(
        len(rotated) <= 1,
        f"its rotated layers have {len(rotated)} different tables, {architecture} has one",
    )
    require(
        all(kind.rope_scale == 1.0 for kind in plain),
        f"its unrotated layers keep an attention factor, which {architecture} skips there",
    )
    return spell_kind(case, rotated[0]) if rotated else None


def default_rope(case: Case) -> dict[str, Any]:
    """`rope_parameters` of a config none of whose layers rotate."""
    return {"rope_type": "default", "rope_theta": case.shape().theta}


def add_output_bias(weights: Weights) -> Weights:
    """A zero bias for every o_proj, for classes with one switch for all attention biases."""
    added = {
        name.replace("q_proj.bias", "o_proj.bias"): torch.zeros(
            weights[name.replace("q_proj.bias", "o_proj.weight")].shape[0],
            dtype=bias.dtype,
            device=bias.device,
        )
        for name, bias in weights.items()
        if name.endswith("self_attn.q_proj.bias")
    }
    return {**weights, **added}


def _draft(case: Case) -> Draft:
    require(
        case.family in ("llama", "mistral", "qwen2", "smollm3"),
        f"{case.family} has other modules than SmolLM3",
    )
    form = rotated_and_not(case, "SmolLM3")
    width = case.window_width
    biased = case.has("self_attn.q_proj.bias")
    lacks_output_bias = biased and not case.has("self_attn.o_proj.bias")
    config = SmolLM3Config(
        **carried(
            case.config,
            rope_parameters=form.parameters if form else default_rope(case),
            no_rope_layers=[int(layer.rotated) for layer in case.layers],
            layer_types=["sliding_attention" if w else "full_attention" for w in case.windows],
            use_sliding_window=width is not None,
            sliding_window=width,
            attention_bias=biased,
            mlp_bias=case.has("mlp.gate_proj.bias"),
        )
    )
    changes = row_changes(case, stay(case))
    if lacks_output_bias:
        changes += ("zero o_proj biases added",)
    notes = form_notes(form) if form else ()
    if any(layer.rotated != ((i + 1) % 4 != 0) for i, layer in enumerate(case.layers)):
        notes += ("llama.cpp's own converter makes it every 4th layer: use the target gguf there",)
    return Draft(
        config,
        stay(case),
        reshape=add_output_bias if lacks_output_bias else None,
        weight_changes=changes,
        notes=notes,
        exact=case.exactly(*([form] if form else [])),
        angle=form.angle if form else 0.0,
    )


TARGET = Target("smollm3", "SmolLM3ForCausalLM", _draft)
