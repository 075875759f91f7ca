"""`norm` and `score`: what a layer's own queries and keys say about its rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.calibration.probe import Seen, causal


def norms(seen: Seen) -> Tensor:
    """E|q_k| E|k_k| of one batch, [H, F]: the means over its rows and tokens.

    The 2-norm criterion of MHA2MLA, arXiv 2502.14837. A norm does not see rotation.
    """
    size = [
        torch.linalg.vector_norm(torch.stack(seen.features.split(x.float())), dim=0).mean((0, 2))
        for x in (seen.query, seen.key)
    ]
    query, key = size
    return query * key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)


def score_changes(seen: Seen, rows: Tensor) -> Tensor:
    """What attention at the queries `rows` [n] loses: [F, F] nats, summed over batch and queries.

    Half the covariance, under the attention distribution itself, of what dropping the rotation of
    each pair adds to the scores; the mean over heads. The sum of entry (f, g) over the pairs of any
    set is, to second order, the KL from that distribution when the whole set is dropped, over the
    distances that occur: pairs that make up for each other count less together than alone.
    """
    heads, groups = seen.query.shape[1], seen.key.shape[1]
    visible = causal(seen, rows)
    pairs = seen.features.count
    total = torch.zeros(pairs, pairs, dtype=torch.float64, device=seen.query.device)
    for group in range(groups):
        members = slice(group * heads // groups, (group + 1) * heads // groups)
        query = seen.query[:, members, rows].float()
        key = seen.key[:, group : group + 1].float()
        scores = query @ key.transpose(-1, -2) * seen.scaling
        weight = scores.masked_fill(~visible, -torch.inf).softmax(-1)[..., None]
        change = _products(seen, seen.still_query[:, members, rows], seen.still_key, group)
        change -= _products(seen, query, seen.key, group)
        change -= (weight * change).sum(-2, keepdim=True)
        change = change.mul_(weight.sqrt() * seen.scaling).flatten(0, -2)
        total += (change.T @ change).double()
    return total / (2 * heads)


def _products(seen: Seen, query: Tensor, key: Tensor, group: int) -> Tensor:
    """Each pair's part of the scores, [B, h, n, T, F]."""
    one, two = seen.features.split(query.float())
    key_one, key_two = seen.features.split(key[:, group : group + 1].float())
    result = one[..., :, None, :] * key_one[..., None, :, :]
    return result.addcmul_(two[..., :, None, :], key_two[..., None, :, :])
