"""Queries and keys of every attention layer, with and without rotation, in a forward pass.

The probe runs as an attention implementation of its own, so a family's projections, q/k norms and
rotation are the family's; what arrives rotated is turned back with the layer's own table.
B rows, T tokens, H query heads, K key heads, D features, F pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.runtime import families

PROBE = "posenc_probe"
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what attention does beyond a softmax of scores


@dataclass(frozen=True)
class Seen:
    """What one layer's attention is about to do in a forward call over whole rows.

    query, key      rotated, [B, H, T, D] and [B, K, T, D]
    still_query, still_key   the same without rotation (times the table's scale, as a layer whose
                    rotation is dropped computes them)
    allowed         which keys a query sees, bool [B or 1, 1, T, T], None for all before it
    scaling         factor on the scores
    """

    layer: int
    query: Tensor
    key: Tensor
    still_query: Tensor
    still_key: Tensor
    value: Tensor
    allowed: Tensor | None
    scaling: float
    features: PairFeatures

    def attended(self, query: Tensor, key: Tensor) -> Tensor:
        """What the layer attends to with these queries and keys, [B, H, T, D]."""
        return functional.scaled_dot_product_attention(
            query,
            key,
            self.value,
            attn_mask=self.allowed,
            is_causal=self.allowed is None,
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )


@dataclass(frozen=True)
class PairFeatures:
    """Where the two features of each of the F pairs lie in a head."""

    first: slice
    second: slice
    count: int

    @classmethod
    def of(cls, config: Any, spec: ModelSpec) -> PairFeatures:
        """Half-split (i, i + F) or neighbours (2i, 2i + 1), as the family rotates them."""
        width = spec.num_frequencies
        if families.pairs_half_split(config):
            return cls(slice(0, width), slice(width, 2 * width), width)
        return cls(slice(0, 2 * width, 2), slice(1, 2 * width, 2), width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both features of every pair, each [..., F]."""
        return x[..., self.first], x[..., self.second]

    def turned_back(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [..., T, D] as it was before rotation, times the table's scale; cos, sin [..., F]."""
        scale = (cos.square() + sin.square()).sqrt()
        cos, sin = cos / scale, sin / scale
        one, two = self.split(x.float())
        result = x.float().clone()
        result[..., self.first] = one * cos + two * sin
        result[..., self.second] = two * cos - one * sin
        return result.to(x.dtype)

    def spread(self, gates: Tensor, like: Tensor, rest: float) -> Tensor:
        """One number per pair [..., F] put on both its features [..., D]; `rest` elsewhere."""
        result = torch.full((*gates.shape[:-1], like.shape[-1]), rest, device=like.device)
        result[..., self.first] = gates
        result[..., self.second] = gates
        return result.to(like.dtype)


Attend = Callable[[Seen], Tensor]


@contextmanager
def probing(model: Any, attend: Attend) -> Iterator[None]:
    """Let `attend` compute the attention of every layer in the block.

    `attend` gets a `Seen` and returns the attended values [B, H, T, D]. Rows are whole and
    unpadded, without a cache. Errors: `PosencError` for a model whose layers do not go through
    transformers' attention interface, found after the first forward.
    """
    spec = ModelSpec.from_model(model)
    decoder: Any = families.decoder_of(model)
    attentions = families.attentions_of(decoder)
    layout = families.table_layout(families.build_stock_rotary(model.config), spec)
    features = PairFeatures.of(model.config, spec)
    tables: dict[int, tuple[Tensor, Tensor]] = {}
    reached: set[int] = set()
    index_of = {id(attention): index for index, attention in enumerate(attentions)}

    def keep_table(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tables[index_of[id(module)]] = kwargs["position_embeddings"]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer = index_of[id(module)]
        reached.add(layer)
        for name in _UNKNOWN:
            if kwargs.get(name) is not None:
                raise PosencError(
                    f"{spec.family} cannot be probed: its attention has a {name}, which hf_posenc "
                    "does not compute here; calibrate by ablation alone (statistics=['ablation'])"
                )
        still_query, still_key = query, key
        # A layer without rotation is handed a table all the same, and does not use it.
        if spec.layers[layer].rotated:
            table = (_per_pair(t.float(), layout, features.count) for t in tables[layer])
            cos, sin = (values[:, None] for values in table)
            still_query = features.turned_back(query, cos, sin)
            still_key = features.turned_back(key, cos, sin)
        allowed = attention_mask
        if allowed is not None and allowed.dtype != torch.bool:
            allowed = allowed == 0
        seen = Seen(
            layer,
            query,
            key,
            still_query,
            still_key,
            value,
            allowed,
            kwargs.get("scaling") or query.shape[-1] ** -0.5,
            features,
        )
        return attend(seen).transpose(1, 2).contiguous(), None

    families.register_attention(PROBE, attention, "sdpa")
    before = model.config._attn_implementation
    handles = [a.register_forward_pre_hook(keep_table, with_kwargs=True) for a in attentions]
    model.config._attn_implementation = PROBE
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()
    if missing := set(index_of.values()) - reached:
        raise PosencError(
            f"{spec.family} cannot be calibrated: layer {min(missing)} does not use transformers' "
            "attention interface"
        )


def causal(seen: Seen, rows: Tensor) -> Tensor:
    """Which keys the queries at `rows` [n] see: bool, broadcast over [B, H, n, T]."""
    keys = torch.arange(seen.key.shape[2], device=rows.device)
    order = (rows[:, None] >= keys[None])[None, None]
    return order if seen.allowed is None else order & seen.allowed[:, :, rows]


def _per_pair(table: Tensor, layout: families.TableLayout, pairs: int) -> Tensor:
    return table[..., ::2] if layout == "interleaved" else table[..., :pairs]
