"""The schemes that touch scores or embeddings, with options small enough for tiny models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ScoreCase:
    """A scheme with options; `fresh_null`: a fresh conversion computes what the base computes."""

    id: str
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    fresh_null: bool = False


CASES: tuple[ScoreCase, ...] = (
    ScoreCase("window", "rope", {"window": 5}),
    ScoreCase("chunked", "irope", {"every": 2, "chunk": 4, "scale_floor": 4, "scale_alpha": 0.5}),
    ScoreCase("constant", "rope", {"logit_scale": 1.3}),
    ScoreCase("inkling", "rope", {"logit_scale": {"kind": "inkling", "floor": 6, "alpha": 0.4}}),
    ScoreCase("per_head", "nope", {"logit_scale": "per_head"}),
    ScoreCase("alibi", "alibi"),
    ScoreCase("t5_bias", "t5_bias", {"buckets": 8, "max_distance": 16}, fresh_null=True),
    ScoreCase(
        "t5_bias-per-layer",
        "t5_bias",
        {"buckets": 8, "max_distance": 16, "share_layers": False, "keep_rope": False},
    ),
    ScoreCase("query_bias", "query_bias", {"rank": 4, "extent": 7}, fresh_null=True),
    ScoreCase("sinusoidal", "sinusoidal", {"scale_embeddings": True}),
    ScoreCase("learned_absolute", "learned_absolute", {"init": "sinusoidal"}),
    ScoreCase("learned_absolute-zero", "learned_absolute", {"keep_rope": True}, fresh_null=True),
    ScoreCase("gemma4", "gemma4", {"every": 2, "window": 6, "p": 0.5}),
    ScoreCase("rnope_swa", "rnope_swa", {"every": 2, "window": 6}),
    ScoreCase("swan", "swan", {"every": 2, "window": 6, "scale_base": 4.0}),
    ScoreCase("drope", "drope", {"scale_c": 0.3, "trained_length": 8}),
)
BY_ID = {case.id: case for case in CASES}


def fill_new_parameters(model: nn.Module) -> list[str]:
    """Give learned biases, scales and tables values that matter; their names."""
    torch.manual_seed(7)
    names = []
    for name, parameter in model.named_parameters():
        if "posenc_" in name:
            names.append(name)
            if "head_scale" in name:
                parameter.data.uniform_(0.5, 1.5)
            else:
                parameter.data.normal_(0.0, 0.7)
    return names
