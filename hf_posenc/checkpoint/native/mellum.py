"""Mellum: two kinds of layers, each with its own table (Qwen3 and Qwen3-MoE)."""

from __future__ import annotations

import copy
from typing import Any

from transformers import MellumConfig

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    carried,
    form_notes,
    require,
    row_changes,
    spell_kind,
    stay,
)
from hf_posenc.checkpoint.native.target import Target
from hf_posenc.checkpoint.native.windows import WIDE_WINDOW
from hf_posenc.plan import LayerPlan

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(case: Case) -> list[str]:
    """Which layers are of the sliding kind: those with a window, else the more frequent kind."""
    if set(case.windows) != {None}:
        return [FULL if width is None else SLIDING for width in case.windows]
    if len(case.kinds) == 1:
        return [FULL] * len(case.layers)
    full = min(case.kinds, key=lambda kind: (kind.rotated, case.layers.count(kind)))
    return [FULL if layer == full else SLIDING for layer in case.layers]


def _draft(case: Case) -> Draft:
    require(case.family in ("qwen3", "qwen3_moe"), f"{case.family} has other modules than Mellum")
    require(len(case.kinds) <= 2, f"its layers have {len(case.kinds)} tables, Mellum has two")
    width = case.window_width
    types = layer_types(case)
    by_type: dict[str, LayerPlan] = {}
    for kind, layer in zip(types, case.layers, strict=True):
        require(
            by_type.setdefault(kind, layer) == layer,
            "windows and tables divide the layers differently",
        )
    forms = {kind: spell_kind(case, layer) for kind, layer in by_type.items()}
    any_form = next(iter(forms.values()))
    config = MellumConfig(
        **carried(
            case.config,
            "head_dim",
            rope_parameters={
                kind: copy.deepcopy(forms.get(kind, any_form).parameters)
                for kind in (SLIDING, FULL)
            },
            sliding_window=width or max(WIDE_WINDOW, case.spec.max_positions),
            layer_types=types,
            attention_bias=case.has("self_attn.q_proj.bias"),
            **_experts(case),
        )
    )
    notes = form_notes(*forms.values())
    if width is None and SLIDING in types:
        notes += (f"the {SLIDING} layers have a window wider than any row",)
    return Draft(
        config,
        stay(case),
        weight_changes=row_changes(case, stay(case)),
        notes=notes,
        exact=case.exactly(*forms.values()),
        angle=max(form.angle for form in forms.values()),
    )


def _experts(case: Case) -> dict[str, Any]:
    layers = case.spec.num_layers
    if case.family == "qwen3":
        return {"mlp_layer_types": ["dense"] * layers}
    sparse = [f"model.layers.{i}.mlp.gate.weight" in case.weights for i in range(layers)]
    names = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "output_router_logits",
        "router_aux_loss_coef",
    )
    return {
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        **{name: getattr(case.config, name) for name in names},
    }


TARGET = Target("mellum", "MellumForCausalLM", _draft)
