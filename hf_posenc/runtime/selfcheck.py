"""Deciding whether a family that is not on the tested list may be patched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime import families
from hf_posenc.runtime.install import install, uninstall

_TOKENS = 8


def check_family(model: Any, plan: PositionPlan, spec: ModelSpec) -> None:
    """Tested families pass; others must prove on a few tokens that a plan does what it says.

    The model's own plan must change nothing (bitwise), and every layer that `plan` changes must
    react to its table. Errors: `PosencError` naming the family and the reason.
    """
    if spec.family in families.TESTED_FAMILIES:
        return
    own = PositionPlan(spec.layers, spec.fingerprint)
    reference = _logits(model)
    try:
        same = _logits_under(model, own, spec)
    except (TypeError, KeyError, ValueError, RuntimeError, IndexError) as error:
        raise PosencError(
            f"{spec.family} cannot be converted: its layers do not take rotary tables as hf_posenc "
            f"hands them over ({type(error).__name__}: {error})"
        ) from None
    if not torch.equal(reference, same):
        difference = (reference - same).abs().max().item()
        raise PosencError(
            f"{spec.family} cannot be converted: with its own frequencies handed over by hf_posenc "
            f"its logits change by {difference:.1e}; the family needs support of its own"
        )
    changed = [i for i, (a, b) in enumerate(zip(plan.layers, spec.layers, strict=True)) if a != b]
    for index in changed:
        wild = LayerPlan(tuple(1.0 + 0.1 * n for n in range(spec.num_frequencies)))
        layers = (*spec.layers[:index], wild, *spec.layers[index + 1 :])
        if torch.equal(reference, _logits_under(model, replace(own, layers=layers), spec)):
            raise PosencError(
                f"{spec.family}: layer {index} does not apply a rotary table, so {plan.label} "
                "would do nothing there; limit the scheme to the other layers"
            )


def _logits_under(model: Any, plan: PositionPlan, spec: ModelSpec) -> torch.Tensor:
    install(model, plan, spec)
    try:
        return _logits(model)
    finally:
        uninstall(model)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, _TOKENS), generator=generator)
    device = model.get_input_embeddings().weight.device
    training = model.training
    model.eval()
    try:
        logits: torch.Tensor = model(input_ids=ids.to(device), use_cache=False).logits
        return logits
    finally:
        model.train(training)
