"""ExaoneMoe with dense layers only: no rotation in its full-attention layers (Qwen3).

Its sliding-window layers are the rotated ones; their window is wider than any row.
"""

from __future__ import annotations

from transformers import ExaoneMoeConfig

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    carried,
    form_notes,
    require,
    row_changes,
    stay,
)
from hf_posenc.checkpoint.native.smollm3 import default_rope, rotated_and_not
from hf_posenc.checkpoint.native.target import Target
from hf_posenc.checkpoint.native.windows import WIDE_WINDOW


def _draft(case: Case) -> Draft:
    require(case.family == "qwen3", f"{case.family} has other modules than a dense ExaoneMoe")
    require(not case.has("self_attn.q_proj.bias"), "ExaoneMoe has no attention biases")
    require(
        set(case.windows) == {None}, "ExaoneMoe's windows say which layers rotate: no other use"
    )
    require(
        any(layer.rotated for layer in case.layers),
        "vLLM's ExaoneMoe rotates all layers when none has a window, transformers' none",
    )
    form = rotated_and_not(case, "ExaoneMoe")
    layers = case.spec.num_layers
    config = ExaoneMoeConfig(
        **carried(
            case.config,
            "head_dim",
            rope_parameters=form.parameters if form else default_rope(case),
            sliding_window=max(WIDE_WINDOW, case.spec.max_positions),
            sliding_window_pattern=None,
            layer_types=[
                "sliding_attention" if layer.rotated else "full_attention" for layer in case.layers
            ],
            mlp_layer_types=["dense"] * layers,
            first_k_dense_replace=layers,
        )
    )
    return Draft(
        config,
        stay(case),
        weight_changes=row_changes(case, stay(case)),
        notes=(
            *(form_notes(form) if form else ()),
            "rotated layers are sliding-window layers whose window is wider than any row",
        ),
        exact=case.exactly(*([form] if form else [])),
        angle=form.angle if form else 0.0,
    )


TARGET = Target("exaone_moe", "ExaoneMoeForCausalLM", _draft)
