"""Ernie 4.5: interleaved pairs over the whole head, nothing fused, no biases (Llama, Mistral)."""

from __future__ import annotations

from transformers import Ernie4_5Config

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    carried,
    form_notes,
    require,
    row_changes,
    spell_kind,
)
from hf_posenc.checkpoint.native.partial import interleave
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    require(case.family in ("llama", "mistral"), f"{case.family} has other modules than Ernie 4.5")
    require(
        not (case.has("self_attn.q_proj.bias") or case.has("mlp.gate_proj.bias")),
        "the base has biases in some modules only, Ernie 4.5 in all or none",
    )
    require(set(case.windows) == {None}, "Ernie 4.5 has no sliding window")
    require(
        len(case.kinds) == 1,
        f"its layers have {len(case.kinds)} different tables, Ernie 4.5 has one for all",
    )
    form = spell_kind(case, case.kinds[0])
    orders = interleave(case)
    config = Ernie4_5Config(
        **carried(
            case.config,
            rope_parameters=form.parameters,
            head_dim=case.spec.head_dim,
            use_bias=False,
        )
    )
    return Draft(
        config,
        orders,
        weight_changes=row_changes(case, orders),
        notes=form_notes(form),
        exact=False,
        angle=form.angle,
    )


TARGET = Target("ernie4_5", "Ernie4_5ForCausalLM", _draft)
