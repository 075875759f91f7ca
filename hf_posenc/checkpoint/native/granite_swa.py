"""GraniteSWA: a base of its own for every layer, 0 for no rotation (Llama, Mistral, Qwen2).

Its attention sinks are set so low that they take no share of the softmax.
"""

from __future__ import annotations

import torch
from transformers import GraniteSWAConfig

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
from hf_posenc.checkpoint.native.smollm3 import add_output_bias, default_rope
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    require(
        case.family in ("llama", "mistral", "qwen2"),
        f"{case.family} has other modules than GraniteSWA",
    )
    require(
        all(kind.rope_scale == 1.0 for kind in case.kinds if not kind.rotated),
        "its unrotated layers keep an attention factor, which GraniteSWA skips there",
    )
    forms = {kind: spell_kind(case, kind) for kind in case.kinds if kind.rotated}
    require(
        len(forms) <= 1
        or all(form.parameters["rope_type"] == "default" for form in forms.values()),
        "GraniteSWA gives its layers different bases, not different scalings or dropped pairs",
    )
    thetas = [
        float(forms[layer].parameters["rope_theta"]) if layer.rotated else 0.0
        for layer in case.layers
    ]
    biased = case.has("self_attn.q_proj.bias")
    lacks_output_bias = biased and not case.has("self_attn.o_proj.bias")
    heads, head_dim = case.spec.num_heads, case.spec.head_dim

    def reshape(weights: Weights) -> Weights:
        return add_sinks(add_output_bias(weights) if lacks_output_bias else weights, heads)

    config = GraniteSWAConfig(
        **carried(
            case.config,
            rope_parameters=(
                next(iter(forms.values())).parameters if forms else default_rope(case)
            ),
            layer_rope_theta=thetas,
            no_rope_layers=[int(theta > 0.0) for theta in thetas],  # what llama.cpp reads
            layer_types=["sliding_attention" if w else "full_attention" for w in case.windows],
            sliding_window=case.window_width or case.spec.max_positions,
            attention_bias=biased,
            mlp_bias=case.has("mlp.gate_proj.bias"),
            attention_multiplier=head_dim**-0.5,
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
        )
    )
    changes = (*row_changes(case, stay(case)), "attention sinks added, without effect")
    if lacks_output_bias:
        changes += ("zero o_proj biases added",)
    return Draft(
        config,
        stay(case),
        reshape=reshape,
        weight_changes=changes,
        notes=(
            *form_notes(*forms.values()),
            *(
                ("llama.cpp's own converter gives all layers one base: do not use it here",)
                if len(forms) > 1
                else ()
            ),
            "GraniteSWA has no sdpa attention: it runs with eager, flex or flash attention",
        ),
        exact=case.exactly(*forms.values()),
        attention="eager",
        angle=max((form.angle for form in forms.values()), default=0.0),
    )


def add_sinks(weights: Weights, heads: int) -> Weights:
    """A sink per head at the lowest bfloat16 (float16's own lowest in float16): a share of 0."""
    result = dict(weights)
    for name, value in weights.items():
        if name.endswith("self_attn.q_proj.weight"):
            kind = torch.float16 if value.dtype == torch.float16 else torch.bfloat16
            result[name.replace("q_proj.weight", "sinks")] = torch.full(
                (heads,), torch.finfo(kind).min, dtype=value.dtype, device=value.device
            )
    return result


TARGET = Target("granite_swa", "GraniteSWAForCausalLM", _draft)
