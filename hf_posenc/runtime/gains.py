"""Layers whose queries carry gains: the base's own weights beside them, to change places with.

A gain (`hf_posenc/calibration/compensation.py`) is folded into the last weights that a query meets
before it is rotated, so it costs nothing when the model runs: q_proj, or the q_norm behind it. The
weights as they were stay on the attention module and in the checkpoint, so that the unconverted
model is still there, bit for bit: for `unpatch_model`, and for the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hf_posenc.errors import PosencError
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime.weights import check_named_projections

STOCK_QUERY = "stock_query"


class StockQuery(nn.Module):
    """The base's own weights, frozen: weight [H * D, d_model] and bias [H * D] or None of q_proj,
    or the weight [D] or [H * D] of q_norm.
    """

    def __init__(self, carrier: nn.Module) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            value = getattr(carrier, name, None)
            copy = None if value is None else nn.Parameter(value.detach().clone(), False)
            self.register_parameter(name, copy)


def gained(layers: Sequence[LayerPlan]) -> list[int]:
    """Which layers carry gains."""
    return [index for index, layer in enumerate(layers) if layer.gained]


def attach_stock_queries(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Keep a copy of the weights of every layer that is to carry gains, before they change."""
    for index in gained(plan.layers):
        setattr(attentions[index], STOCK_QUERY, StockQuery(query_carrier(attentions[index])))


def check_gains(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Refuse, before anything changes, layers whose queries cannot carry a gain.

    Errors: `PosencError` for fused or quantised projections, and for a norm on queries that is not
    a weight times what was normed.
    """
    indices = gained(plan.layers)
    if indices:
        check_named_projections(attentions, f"{plan.label}, compensated,")
    for index in indices:
        attention = attentions[index]
        carrier = query_carrier(attention)
        where = f"layer {index} ({type(attention).__name__})"
        weight = getattr(carrier, "weight", None)
        if weight is None or (norms_queries(attention) and _has_bias(carrier)):
            raise PosencError(
                f"{where}: its q_norm ({type(carrier).__name__}) is not a weight times what was "
                "normed, so it cannot carry gains; leave compensation out"
            )
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise PosencError(
                f"{where}: q_proj is quantised ({weight.dtype}); convert the unquantised checkpoint"
            )


@torch.no_grad()
def exchange_queries(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Let the weights with gains and those kept beside them change places; twice is as before.

    Errors: `PosencError` before anything moves, for weights that are offloaded or sharded.
    """
    pairs = []
    for index in gained(plan.layers):
        carrier = query_carrier(attentions[index])
        kept: Any = getattr(attentions[index], STOCK_QUERY)
        for name in ("weight", "bias"):
            mine, other = getattr(carrier, name, None), getattr(kept, name)
            if mine is None:
                continue
            if mine.device.type == "meta" or mine.shape != other.shape:
                raise PosencError(
                    f"layer {index}: the {type(carrier).__name__} of its queries is offloaded or "
                    "sharded, so the base's own weights cannot take its place; load the model whole"
                )
            pairs.append((mine, other))
    for mine, other in pairs:
        mine.data, other.data = other.data, mine.data


def norms_queries(attention: Any) -> bool:
    """Whether q_norm stands between q_proj and the rotation."""
    return getattr(attention, "q_norm", None) is not None


def query_carrier(attention: Any) -> Any:
    """The module whose weights carry gains, inside whatever an adapter put around it.

    q_norm where a layer norms its queries (a gain before a norm is undone by it), else q_proj.
    """
    carrier = attention.q_norm if norms_queries(attention) else attention.q_proj
    while True:
        inner = getattr(carrier, "base_layer", None) or getattr(carrier, "original_module", None)
        if inner is None:
            return carrier
        carrier = inner


@torch.no_grad()
def norm_offset(norm: nn.Module) -> float:
    """What a norm adds to its weight before it multiplies: 0, or 1 as in Gemma's."""
    weight: Any = norm.weight
    probe = torch.linspace(1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)
    without, once = (
        functional_call(norm, {"weight": torch.full_like(weight, value)}, probe.view_as(weight))
        for value in (0.0, 1.0)
    )
    return round(float((without / (once - without)).flatten()[-1]))


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None
