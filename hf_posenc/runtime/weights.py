"""Re-ordering q/k features of a live model, in place and reversibly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_posenc.checkpoint.permute import inverse_order, permute_heads
from hf_posenc.errors import PosencError
from hf_posenc.plan import PositionPlan

_PROJECTIONS = ("q_proj", "k_proj")
_NORMS = ("q_norm", "k_norm")
_KNOWN = ("q_proj.", "k_proj.", "q_norm.weight", "k_norm.weight")
_UNMOVED = ("v_proj.", "o_proj.", "out_proj.", "dense.")  # behind the scores


def check_permutable(attentions: list[nn.Module], plan: PositionPlan) -> None:
    """Refuse, before anything changes, what cannot be re-ordered exactly."""
    for index, (attention, layer) in enumerate(zip(attentions, plan.layers, strict=True)):
        if layer.permutation is not None:
            for _ in _rows(attention, index, len(layer.permutation)):
                pass


def check_named_projections(attentions: list[nn.Module], what: str) -> None:
    """Refuse, where rows must move, fused q/k matrices and weights whose part in it is unknown."""
    for index, attention in enumerate(attentions):
        for name in _PROJECTIONS:
            if getattr(attention, name, None) is None:
                raise PosencError(
                    f"layer {index} ({type(attention).__name__}) has no {name}: {what} needs q and "
                    "k rows in matrices of their own"
                )
        for name, _ in attention.named_parameters():
            if not name.startswith(_KNOWN + _UNMOVED):
                raise PosencError(
                    f"layer {index} ({type(attention).__name__}): hf_posenc does not know whether "
                    f"{name} depends on the order of features; {what} is not supported on it"
                )


@torch.no_grad()
def permute_model(attentions: list[nn.Module], plan: PositionPlan, *, undo: bool = False) -> None:
    """Apply the plan's feature orders to q/k weights, biases, norms and attached LoRA rows."""
    for index, (attention, layer) in enumerate(zip(attentions, plan.layers, strict=True)):
        if layer.permutation is None:
            continue
        order = inverse_order(layer.permutation) if undo else layer.permutation
        for parameter in _rows(attention, index, len(order)):
            parameter.copy_(permute_heads(parameter, order))


def _rows(attention: nn.Module, index: int, head_dim: int) -> Iterator[torch.Tensor]:
    check_named_projections([attention], "re-pairing features")
    for name in _PROJECTIONS:
        projection = getattr(attention, name)
        base = getattr(projection, "base_layer", projection)
        where = f"layer {index} {name}"
        yield _checked(base.weight, where, head_dim)
        if getattr(base, "bias", None) is not None:
            yield _checked(base.bias, where, head_dim)
        for adapter in getattr(projection, "lora_B", {}).values():
            yield _checked(adapter.weight, where, head_dim)
    for name in _NORMS:
        norm = getattr(attention, name, None)
        weight = getattr(norm, "weight", None)
        if weight is not None:
            yield _checked(weight, f"layer {index} {name}", head_dim)


def _checked(tensor: torch.Tensor, where: str, head_dim: int) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise PosencError(
            f"{where}: weights are quantised ({tensor.dtype}); re-pairing features moves their "
            "rows: convert the unquantised checkpoint, then quantise"
        )
    if tensor.device.type == "meta":
        raise PosencError(
            f"{where}: weights are offloaded; re-pairing features moves their rows: load the model "
            "without offloading, or convert the checkpoint on disk"
        )
    if tensor.numel() == 0 or tensor.shape[0] % head_dim:
        raise PosencError(
            f"{where}: shape {tuple(tensor.shape)} is not whole heads of {head_dim} features "
            "(sharded by ZeRO-3 or FSDP?): convert before the weights are sharded"
        )
    return tensor
