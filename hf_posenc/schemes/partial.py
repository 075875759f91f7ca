"""`partial`: ordinary partial RoPE, a narrower rotary part with frequencies spaced over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_choice, check_number
from hf_posenc.schemes.pairs import keep_pairs

# Scalings that treat each frequency by its value alone, whatever the width of the table.
_ANY_WIDTH = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class Partial(Scheme):
    """rotary_dim = fraction * head_dim features turn, at theta^(-2j/rotary_dim) for slot j.

    fraction  of head_dim, 0 < fraction <= 1; rotary_dim must be a whole, even number of features
              and at most what the checkpoint rotates
    pairs     "matched": slot j takes the checkpoint's own feature pair of the nearest frequency
              (each pair at most once), in the untouched feature order. Where the checkpoint
              rotates k * rotary_dim features, k whole, slot j is pair k*j at its own frequency.
              "raw": the literal pairs (j, j + rotary_dim/2) of the untouched order, as a stock
              partial family reads the same weights. In memory feature j becomes feature j,
              feature j + rotary_dim/2 becomes feature j + F, and the features behind them fill
              the remaining places in order.
    Frequencies come from transformers' own function at the new width (plain RoPE, linear and
    llama3 scaling), bit for bit those of a stock partial family. Scalings that belong to the full
    table (yarn, longrope, dynamic, proportional, one per layer type) are kept where k is whole:
    slot j takes pair k*j as the checkpoint scales it; elsewhere they are refused. A layer that
    the checkpoint does not rotate stays unrotated.
    Source: GPT-NeoX, arXiv 2204.06745; GLM, Phi, StableLM and MiniMax-M3 in transformers.
    """

    name: ClassVar[str] = "partial"
    source: ClassVar[str] = "GPT-NeoX, arXiv 2204.06745; GLM, MiniMax-M3"

    fraction: float = 0.5
    pairs: str = "matched"

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction = check_number("fraction", self.fraction, at_most=1.0)
        object.__setattr__(self, "fraction", fraction)
        check_choice("pairs", self.pairs, ("matched", "raw"))

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own = spec.layers[index]
        width = self.rotary_dim(spec)
        if not own.rotated or width == spec.rotary_dim:
            return own
        slots, total = width // 2, spec.num_frequencies
        # Slot j has the exponent 2j/width, pair i has 2i/(2F): the nearest i, halves rounded up.
        nearest = [(2 * j * total + slots) // (2 * slots) for j in range(slots)]
        if spec.rope.get("rope_type") in _ANY_WIDTH and own == spec.rope_layer(spec.rope):
            respaced = replace(spec, rotary_dim=width).rope_layer(spec.rope)
            frequencies = [0.0] * total
            for pair, frequency in zip(nearest, respaced.inv_freq, strict=True):
                frequencies[pair] = frequency
            matched = replace(respaced, inv_freq=tuple(frequencies))
        elif total % slots == 0:
            matched = keep_pairs(own, nearest)
        else:
            raise _undefined(spec, width)
        return matched if self.pairs == "matched" else _raw(matched, nearest, spec.head_dim)

    def rotary_dim(self, spec: ModelSpec) -> int:
        """Features per head that turn; PosencError when it is not an even number from 2 up."""
        exact = self.fraction * spec.head_dim
        width = round(exact)
        if abs(exact - width) > 1e-6 or width % 2 or width < 2:
            below = max(2, 2 * int(exact // 2))
            near = sorted({below, min(below + 2, spec.rotary_dim)})
            raise PosencError(
                f"fraction={self.fraction:g} of head_dim {spec.head_dim} is {exact:g} features; "
                "the rotary width must be an even whole number of at least 2; use "
                + " or ".join(f"{value / spec.head_dim:g} ({value} features)" for value in near)
            )
        if width > spec.rotary_dim:
            raise PosencError(
                f"fraction={self.fraction:g} wants {width} rotated features and this checkpoint "
                f"rotates {spec.rotary_dim} of {spec.head_dim}; use at most "
                f"{spec.rotary_dim / spec.head_dim:g}"
            )
        return width


def _undefined(spec: ModelSpec, width: int) -> PosencError:
    rope_type = spec.rope.get("rope_type")
    what = f"rope_type {rope_type!r}" if rope_type else "a RoPE of its own per layer type"
    wholes = [w for w in range(2, spec.rotary_dim, 2) if spec.rotary_dim % w == 0]
    return PosencError(
        f"partial with {width} rotated features is not defined on this checkpoint: {what} "
        f"cannot be re-spaced over them; use {', '.join(map(str, wholes))} of {spec.head_dim} "
        "features (pairs of its own), or p_rope"
    )


def _raw(matched: LayerPlan, nearest: list[int], head_dim: int) -> LayerPlan:
    if isinstance(matched.stretch, DynamicNTK):
        raise PosencError(
            "partial(pairs='raw') is not defined on a checkpoint with dynamic NTK scaling, which "
            "ties each frequency to its place; use pairs='matched'"
        )
    total, slots = len(matched.inv_freq), len(nearest)
    rest = range(2 * slots, 2 * total)
    order = (
        *range(slots),
        *rest[: total - slots],
        *range(slots, 2 * slots),
        *rest[total - slots :],
        *range(2 * total, head_dim),
    )
    stretch = matched.stretch
    if isinstance(stretch, LongFactors):
        stretch = replace(stretch, inv_freq=_first(stretch.inv_freq, nearest))
    first = _first(matched.inv_freq, nearest)
    return replace(matched, inv_freq=first, stretch=stretch, permutation=order)


def _first(inv_freq: tuple[float, ...], nearest: list[int]) -> tuple[float, ...]:
    return (*(inv_freq[pair] for pair in nearest), *(0.0,) * (len(inv_freq) - len(nearest)))
