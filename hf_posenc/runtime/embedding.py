"""Absolute positions: vectors added once, to what enters the first decoder layer.

The hook sits on the first layer, so it sees token embeddings and `inputs_embeds` alike, with the
right positions under a cache, left padding and packing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.parts import Embedding, LearnedAbsolute
from hf_posenc.runtime.rotary import PlanSwitch

TABLE = "posenc_positions"


class PosencPositions(nn.Module):
    """`LearnedAbsolute`'s vectors, [max_positions, d_model], trained with the model."""

    def __init__(self, part: LearnedAbsolute, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(part.max_positions, hidden_size, **factory))
        if part.init == "sinusoidal" and self.weight.device.type != "meta":
            places = torch.arange(part.max_positions, device=self.weight.device)
            self.weight.data.copy_(sinusoids(places, hidden_size))


class AddPositions:
    """Forward pre-hook of the first decoder layer: adds the position vectors to its input."""

    def __init__(self, switch: PlanSwitch, part: Embedding, owner: list[nn.Module]) -> None:
        self.switch, self.part, self.owner = switch, part, owner

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.switch.active:
            return args, kwargs
        hidden, *rest = args
        positions = kwargs["position_ids"].to(hidden.device)
        width = hidden.shape[-1]
        if isinstance(self.part, LearnedAbsolute):
            _check_length(positions, self.part.max_positions)
            table: Any = getattr(self.owner[0], TABLE)
            vectors = table.weight.to(hidden.device)[positions].to(hidden.dtype)
            return (hidden + vectors, *rest), kwargs
        if self.part.scale_embeddings:
            hidden = hidden * math.sqrt(width)
        return (hidden + sinusoids(positions, width).to(hidden.dtype), *rest), kwargs


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """sin and cos of position times 10000^(-2i/width), interleaved: [..., width], float32.

    Features 2i and 2i + 1 are sin and cos of the same frequency (arXiv 1706.03762, section 3.5).
    """
    if width % 2:
        raise PosencError(f"sinusoidal positions need an even model width, not {width}")
    exponents = torch.arange(0, width, 2, device=positions.device).float() / width
    angles = positions[..., None].float() / 10000.0**exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def _check_length(positions: torch.Tensor, limit: int) -> None:
    if torch.compiler.is_compiling():
        return
    last = int(positions.max())
    if last >= limit:
        raise PosencError(
            f"position {last} is beyond the table of {limit} learned positions; shorten the input "
            "or convert with a larger max_positions"
        )
