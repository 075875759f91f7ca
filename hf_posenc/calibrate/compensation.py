"""Gains on queries that make unrotated scores as like the rotated ones as they can be.

A pair of query head h that loses its rotation contributes Re(z) to a score where it contributed
Re(z e^{i w (m - n)}), z the product of query and conjugate key. A complex gain c per head and pair,
folded into q_proj at no cost, makes it Re(c z). All gains of a head are found together, by least
squares over the queries and keys of some text: the variance of what is left, under the head's own
attention distribution, which is twice the KL from it to second order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.calibrate.probe import Seen, causal, probing
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan

QUERIES = 64  # per row
RIDGE = 1e-2

Gain = Tensor  # complex [H, F]; 1 where nothing is gained


@torch.no_grad()
def query_gains(
    model: Any,
    rows: Tensor,
    plan: PositionPlan,
    *,
    ridge: float = RIDGE,
    real: bool = False,
    seed: int = 0,
    skip: Sequence[int] = (),
) -> dict[int, Gain]:
    """The gain of every layer that loses pairs under `plan`, [H, F] complex64 each.

    model  unconverted; rows [N, T] token ids, all held at once
    ridge  pull towards 1, as a share of the mean of the normal matrix's diagonal
    real   real gains only
    skip   layers that are left as they are (gain 1), though converted
    Each layer is fitted on inputs that come from the converted and compensated layers before it.
    """
    spec = ModelSpec.from_model(model)
    chosen = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(seed))
    queries = chosen[:QUERIES].sort().values
    gains: dict[int, Gain] = {}

    def attend(seen: Seen) -> Tensor:
        own, new = spec.layers[seen.layer].inv_freq, plan.layers[seen.layer].inv_freq
        lost = torch.tensor([a != 0 and b == 0 for a, b in zip(own, new, strict=True)])
        query, key = seen.query, seen.key
        if lost.any():
            gain = torch.ones(query.shape[1], seen.features.count, dtype=torch.complex64)
            if seen.layer not in skip:
                gain = _fitted(seen, lost, queries, ridge, real)
                gains[seen.layer] = gain
            mask = seen.features.spread(lost.float(), query, 0.0).bool()
            query = torch.where(mask, turned(seen.still_query, gain, seen), query)
            key = torch.where(mask, seen.still_key, key)
        return functional.scaled_dot_product_attention(
            query,
            key,
            seen.value,
            attn_mask=seen.allowed,
            is_causal=seen.allowed is None,
            scale=seen.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    with probing(model, attend):
        model(input_ids=rows, use_cache=False, logits_to_keep=1)
    return gains


def turned(query: Tensor, gain: Gain, seen: Seen) -> Tensor:
    """Queries [B, H, T, D] with every pair multiplied by its head's gain."""
    one, two = seen.features.split(query)
    real, imag = gain.real[:, None], gain.imag[:, None]
    result = query.clone()
    result[..., seen.features.first] = one * real - two * imag
    result[..., seen.features.second] = one * imag + two * real
    return result


def _fitted(seen: Seen, lost: Tensor, queries: Tensor, ridge: float, real: bool) -> Gain:
    heads, groups = seen.query.shape[1], seen.key.shape[1]
    visible = causal(seen, queries)
    result = torch.ones(heads, seen.features.count, dtype=torch.complex64)
    for head in range(heads):
        group = slice(head * groups // heads, head * groups // heads + 1)
        one = slice(head, head + 1)
        query, key = seen.query[:, one, queries].float(), seen.key[:, group].float()
        scores = query @ key.transpose(-1, -2) * seen.scaling
        weight = scores.masked_fill(~visible, -torch.inf).softmax(-1)[..., None]
        straight, crossed = _parts(seen, lost, one, group, queries)
        rotated = _rotated(seen, lost, one, group, queries)
        parts = straight if real else torch.cat((straight, -crossed), dim=-1)
        missing = rotated - straight.sum(-1, keepdim=True)
        parts = parts - (weight * parts).sum(-2, keepdim=True)
        missing = missing - (weight * missing).sum(-2, keepdim=True)
        root = weight.sqrt()
        left = (root * parts).flatten(0, -2).double()
        right = (root * missing).flatten(0, -2).double()
        normal = left.T @ left
        normal += ridge * normal.diagonal().mean() * torch.eye(len(normal), dtype=torch.float64)
        change = torch.linalg.solve(normal, left.T @ right)[:, 0].float()
        count = int(lost.sum())
        imag = torch.zeros(count) if real else change[count:]
        result[head, lost] = torch.complex(1 + change[:count], imag)
    return result


def _parts(
    seen: Seen, lost: Tensor, head: slice, group: slice, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of z for the lost pairs, scaled: [B, 1, n, T, pairs] each."""
    query = seen.still_query[:, head, queries].float() * seen.scaling
    q1, q2 = (x[..., lost][..., :, None, :] for x in seen.features.split(query))
    key = seen.still_key[:, group].float()
    k1, k2 = (x[..., lost][..., None, :, :] for x in seen.features.split(key))
    return q1 * k1 + q2 * k2, q2 * k1 - q1 * k2


def _rotated(seen: Seen, lost: Tensor, head: slice, group: slice, queries: Tensor) -> Tensor:
    """What the lost pairs contributed to the scores, [B, 1, n, T, 1]."""
    query = seen.query[:, head, queries].float() * seen.scaling
    q = torch.cat([x[..., lost] for x in seen.features.split(query)], -1)
    k = torch.cat([x[..., lost] for x in seen.features.split(seen.key[:, group].float())], -1)
    return (q @ k.transpose(-1, -2))[..., None]


def fold(weight: Tensor, gain: Gain, first: Tensor, second: Tensor) -> Tensor:
    """Rows of q_proj (weight [H * D, in] or bias [H * D]) multiplied by the gain, a new tensor.

    first, second  indices [F] of the two features of each pair within a head
    """
    heads = gain.shape[0]
    rows = weight.detach().clone().unflatten(0, (heads, -1))
    shape = (heads, -1, *([1] * (rows.ndim - 2)))
    real, imag = gain.real.reshape(shape), gain.imag.reshape(shape)
    one, two = rows[:, first].float(), rows[:, second].float()
    rows[:, first] = (one * real - two * imag).to(rows.dtype)
    rows[:, second] = (one * imag + two * real).to(rows.dtype)
    return rows.flatten(0, 1)
