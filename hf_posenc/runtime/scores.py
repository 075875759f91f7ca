"""Windows, logit scales and biases: the hook that prepares them, the attention that applies them.

A model whose plan touches scores runs one of our own attention implementations
(`posenc_sdpa`, ...), each a thin layer over the stock one of that name: without work handed over
it passes everything through. The hook refuses to run under any other implementation, so a scale,
window or bias is never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from hf_posenc.errors import PosencError
from hf_posenc.parts import ConstantScale, HeadScale, LogitScale, PositionScale, Window
from hf_posenc.plan import LayerPlan
from hf_posenc.runtime import families
from hf_posenc.runtime.bias import HEAD_SCALE, AlibiTerm, BiasTerm, bias_term
from hf_posenc.runtime.rotary import PlanSwitch

PREFIX = "posenc_"
BLOCK = 256  # queries per slab where scores are computed piece by piece
_EXTRA = 8  # features that ALiBi adds to every head
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2")
_WITH_BIAS = ("eager", "sdpa", "flex_attention")


@dataclass
class ScoreWork:
    """What one layer does to the scores of one call.

    q_index, kv_index  places of queries [T] and keys [S] in the row, in tokens
    trimmed            whether the cache has dropped keys, so that kv_index starts above 0
    at_end             whether the last T keys are those of the queries
    start              per query its document's start in the row, [B or 1, T] (chunked windows)
    scale              factor on q, broadcast over [B, H, T, 1], float32
    scale_bias         whether `scale` multiplies the bias too
    """

    window: Window | None
    bias: BiasTerm | None
    scale: torch.Tensor | None
    scale_bias: bool
    q_index: torch.Tensor
    kv_index: torch.Tensor
    trimmed: bool
    at_end: bool
    start: torch.Tensor

    def allowed(self, rows: slice, columns: slice) -> torch.Tensor:
        """Causal order and window of some queries and keys: bool [B or 1, 1, c, s]."""
        q, kv = self.q_index[rows][:, None], self.kv_index[columns][None, :]
        seen = (q >= kv)[None, None]
        if self.window is None:
            return seen
        if not self.window.chunked:
            return seen & (q - kv < self.window.size)[None, None]
        start = self.start[:, rows, None]
        own = torch.div(q[None] - start, self.window.size, rounding_mode="floor")
        theirs = torch.div(kv[None] - start, self.window.size, rounding_mode="floor")
        return seen & (own == theirs)[:, None]

    def slab(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor | None:
        """The bias of some queries and keys, [B or 1, H, c, s], or None."""
        if self.bias is None:
            return None
        before = self.kv_index.shape[0] - self.q_index.shape[0]
        level = self.at_end and columns.stop == before + rows.stop
        value = self.bias.slab(rows, self.q_index[rows], self.kv_index[columns], level=level)
        if self.scale_bias and self.scale is not None:
            value = value.float() * self.scale[:, :, rows]
        return value.to(dtype)


class ScoreHook:
    """Forward pre-hook of one attention module: hands its `ScoreWork` to our attention."""

    def __init__(self, switch: PlanSwitch, layer: LayerPlan, owner: list[nn.Module]) -> None:
        self.switch, self.layer = switch, layer
        self.owner = owner  # the module holding a shared bias; empty when the layer holds its own

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.switch.active:
            return args, kwargs
        check_implementation(module.config._attn_implementation, self.layer)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        positions = kwargs["position_ids"].to(hidden.device)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        places = families.token_places(hidden, cache, module.layer_idx)
        q_index, kv_index, trimmed, at_end = places
        work = ScoreWork(
            window=self.layer.window,
            bias=bias_term(self.layer.bias, (self.owner or [module])[0], hidden),
            scale=query_scale(self.layer.logit_scale, positions, module),
            scale_bias=_scales_bias(self.layer.logit_scale),
            q_index=q_index,
            kv_index=kv_index,
            trimmed=trimmed,
            at_end=at_end,
            start=q_index[None] - positions,
        )
        return args, {**kwargs, "posenc": work}


def check_implementation(name: str, layer: LayerPlan) -> None:
    """Refuse an attention implementation that would drop what the layer asks for."""
    wanted = [PREFIX + n for n in (_WITH_BIAS if layer.bias is not None else IMPLEMENTATIONS)]
    if layer.window is not None and layer.window.chunked:
        wanted = [PREFIX + n for n in _WITH_BIAS]
    if name not in wanted:
        raise PosencError(
            f"attention implementation {name!r} cannot run this plan's windows, logit scales or "
            f"biases; use {', '.join(wanted)} (model.set_attn_implementation)"
        )


def query_scale(
    scale: LogitScale | None, positions: torch.Tensor, module: Any
) -> torch.Tensor | None:
    """The factor on q, float32: [1, 1, 1, 1], [B or 1, 1, T, 1] or [1, H, 1, 1].

    positions  [B or 1, T], 0-based
    """
    if scale is None:
        return None
    if isinstance(scale, ConstantScale):
        return torch.full((1, 1, 1, 1), scale.value, device=positions.device)
    if isinstance(scale, HeadScale):
        weight: torch.Tensor = getattr(module, HEAD_SCALE).weight
        return weight.float().view(1, -1, 1, 1).to(positions.device)
    return position_factor(scale, positions)[:, None, :, None]


def position_factor(scale: PositionScale, positions: torch.Tensor) -> torch.Tensor:
    """factor(n) of `PositionScale` at every position, float32."""
    seen = positions.float() + 1.0
    if scale.form == "llama4":
        return torch.log1p(torch.floor(seen / scale.floor)) * scale.alpha + 1.0
    if scale.form == "log":
        base = torch.tensor(scale.floor, device=positions.device)
        return (torch.log(base + positions.float()) / torch.log(base)).clamp(min=1.0)
    return 1.0 + scale.alpha * torch.log((seen / scale.floor).clamp(min=1.0))


def attend(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Our attention function over the stock implementation `name`."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        posenc: ScoreWork | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stock = families.stock_attention(name, module)
        if posenc is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        if posenc.scale is not None:
            query = (query.float() * posenc.scale).to(query.dtype)
        if not _windowed(posenc, key) and posenc.bias is None:
            return stock(module, query, key, value, _fitted(attention_mask, posenc), **kwargs)
        apply = _APPLY[name]
        return apply(stock, module, query, key, value, attention_mask, posenc, kwargs)

    attention.__name__ = PREFIX + name
    return attention


def _sdpa(
    stock: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, work: ScoreWork, kw: Any
) -> Any:
    length = query.shape[2]
    plain = mask is None and work.window is None and not work.scale_bias
    if plain and length > 1 and isinstance(work.bias, AlibiTerm):
        return _alibi_features(stock, module, query, key, value, work, kw)
    if length <= BLOCK:
        return _block(stock, module, query, key, value, mask, work, kw, slice(0, length))
    outputs = []
    for first in range(0, length, BLOCK):
        rows = slice(first, min(first + BLOCK, length))
        if torch.is_grad_enabled() and work.bias is not None:
            output = checkpoint(
                _block, stock, module, query, key, value, mask, work, kw, rows, use_reentrant=False
            )[0]
        else:
            output = _block(stock, module, query, key, value, mask, work, kw, rows)[0]
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _block(
    stock: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    work: ScoreWork,
    kw: dict[str, Any],
    rows: slice,
) -> Any:
    columns = _visible(work, rows, query.shape[2], key.shape[2])
    allowed = work.allowed(rows, columns)
    if mask is not None:
        given = _fitted(mask, work)[:, :, rows, columns]
        allowed = allowed & (given if given.dtype == torch.bool else given == 0)
    bias = work.slab(rows, columns, query.dtype)
    options = {**kw, "is_causal": False}
    if bias is not None:
        # A mask to add costs less than one to choose by; at half the least value no bias overflows.
        options["position_bias"] = bias
        allowed = torch.where(allowed, 0.0, torch.finfo(bias.dtype).min / 2).to(bias.dtype)
    keys, values = key[:, :, columns], value[:, :, columns]
    return stock(module, query[:, :, rows], keys, values, allowed, **options)


def _visible(work: ScoreWork, rows: slice, length: int, keys: int) -> slice:
    """Columns that some query of `rows` can see; all of them unless the queries come last."""
    if not work.at_end or torch.compiler.is_compiling():
        return slice(0, keys)
    first, before = 0, keys - length
    if work.window is not None and not work.window.chunked:
        first = max(0, before + rows.start - work.window.size + 1)
    return slice(first, before + rows.stop)


def _alibi_features(
    stock: Any, module: Any, query: Any, key: Any, value: Any, work: ScoreWork, kw: Any
) -> Any:
    """ALiBi as two more features, so that the causal kernel runs without any mask.

    slope * j differs from -slope * (i - j) by a constant of the query's row, which softmax does
    not see. Key j carries j - j_last = -(256 * high + low), both exact in bfloat16, and high is 0
    for the last 256 keys. Heads grow by 8, the values' too: fused kernels want one width for all
    three, on GPUs a multiple of 8, and sdpa would fall back to the whole score matrix.
    """
    assert isinstance(work.bias, AlibiTerm)
    scaling = kw.get("scaling") or query.shape[-1] ** -0.5
    back = work.kv_index[-1] - work.kv_index
    high = torch.div(back, 256, rounding_mode="floor")
    features = -torch.stack((high, back - 256 * high), dim=-1).to(key.dtype)
    slopes = (work.bias.slopes / scaling).to(query.device)
    factors = torch.stack((256 * slopes, slopes), dim=-1).to(query.dtype)
    query = _widened(query, factors[None, :, None])
    key = _widened(key, features[None, None])
    padded = pad(value, (0, _EXTRA))
    output, weights = stock(module, query, key, padded, None, **{**kw, "scaling": scaling})
    return output[..., : value.shape[-1]], weights


def _widened(states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`states` [B, H, T, D] with two features beside them and zeros up to D + _EXTRA."""
    extra = pad(features, (0, _EXTRA - features.shape[-1]))
    return torch.cat((states, extra.expand(*states.shape[:3], -1)), dim=-1)


def _eager(
    stock: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, work: ScoreWork, kw: Any
) -> Any:
    rows, columns = slice(0, query.shape[2]), slice(0, key.shape[2])
    lowest = torch.finfo(query.dtype).min
    blocked = ~work.allowed(rows, columns)
    added = torch.zeros_like(blocked, dtype=query.dtype)
    added = added if mask is None else added + _fitted(mask, work)
    if (bias := work.slab(rows, columns, query.dtype)) is not None:
        added = added + bias
    return stock(module, query, key, value, added.masked_fill(blocked, lowest), **kw)


def _flex(
    stock: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, work: ScoreWork, kw: Any
) -> Any:
    rows, columns = slice(0, query.shape[2]), slice(0, key.shape[2])
    if _windowed(work, key):
        allowed = work.allowed(rows, columns)
        mask = families.narrowed_block_mask(mask, allowed, work.kv_index)
    if (bias := work.slab(rows, columns, query.dtype)) is not None:
        heads = (query.shape[0], query.shape[1], -1, -1)
        kw = {**kw, "position_bias": bias.expand(heads).contiguous()}
    return stock(module, query, key, value, mask, **kw)


def _flash(
    stock: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, work: ScoreWork, kw: Any
) -> Any:
    assert work.window is not None and not work.window.chunked and work.bias is None
    options = {**kw, "sliding_window": work.window.size}
    return stock(module, query, key, value, mask, **options)


_APPLY = {"sdpa": _sdpa, "eager": _eager, "flex_attention": _flex, "flash_attention_2": _flash}


def _windowed(work: ScoreWork, key: torch.Tensor) -> bool:
    """Whether the window can hide anything: never while the row fits into it."""
    return work.window is not None and (key.shape[2] > work.window.size or work.trimmed)


def _fitted(mask: Any, work: ScoreWork) -> Any:
    """The columns of a full-length mask for the keys that this layer's cache still holds."""
    keys = work.kv_index.shape[0]
    if not isinstance(mask, torch.Tensor) or mask.shape[-1] == keys:
        return mask
    return mask.index_select(-1, work.kv_index)


def _scales_bias(scale: LogitScale | None) -> bool:
    return isinstance(scale, PositionScale) and scale.form == "inkling"


def register_attention() -> None:
    """Add our implementations to transformers' registries, under names of our own."""
    for name in IMPLEMENTATIONS:
        families.register_attention(PREFIX + name, attend(name), name)
