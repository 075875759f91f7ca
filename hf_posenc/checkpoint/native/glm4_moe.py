"""Glm4Moe with dense layers only: partial rotary, half-split pairs, nothing fused.

Takes Llama, Mistral, Qwen2 (biases) and Qwen3 (q/k norms); adapters can stay beside.
"""

from __future__ import annotations

from transformers import Glm4MoeConfig

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    carried,
    form_notes,
    require,
    row_changes,
)
from hf_posenc.checkpoint.native.partial import rotated_first
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    require(
        case.family in ("llama", "mistral", "qwen2", "qwen3"),
        f"{case.family} has other modules than a dense Glm4Moe",
    )
    require(
        not (case.has("self_attn.o_proj.bias") or case.has("mlp.gate_proj.bias")),
        "Glm4Moe has biases on q, k and v only",
    )
    require(set(case.windows) == {None}, "Glm4Moe has no sliding window")
    parts = rotated_first(case, "Glm4Moe", interleaved=False)
    config = Glm4MoeConfig(
        **carried(
            case.config,
            rope_parameters=parts.form.parameters,
            head_dim=case.spec.head_dim,
            attention_bias=case.has("self_attn.q_proj.bias"),
            use_qk_norm=case.has("self_attn.q_norm.weight"),
            first_k_dense_replace=case.spec.num_layers,
            num_mtp_layers=0,
        )
    )
    return Draft(
        config,
        parts.orders,
        weight_changes=row_changes(case, parts.orders),
        notes=form_notes(parts.form),
        exact=False,
        angle=parts.form.angle,
    )


TARGET = Target("glm4_moe", "Glm4MoeForCausalLM", _draft)
