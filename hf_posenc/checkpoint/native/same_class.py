"""The base's own class: every layer has one table, which `rope_parameters` can spell."""

from __future__ import annotations

import copy

from hf_posenc.checkpoint.native.case import (
    Case,
    Draft,
    form_notes,
    refuse,
    require,
    row_changes,
    spell_kind,
    stay,
)
from hf_posenc.checkpoint.native.rope_forms import normalised
from hf_posenc.checkpoint.native.target import Target


def _draft(case: Case) -> Draft:
    config = copy.deepcopy(case.config)
    changes = row_changes(case, stay(case))
    if case.windows != case.base_windows:
        require(
            case.family == "mistral" and len(set(case.windows)) == 1,
            f"{case.family} has no window of its own in each layer",
        )
        config.sliding_window = case.windows[0]
    if case.layers == tuple(normalised(layer) for layer in case.spec.layers):
        return Draft(config, stay(case), weight_changes=changes, exact=case.exactly())
    rope = case.spec.rope
    require("rope_theta" in rope, f"{case.family} has one rope_parameters per layer type")
    require(
        len(case.kinds) == 1,
        f"its layers have {len(case.kinds)} different tables, {case.family} has one for all",
    )
    form = spell_kind(case, case.kinds[0])
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        if form.parameters["rope_type"] == "proportional":
            raise refuse(
                f"{case.family} rotates part of each head, proportional counts whole heads"
            )
        form.parameters["partial_rotary_factor"] = partial
    config.rope_parameters = form.parameters
    return Draft(
        config,
        stay(case),
        weight_changes=changes,
        notes=form_notes(form),
        exact=case.exactly(form),
        angle=form.angle,
    )


TARGET = Target("same_class", "", _draft)
