"""What is refused before anything is trained."""

from __future__ import annotations

from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.heal.config import Recipe
from hf_posenc.runtime.patch import get_plan
from hf_posenc.schemes import as_scheme


def check_request(recipe: Recipe, variant: str) -> None:
    """Refuse a recipe that trains nothing, or a part of it that would take no step.

    Errors: `PosencError`.
    """
    if recipe.heal.tokens == 0:
        raise PosencError(
            f"recipe {recipe.name}: heal.tokens is 0, so there is nothing to heal; "
            "set it, e.g. heal.tokens=1000000"
        )
    if variant == "control" and "ce" not in recipe.heal.objective:
        raise PosencError(
            f"recipe {recipe.name}: without ce the unconverted model is its own goal; "
            "the control is the unconverted model itself, there is nothing to train"
        )
    first, gentle, steps = recipe.heal.first, recipe.heal.gentle, recipe.steps
    if first is not None and not 0 < round(first.share * steps) < steps:
        raise PosencError(
            f"recipe {recipe.name}: heal.first.share is {first.share} of {steps} steps, which "
            "leaves one of the two objectives without a step; change the share or heal.tokens"
        )
    if gentle is not None and recipe.compensate:
        raise PosencError(
            f"recipe {recipe.name}: compensate is for pairs that do not turn, and by "
            "heal.gentle they still do for a while; leave out one of the two"
        )
    if gentle is not None and gentle.share * steps <= 1:
        raise PosencError(
            f"recipe {recipe.name}: heal.gentle.share is {gentle.share} of {steps} steps, so the "
            "plan would come in at once; raise the share or heal.tokens"
        )


def check_calibrated(recipe: Recipe) -> None:
    """Refuse to convert without the calibration that a scheme needs. Errors: `PosencError`."""
    if recipe.calibration is None and as_scheme(recipe.scheme).needs_calibration:
        raise PosencError(
            f"recipe {recipe.name}: its scheme needs a calibration; `hf-posenc run` makes one, or "
            "make one with `hf-posenc calibrate` and set calibration=FILE"
        )
    if recipe.compensate:
        raise PosencError(
            f"recipe {recipe.name}: it heals a compensated model; `hf-posenc run` makes one, or "
            "make one with `hf-posenc convert --compensate` and heal that (--model DIR)"
        )


def check_model(model: Any, recipe: Recipe, variant: str) -> None:
    """Refuse a model that does not run what the recipe heals. Errors: `PosencError`."""
    plan = get_plan(model)
    if variant == "control" and plan is not None:
        raise PosencError(f"the control is the unconverted model; this one runs {plan.label}")
    if variant == "healed":
        wanted = as_scheme(recipe.scheme).describe()
        if plan is None or plan.scheme_dict != wanted:
            found = "is not converted" if plan is None else f"runs {plan.label}"
            raise PosencError(f"the model {found}, recipe {recipe.name} heals {wanted}")
        if plan.gained != recipe.compensate:
            found = "is compensated" if plan.gained else "is not compensated"
            raise PosencError(
                f"the model {found}, recipe {recipe.name} says compensate: {recipe.compensate}"
            )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and recipe.data.row_tokens > longest:
        raise PosencError(
            f"data.row_tokens is {recipe.data.row_tokens}, the model reads at most {longest} tokens"
        )
