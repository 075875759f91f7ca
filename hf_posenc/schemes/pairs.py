"""Keeping or dropping feature pairs of a layer's own plan.

Where transformers computes the same encoding, its own function makes the table, so that a stock
model with the same weights agrees bit for bit. (torch's float32 `pow` rounds some values another
way in a shorter table, so a slice of the full table can differ from it in the last bit.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, LongFactors


def keep_pairs(own: LayerPlan, kept: Collection[int]) -> LayerPlan:
    """`own` with every pair outside `kept` unrotated, whatever the length of the row.

    kept  indices of pairs, 0 = fastest; their frequencies, rope_scale and stretch stay
    """
    stretch = own.stretch
    if isinstance(stretch, LongFactors):
        stretch = replace(stretch, inv_freq=_zero_outside(stretch.inv_freq, kept))
    return replace(own, inv_freq=_zero_outside(own.inv_freq, kept), stretch=stretch)


def keep_fastest(spec: ModelSpec, own: LayerPlan, p: float, *, option: str = "p") -> LayerPlan:
    """`own` with r = int(p * rotary_dim // 2) of its F pairs rotated, the fastest ones.

    On plain RoPE this is transformers' "proportional". PosencError when r is 0; `option` is what
    the user calls p.
    """
    return keep_chosen(spec, own, range(kept_count(option, p, spec.num_frequencies)))


def keep_chosen(spec: ModelSpec, own: LayerPlan, kept: Collection[int]) -> LayerPlan:
    """`own` with the pairs `kept` rotated; the fastest ones on plain RoPE as "proportional"."""
    count = len(kept)
    if count == spec.num_frequencies:
        return own
    if count == 0:
        return drop_rotation(own)
    if set(kept) == set(range(count)) and is_plain(spec, own):
        # Half a pair more than `count`, so that rounding down cannot lose one.
        return proportional(spec, spec.theta, (count + 0.5) / spec.num_frequencies)
    return keep_pairs(own, kept)


def proportional(spec: ModelSpec, theta: float, p: float) -> LayerPlan:
    """transformers' "proportional" RoPE (Gemma 4) at base `theta` for the shape of `spec`."""
    return spec.rope_layer(
        {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": p}
    )


def is_plain(spec: ModelSpec, own: LayerPlan) -> bool:
    """Whether `own` is the unscaled RoPE that the checkpoint's config names."""
    return spec.rope.get("rope_type") == "default" and own == spec.rope_layer(spec.rope)


def kept_count(option: str, p: float, total: int) -> int:
    """How many of `total` frequencies the fraction `p` keeps, rounded as transformers does."""
    kept = int(p * (2 * total) // 2)
    if kept == 0:
        raise PosencError(
            f"{option}={p:g} keeps none of {total} frequencies; use at least {1 / total:g}, "
            "or the scheme 'nope' to drop rotation altogether"
        )
    return kept


def drop_rotation(own: LayerPlan) -> LayerPlan:
    """`own` without any rotation: cos = rope_scale, sin = 0 at every position and length.

    rope_scale stays: YaRN and LongRoPE use it as a temperature of the scores (it enters them
    squared), which the checkpoint was trained or tuned with; only the rotation goes.
    """
    return replace(own, inv_freq=(0.0,) * len(own.inv_freq), stretch=None)


def _zero_outside(inv_freq: tuple[float, ...], kept: Collection[int]) -> tuple[float, ...]:
    return tuple(value if index in kept else 0.0 for index, value in enumerate(inv_freq))
