"""Phi3: partial rotary, half-split pairs, q/k/v and gate/up fused (Llama, Mistral)."""

from __future__ import annotations

from transformers import Phi3Config

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    Weights,
    carried,
    form_notes,
    require,
    row_changes,
)
from hf_posenc.checkpoint.native.partial import fuse_gate_up, fuse_qkv, rotated_first
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    require(case.family in ("llama", "mistral"), f"{case.family} has other modules than Phi3")
    require(
        not (case.has("self_attn.q_proj.bias") or case.has("mlp.gate_proj.bias")),
        "Phi3 has no biases",
    )
    require(len(set(case.windows)) == 1, "Phi3 has one window for all layers")
    derived = case.spec.hidden_size // case.spec.num_heads
    require(
        case.spec.head_dim == derived,
        f"Phi3's head_dim is hidden_size / heads ({derived}), this one is {case.spec.head_dim}",
    )
    parts = rotated_first(case, "Phi3", interleaved=False, allowed=("default", "longrope"))
    config = Phi3Config(
        **carried(
            case.config,
            rope_parameters=parts.form.parameters,
            original_max_position_embeddings=case.spec.max_positions,
            sliding_window=case.windows[0],
        )
    )

    def reshape(weights: Weights) -> Weights:
        return fuse_qkv(fuse_gate_up(weights))

    return Draft(
        config,
        parts.orders,
        reshape=reshape,
        weight_changes=(
            *row_changes(case, parts.orders),
            "q, k, v fused into qkv_proj",
            "gate, up fused into gate_up_proj",
        ),
        notes=form_notes(parts.form),
        exact=False,
        fused=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        angle=parts.form.angle,
    )


TARGET = Target("phi3", "Phi3ForCausalLM", _draft)
