"""Re-ordering the features of attention heads in q/k weights; pure functions on tensors.

A score q.k does not change when the features of both are re-ordered alike, so a re-ordering only
says which features form a rotary pair. It touches the rows of q_proj and k_proj, their biases,
the weights of per-head q/k norms and the rows of a LoRA's lora_B, each with its own head count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = Sequence[int]


def interleaved_order(rotary_dim: int, head_dim: int | None = None) -> tuple[int, ...]:
    """Half-split features in interleaved order: (0, F, 1, F + 1, ...), the rest untouched.

    `weights[interleaved_order(d)]` turns half-split rows into interleaved ones.
    """
    half = rotary_dim // 2
    paired = [feature for i in range(half) for feature in (i, i + half)]
    return (*paired, *range(rotary_dim, head_dim or rotary_dim))


def inverse_order(order: Order) -> tuple[int, ...]:
    """The order that undoes `order`."""
    result = [0] * len(order)
    for new, old in enumerate(order):
        result[old] = new
    return tuple(result)


def permute_heads(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Re-order the features of every head along the first dimension.

    tensor  [n * D, ...] rows of q_proj/k_proj (or their biases, norms [D], lora_B), D = len(order)
    Returns a new tensor whose head feature i is the old feature order[i].
    """
    width = len(order)
    if tensor.shape[0] % width:
        raise ValueError(f"{tensor.shape[0]} rows are not whole heads of {width} features")
    index = torch.as_tensor(order, device=tensor.device)
    heads = tensor.reshape(-1, width, *tensor.shape[1:])
    return heads.index_select(1, index).reshape(tensor.shape)
