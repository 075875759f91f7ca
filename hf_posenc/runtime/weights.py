"""Re-ordering q/k features of a live model, in place and reversibly."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from hf_posenc.checkpoint.permute import inverse_order, permute_heads
from hf_posenc.errors import PosencError
from hf_posenc.plan import PositionPlan

_PROJECTIONS = ("q_proj", "k_proj")
_NORMS = ("q_norm", "k_norm")
_UNMOVED = ("v_proj.", "o_proj.", "out_proj.", "dense.")  # behind the scores
# What PEFT puts around a layer's own weights: the layer it replaced, and trained copies of it.
_WRAPPED = r"(?:(?:base_layer|original_module|modules_to_save\.[^.]+)\.)*"
_ROWS = re.compile(
    _WRAPPED
    + r"(?:weight|bias|lora_B\.[^.]+\.(?:weight|bias)|lora_magnitude_vector\.[^.]+\.weight)"
)
_INPUTS = re.compile(_WRAPPED + r"lora_A\.[^.]+\.weight")  # columns of the layer's input


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
            if name.split(".")[0] not in _PROJECTIONS + _NORMS and not name.startswith(_UNMOVED):
                raise PosencError(
                    f"layer {index} ({type(attention).__name__}): hf_posenc does not know whether "
                    f"{name} depends on the order of features; {what} is not supported on it"
                )


@torch.no_grad()
def permute_model(attentions: list[nn.Module], plan: PositionPlan, *, undo: bool = False) -> None:
    """Apply the plan's feature orders to q/k weights, biases, norms and attached LoRA rows.

    Errors: `PosencError` before anything moves, as `check_permutable`.
    """
    check_permutable(attentions, plan)  # all of them, before the first one moves
    for index, (attention, layer) in enumerate(zip(attentions, plan.layers, strict=True)):
        if layer.permutation is None:
            continue
        order = inverse_order(layer.permutation) if undo else layer.permutation
        for parameter in _rows(attention, index, len(order)):
            parameter.copy_(permute_heads(parameter, order))


def _rows(attention: nn.Module, index: int, head_dim: int) -> Iterator[torch.Tensor]:
    """Every tensor of q and k whose first dimension is the features of all heads."""
    check_named_projections([attention], "re-pairing features")
    for name in _PROJECTIONS + _NORMS:
        part = getattr(attention, name, None)
        if part is None:
            continue
        where = f"layer {index} {name}"
        if getattr(part, "merged_adapters", ()) and getattr(part, "lora_magnitude_vector", ()):
            raise PosencError(
                f"{where}: a merged DoRA adapter; unmerge it before re-pairing features"
            )
        for key, parameter in part.named_parameters():
            if _ROWS.fullmatch(key):
                yield _checked(parameter, where, head_dim, norm=name in _NORMS)
            elif not _INPUTS.fullmatch(key):
                raise PosencError(
                    f"{where}: hf_posenc does not know how the rows of {key} follow the features; "
                    "merge the adapter first (merge_and_unload), or attach it after patching"
                )


def _checked(tensor: torch.Tensor, where: str, head_dim: int, *, norm: bool) -> torch.Tensor:
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
    if type(tensor) is not nn.Parameter:
        raise PosencError(
            f"{where}: weights are held as {type(tensor).__name__}; re-pairing features moves "
            "their rows: convert the model before its weights are sharded or quantised"
        )
    if norm and tensor.ndim != 1:
        raise PosencError(
            f"{where}: its weight has shape {tuple(tensor.shape)}, not one value per feature; "
            "re-pairing features is not supported on it"
        )
    if tensor.numel() == 0 or tensor.shape[0] % head_dim:
        raise PosencError(
            f"{where}: shape {tuple(tensor.shape)} is not whole heads of {head_dim} features "
            "(sharded by ZeRO-3 or FSDP?): convert before the weights are sharded"
        )
    return tensor
