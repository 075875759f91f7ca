"""Keeping or dropping feature pairs of a layer's own plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hf_posenc.plan import LayerPlan, LongFactors


def keep_pairs(own: LayerPlan, kept: Collection[int]) -> LayerPlan:
    """`own` with every pair outside `kept` unrotated, whatever the length of the row.

    kept  indices of pairs, 0 = fastest; their frequencies, rope_scale and stretch stay
    """
    stretch = own.stretch
    if isinstance(stretch, LongFactors):
        stretch = replace(stretch, inv_freq=_zero_outside(stretch.inv_freq, kept))
    return replace(own, inv_freq=_zero_outside(own.inv_freq, kept), stretch=stretch)


def drop_rotation(own: LayerPlan) -> LayerPlan:
    """`own` without any rotation: cos = rope_scale, sin = 0 at every position and length.

    rope_scale stays: YaRN and LongRoPE use it as a temperature of the scores (it enters them
    squared), which the checkpoint was trained or tuned with; only the rotation goes.
    """
    return replace(own, inv_freq=(0.0,) * len(own.inv_freq), stretch=None)


def _zero_outside(inv_freq: tuple[float, ...], kept: Collection[int]) -> tuple[float, ...]:
    return tuple(value if index in kept else 0.0 for index, value in enumerate(inv_freq))
