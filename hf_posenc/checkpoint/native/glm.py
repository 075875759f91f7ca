"""Glm: partial rotary, interleaved pairs, q/k/v biases, gate/up fused (Llama, Mistral, Qwen2)."""

from __future__ import annotations

from transformers import GlmConfig

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    carried,
    form_notes,
    require,
    row_changes,
)
from hf_posenc.checkpoint.native.partial import fuse_gate_up, rotated_first
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    require(
        case.family in ("llama", "mistral", "qwen2"), f"{case.family} has other modules than Glm"
    )
    require(
        not (case.has("self_attn.o_proj.bias") or case.has("mlp.gate_proj.bias")),
        "Glm has biases on q, k and v only",
    )
    require(set(case.windows) == {None}, "Glm has no sliding window")
    parts = rotated_first(case, "Glm", interleaved=True)
    config = GlmConfig(
        **carried(
            case.config,
            rope_parameters=parts.form.parameters,
            head_dim=case.spec.head_dim,
            attention_bias=case.has("self_attn.q_proj.bias"),
        )
    )
    return Draft(
        config,
        parts.orders,
        reshape=fuse_gate_up,
        weight_changes=(
            *row_changes(case, parts.orders),
            "gate, up fused into gate_up_proj",
        ),
        notes=form_notes(parts.form),
        exact=False,
        fused=("gate_proj", "up_proj"),
        angle=parts.form.angle,
    )


TARGET = Target("glm", "GlmForCausalLM", _draft)
