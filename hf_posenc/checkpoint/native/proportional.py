"""The base's own class with Gemma 4's `rope_type="proportional"`; only when asked for by name.

transformers and vLLM read it alike; SGLang's Llama and Qwen and llama.cpp's converter take it for
full RoPE without an error, so `auto` spells the same table as longrope factors (`same_class`).
"""

from __future__ import annotations

import copy

from hf_posenc.checkpoint.native.case import Case, Draft, require, row_changes, spell_kind, stay
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    require(
        case.windows == case.base_windows, f"{case.family} has no window of its own in each layer"
    )
    require("rope_theta" in case.spec.rope, f"{case.family} has one rope_parameters per layer type")
    require(
        case.spec.rotary_dim == case.spec.head_dim,
        f"{case.family} rotates part of each head, proportional counts whole heads",
    )
    require(
        len(case.kinds) == 1,
        f"its layers have {len(case.kinds)} different tables, {case.family} has one for all",
    )
    form = spell_kind(case, case.kinds[0], case.shape(allowed=("proportional",)))
    config = copy.deepcopy(case.config)
    config.rope_parameters = form.parameters
    notes = ["SGLang and llama.cpp's converter read proportional as full RoPE on this class"]
    if form.parameters["partial_rotary_factor"] == 0.0:
        notes.append("vLLM refuses partial_rotary_factor 0.0")
    changes = row_changes(case, stay(case))
    return Draft(config, stay(case), weight_changes=changes, notes=tuple(notes))


TARGET = Target("proportional", "", _draft, automatic=False)
