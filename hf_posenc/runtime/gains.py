"""Layers whose q_proj carries gains: the base's own rows beside it, and changing places with them.

A gain (`hf_posenc/calibration/compensation.py`) is folded into q_proj, so it costs nothing when the
model runs. The rows as they were stay on the attention module and in the checkpoint, so that the
unconverted model is still there, bit for bit: for `unpatch_model`, and for the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.plan import LayerPlan, PositionPlan

STOCK_QUERY = "stock_query"


class StockQuery(nn.Module):
    """The base's own q_proj, frozen: weight [H * D, d_model] and bias [H * D] or None."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            value = getattr(projection, name, None)
            copy = None if value is None else nn.Parameter(value.detach().clone(), False)
            self.register_parameter(name, copy)


def gained(layers: Sequence[LayerPlan]) -> list[int]:
    """Which layers carry gains."""
    return [index for index, layer in enumerate(layers) if layer.gained]


def attach_stock_queries(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Keep a copy of q_proj on every layer that is to carry gains, before they are folded in."""
    for index in gained(plan.layers):
        setattr(attentions[index], STOCK_QUERY, StockQuery(query_projection(attentions[index])))


def check_gains(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Refuse, before anything changes, layers whose queries cannot carry a gain.

    Errors: `PosencError` for fused or quantised projections, and for a norm after q_proj,
    which undoes a gain.
    """
    for index in gained(plan.layers):
        attention: Any = attentions[index]
        where = f"layer {index} ({type(attention).__name__})"
        if getattr(attention, "q_proj", None) is None:
            raise PosencError(f"{where} has no q_proj to fold gains into; leave compensation out")
        if getattr(attention, "q_norm", None) is not None:
            raise PosencError(
                f"{where} norms q after q_proj, which undoes a gain; leave compensation out"
            )
        weight = query_projection(attention).weight
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise PosencError(
                f"{where}: q_proj is quantised ({weight.dtype}); convert the unquantised checkpoint"
            )


@torch.no_grad()
def exchange_queries(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Let q_proj and the rows kept beside it change places; twice is as before, bit for bit.

    Errors: `PosencError` before anything moves, for weights that are offloaded or sharded.
    """
    pairs = []
    for index in gained(plan.layers):
        projection = query_projection(attentions[index])
        kept: Any = getattr(attentions[index], STOCK_QUERY)
        for name in ("weight", "bias"):
            mine, other = getattr(projection, name, None), getattr(kept, name)
            if mine is None:
                continue
            if mine.device.type == "meta" or mine.shape != other.shape:
                raise PosencError(
                    f"layer {index}: q_proj is offloaded or sharded, so the base's own rows cannot "
                    "take its place; load the model whole"
                )
            pairs.append((mine, other))
    for mine, other in pairs:
        mine.data, other.data = other.data, mine.data


def query_projection(attention: Any) -> Any:
    """q_proj itself, inside whatever an adapter put around it."""
    projection = attention.q_proj
    while True:
        inner = getattr(projection, "base_layer", None) or getattr(
            projection, "original_module", None
        )
        if inner is None:
            return projection
        projection = inner
