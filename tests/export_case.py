"""Patched tiny models, their exports, and the stock models that come out."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from patching import patch
from tiny_models import HARD_POSITIONS, difference, logits, tiny_model
from transformers import AutoModelForCausalLM

from hf_posenc.checkpoint.native import ExportReport, export_native

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# Beyond every trained length, by explicit position ids.
FAR_POSITIONS = (*HARD_POSITIONS, 131_072, 131_073, 200_003)
# q.k summed in another order in float32 (attention of ordinary sharpness, four layers).
REORDERED = 2e-6


@functools.cache
def _base(family: str, overrides: str) -> Any:
    model = tiny_model(family, attn="sdpa", scale=4.0, **json.loads(overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(0.6)  # random norms still, scores of about 20
    return model


def base_model(family: str, **overrides: Any) -> Any:
    """A stock tiny model with random biases and norms and scaled-up q/k rows."""
    return copy.deepcopy(_base(family, json.dumps(overrides)))


def patched(family: str, row: Any, **overrides: Any) -> Any:
    """The same under a row of the scheme matrix."""
    return patch(base_model(family, **overrides), row)


def far_logits(model: Any) -> torch.Tensor:
    return logits(model, positions=FAR_POSITIONS)


def load_stock(folder: Path, *, like: Any, attn: str | None = None) -> Any:
    """What a reader without hf_posenc gets."""
    attn = attn or like.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn).eval()


def export_and_measure(
    model: Any, folder: Path, target: str = "auto", **options: Any
) -> tuple[ExportReport, float, Any]:
    """The report, the largest logit difference measured here at FAR_POSITIONS, the stock model."""
    report = export_native(model, folder, target, **options)
    attn = "eager" if report.target == "granite_swa" else None
    stock = load_stock(folder, like=model, attn=attn)
    if attn is not None:
        model = copy.deepcopy(model)
        model.set_attn_implementation(attn)
    return report, difference(far_logits(model), far_logits(stock)), stock
