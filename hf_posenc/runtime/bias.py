"""What plans add to attention scores: slabs of bias, and the modules that hold learned ones.

A term gives one slab at a time, for some query rows and key columns, so that nothing the size of
the score matrix is ever held. Distances are i - j in tokens, i the query's and j the key's place
in the row; places follow one another. Pairs with i < j never matter, the mask removes them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import pad

from hf_posenc.parts import ALiBi, Bias, QueryBias, T5Bias

BIAS, HEAD_SCALE = "posenc_bias", "posenc_head_scale"


class BiasTerm(Protocol):
    """A bias ready for one forward call of one layer."""

    def slab(
        self, rows: slice, q_index: torch.Tensor, kv_index: torch.Tensor, *, level: bool = False
    ) -> torch.Tensor:
        """Bias of queries `rows`, at places q_index [c], on keys at kv_index [s].

        `level` promises that the last query stands at the last key. [B or 1, H, c, s].
        """


class AlibiTerm:
    """-slope_h * distance."""

    def __init__(self, slopes: torch.Tensor) -> None:
        self.slopes = slopes

    def slab(
        self, rows: slice, q_index: torch.Tensor, kv_index: torch.Tensor, *, level: bool = False
    ) -> torch.Tensor:
        distance = _distances(q_index, kv_index).clamp(min=0).float()
        return _spread(-self.slopes[:, None] * distance, kv_index.shape[0])


class PosencT5Bias(nn.Module):
    """One learned number per bucket and query head, zero at first: [buckets, H]."""

    def __init__(self, part: T5Bias, num_heads: int, **factory: Any) -> None:
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.zeros(part.buckets, num_heads, **factory))

    def term(self, hidden_states: torch.Tensor) -> _T5Term:
        return _T5Term(self.part, self.weight.to(hidden_states.device))


class _T5Term:
    def __init__(self, part: T5Bias, weight: torch.Tensor) -> None:
        self.part, self.weight = part, weight

    def slab(
        self, rows: slice, q_index: torch.Tensor, kv_index: torch.Tensor, *, level: bool = False
    ) -> torch.Tensor:
        distance = _distances(q_index, kv_index)
        bucket = t5_bucket(distance, self.part.buckets, self.part.max_distance)
        return _spread(self.weight[bucket].t(), kv_index.shape[0])


class PosencQueryBias(nn.Module):
    """Inkling's bias: `relative` [H * rank, d_model] mixes the profiles `proj` [rank, extent].

    `proj` is zero at first, so that a fresh bias changes nothing.
    """

    def __init__(self, part: QueryBias, num_heads: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.part, self.num_heads = part, num_heads
        weight = torch.empty(num_heads * part.rank, hidden_size, **factory)
        self.relative = nn.Parameter(nn.init.normal_(weight, std=hidden_size**-0.5))
        self.proj = nn.Parameter(torch.zeros(part.rank, part.extent, **factory))

    def term(self, hidden_states: torch.Tensor) -> _QueryTerm:
        states = nn.functional.linear(hidden_states, self.relative.to(hidden_states.dtype))
        states = states.view(*hidden_states.shape[:2], self.num_heads, self.part.rank)
        return _QueryTerm(states, self.proj.to(hidden_states.dtype), self.part.extent)


class _QueryTerm:
    def __init__(self, states: torch.Tensor, proj: torch.Tensor, extent: int) -> None:
        self.states, self.proj, self.extent = states, proj, extent

    def slab(
        self, rows: slice, q_index: torch.Tensor, kv_index: torch.Tensor, *, level: bool = False
    ) -> torch.Tensor:
        if level:
            return self._band(rows, kv_index.shape[0])
        by_distance = (self.states[:, rows] @ self.proj).transpose(1, 2)
        distance = (q_index[:, None] - kv_index[None, :])[None, None]
        index = distance.clamp(0, self.extent - 1).expand(*by_distance.shape[:2], -1, -1)
        outside = (distance < 0) | (distance >= self.extent)
        return by_distance.gather(-1, index).masked_fill(outside, 0.0)

    def _band(self, rows: slice, keys: int) -> torch.Tensor:
        """The same without looking up each pair: row i of the band is shifted i places.

        Zeros behind every row, and read with rows one shorter than they were written.
        """
        proj = self.proj[:, :keys].flip(-1)  # farthest first, as keys lie
        by_key = (self.states[:, rows] @ proj).transpose(1, 2)
        count, width = by_key.shape[2], by_key.shape[2] + proj.shape[1] - 1
        shifted = pad(by_key, (0, count)).flatten(-2)[..., :-count].unflatten(-1, (count, width))
        return pad(shifted, (keys - width, 0))


class PosencHeadScale(nn.Module):
    """One learned factor per query head, 1 at first: [H]."""

    def __init__(self, num_heads: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, **factory))


def _distances(q_index: torch.Tensor, kv_index: torch.Tensor) -> torch.Tensor:
    """Every distance of a slab once, from the last query and first key down: [c + s - 1]."""
    count = q_index.shape[0] + kv_index.shape[0] - 1
    return q_index[-1] - kv_index[0] - torch.arange(count, device=q_index.device)


def _spread(values: torch.Tensor, keys: int) -> torch.Tensor:
    """The slab [1, H, c, s] of values [H, c + s - 1] that lie as `_distances`; s = `keys`."""
    starts = torch.arange(values.shape[-1] - keys, -1, -1, device=values.device)
    return values.contiguous().unfold(-1, keys, 1).index_select(-2, starts)[None]


def t5_bucket(distance: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """T5's one-sided bucket of each distance (transformers' T5 decoder, step for step).

    The first half of the buckets are the exact distances 0, 1, ..., the others are log-spaced up
    to `max_distance`; everything farther shares the last one.
    """
    distance = distance.clamp(min=0)
    exact = buckets // 2
    spread = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = exact + (spread * (buckets - exact)).to(torch.long)
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


def make_bias_module(
    bias: Bias | None, num_heads: int, hidden_size: int, **factory: Any
) -> nn.Module | None:
    """The module that holds a bias's parameters; None for a bias without any."""
    if isinstance(bias, T5Bias):
        return PosencT5Bias(bias, num_heads, **factory)
    if isinstance(bias, QueryBias):
        return PosencQueryBias(bias, num_heads, hidden_size, **factory)
    return None


def bias_term(bias: Bias | None, holder: Any, hidden_states: torch.Tensor) -> BiasTerm | None:
    """The term of one call; `holder` is the module that carries the parameters as `posenc_bias`."""
    if bias is None:
        return None
    if isinstance(bias, ALiBi):
        return AlibiTerm(torch.tensor(bias.slopes, device=hidden_states.device))
    term: BiasTerm = getattr(holder, BIAS).term(hidden_states)
    return term
