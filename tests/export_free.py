"""Logits of an exported folder, with transformers alone: imported where hf_posenc is missing."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import HARD_POSITIONS, logits
from transformers import AutoModelForCausalLM


def stock_logits(folder: Path) -> torch.Tensor:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return logits(model, positions=(*HARD_POSITIONS, 131_072, 131_073, 200_003))
