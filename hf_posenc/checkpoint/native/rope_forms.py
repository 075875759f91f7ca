"""Spelling a frequency table as `rope_parameters` that transformers turns back into it.

A `LayerPlan` is numbers; a stock config names a formula. Every candidate formula is evaluated and
compared with the plan bit for bit. `longrope` factors can spell almost any table; a frequency that
is not the float32 reciprocal of a float32 (some of llama3 and yarn) comes out one unit in the last
place off, which the form says.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_posenc.errors import PosencError
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors, float32
from hf_posenc.runtime import families

DROPPED = 1e30  # longrope factor of a pair that is not rotated
UNROTATED_BELOW = 1e-20  # radians per token: no position turns such a pair by a float32 step
_ULPS = 8


@dataclass(frozen=True)
class RopeForm:
    """`rope_parameters` and how far their table is from the plan's.

    ulps_off  number of frequencies that are one unit in the last place off (0: bit for bit)
    angle     the largest angle error that makes, in radians at position 131072
    """

    parameters: dict[str, Any]
    ulps_off: int = 0
    angle: float = 0.0


@dataclass(frozen=True)
class RopeShape:
    """What the formula of a stock config depends on besides its parameters.

    own      the base's `rope_parameters` when they are one flat dict, tried first as they stand
    allowed  rope types the target's config takes; None = those that all engines read alike, which
             leaves out "proportional": SGLang's Llama and Qwen ignore its partial_rotary_factor
             and rotate everything
    """

    rotary_dim: int
    max_positions: int
    theta: float
    own: dict[str, Any] | None = None
    allowed: tuple[str, ...] | None = None


def spell(layer: LayerPlan, shape: RopeShape) -> RopeForm:
    """`rope_parameters` that give `layer`'s table, scale and stretch at width `rotary_dim`.

    Errors: `PosencError` with the reason when transformers has no formula for it.
    """
    wanted = normalised(replace(layer, permutation=None))
    for parameters in _exact_candidates(wanted, shape):
        if not _allows(shape, parameters):
            continue
        if _layer_of(parameters, shape) == wanted:
            return RopeForm(copy.deepcopy(parameters))
    if isinstance(wanted.stretch, DynamicNTK):
        raise PosencError(
            "dynamic NTK with dropped pairs, or at another length than the config's "
            f"max_position_embeddings ({shape.max_positions}), has no stock formula"
        )
    if not _allows(shape, {"rope_type": "longrope"}):
        raise PosencError(f"no {' or '.join(shape.allowed or ())} formula gives its frequencies")
    return _nearest_longrope(wanted, shape)


def normalised(layer: LayerPlan) -> LayerPlan:
    """`layer` with frequencies too low to rotate anything as 0, and equal long factors dropped."""
    stretch = layer.stretch
    if isinstance(stretch, LongFactors):
        stretch = replace(stretch, inv_freq=_cut(stretch.inv_freq))
        if stretch.inv_freq == _cut(layer.inv_freq):
            stretch = None
    return replace(layer, inv_freq=_cut(layer.inv_freq), stretch=stretch)


def spaced(theta: float, rotary_dim: int) -> tuple[float, ...]:
    """theta^(-2i/rotary_dim) as transformers computes it in float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
    return tuple((1.0 / theta**exponents).tolist())


def _cut(inv_freq: Iterable[float]) -> tuple[float, ...]:
    return tuple(0.0 if value < UNROTATED_BELOW else value for value in inv_freq)


def _allows(shape: RopeShape, parameters: dict[str, Any]) -> bool:
    rope_type = parameters.get("rope_type", "default")
    if shape.allowed is None:
        return rope_type != "proportional" or parameters is shape.own
    return rope_type in shape.allowed


def _layer_of(parameters: dict[str, Any], shape: RopeShape) -> LayerPlan | None:
    try:
        return normalised(
            families.rope_layer(
                parameters, rotary_dim=shape.rotary_dim, max_positions=shape.max_positions
            )
        )
    except PosencError:
        return None


def _exact_candidates(layer: LayerPlan, shape: RopeShape) -> Iterator[dict[str, Any]]:
    if shape.own is not None:
        yield shape.own
    if isinstance(layer.stretch, DynamicNTK):
        theta, factor = layer.stretch.theta, layer.stretch.factor
        yield {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
        return
    if not layer.rotated and layer.stretch is None:
        yield {
            "rope_type": "proportional",
            "rope_theta": shape.theta,
            "partial_rotary_factor": 0.0,
        }
    if layer.rotated and layer.stretch is None:
        yield from _plain(layer, shape)
        yield from _by_parts(layer, shape)
    near = _neighbours(float32(shape.theta), _ULPS)
    for theta in (shape.theta, *near, *_thetas(layer.inv_freq, shape), 1.0):
        yield _longrope(layer, shape, theta)


def _plain(layer: LayerPlan, shape: RopeShape) -> Iterator[dict[str, Any]]:
    """default, linear and proportional: one base, one divisor, dropped pairs only at the end."""
    kept = layer.num_rotated
    if any(value == 0.0 for value in layer.inv_freq[:kept]):
        return
    rotated = layer.inv_freq[:kept]
    for theta in _thetas(layer.inv_freq, shape):
        table = spaced(theta, shape.rotary_dim)[:kept]
        for factor in _divisors(table, rotated):
            if kept < len(layer.inv_freq):
                # vLLM's proportional ignores `factor`: a divided table goes to longrope instead.
                if factor == 1.0:
                    share = _share(kept, shape.rotary_dim)
                    yield {
                        "rope_type": "proportional",
                        "rope_theta": theta,
                        "partial_rotary_factor": share,
                    }
            elif factor == 1.0:
                yield {"rope_type": "default", "rope_theta": theta}
            else:
                yield {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _by_parts(layer: LayerPlan, shape: RopeShape) -> Iterator[dict[str, Any]]:
    """yarn and llama3 with their usual constants, where fast pairs keep their frequency."""
    if 0.0 in layer.inv_freq or layer.inv_freq[0] != 1.0:
        return
    own = shape.own or {}
    slowest = layer.inv_freq[-1]
    for theta in dict.fromkeys((shape.theta, *_rounded(_estimate(layer.inv_freq, 1)))):
        table = spaced(theta, shape.rotary_dim)
        for factor in list(_rounded(table[-1] / slowest))[:4]:
            lengths = (own.get("original_max_position_embeddings"), shape.max_positions, 8192)
            for length in dict.fromkeys(value for value in lengths if value):
                given = {
                    "rope_theta": theta,
                    "factor": factor,
                    "original_max_position_embeddings": length,
                }
                yield {"rope_type": "yarn", **given}
                yield {
                    "rope_type": "llama3",
                    **given,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }


def _longrope(layer: LayerPlan, shape: RopeShape, theta: float) -> dict[str, Any]:
    long = layer.stretch.inv_freq if isinstance(layer.stretch, LongFactors) else layer.inv_freq
    original = (
        layer.stretch.original_length
        if isinstance(layer.stretch, LongFactors)
        else shape.max_positions
    )
    result: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": _factors(layer.inv_freq, theta, shape.rotary_dim),
        "long_factor": _factors(long, theta, shape.rotary_dim),
        "factor": 1.0,
        "attention_factor": layer.rope_scale,
        "original_max_position_embeddings": original,
    }
    if layer.rope_scale != 1.0 or original != shape.max_positions:
        # vLLM and SGLang do not read attention_factor here: they read these two.
        result |= {"short_mscale": layer.rope_scale, "long_mscale": layer.rope_scale}
    return result


def _nearest_longrope(layer: LayerPlan, shape: RopeShape) -> RopeForm:
    parameters = _longrope(layer, shape, shape.theta)
    found = _layer_of(parameters, shape)
    if found is None or found.rope_scale != layer.rope_scale:
        raise PosencError(f"transformers refuses longrope factors for {layer.num_rotated} pairs")
    pairs = list(zip(layer.inv_freq, found.inv_freq, strict=True))
    if isinstance(layer.stretch, LongFactors) and isinstance(found.stretch, LongFactors):
        pairs += zip(layer.stretch.inv_freq, found.stretch.inv_freq, strict=True)
    elif layer.stretch is not None or found.stretch is not None:
        raise PosencError("long factors cannot be told apart from short ones in float32")
    off = [(a, b) for a, b in pairs if a != b]
    if any((a == 0.0) != (b == 0.0) or abs(a - b) > 1.2e-7 * a for a, b in off):
        raise PosencError("its frequencies lie outside what longrope factors can spell")
    return RopeForm(parameters, len(off), max(abs(a - b) for a, b in off) * 131072)


def _factors(inv_freq: tuple[float, ...], theta: float, rotary_dim: int) -> list[float]:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    powers = (theta**exponents).tolist()
    return [_factor(value, power) for value, power in zip(inv_freq, powers, strict=True)]


def _factor(frequency: float, power: float) -> float:
    """The float32 f with 1 / (f * power) == frequency in float32 arithmetic, else the nearest."""
    if frequency == 0.0:
        return DROPPED
    nearest = float32(1.0 / (frequency * power))
    return next(
        (
            factor
            for factor in _neighbours(nearest, _ULPS)
            if float32(1.0 / float32(factor * power)) == frequency
        ),
        nearest,
    )


def _thetas(inv_freq: tuple[float, ...], shape: RopeShape) -> Iterator[float]:
    """Bases that could have made the rotated frequencies: the base's own, round ones, near ones."""
    rotated = [index for index, value in enumerate(inv_freq) if value]
    yield shape.theta
    if not rotated or rotated[-1] == 0 or inv_freq[0] == 0.0:
        return
    estimate = _estimate(inv_freq, rotated[-1])
    if not (1.0 < estimate < 1e15):
        return
    yield from _rounded(estimate)
    yield from _neighbours(float32(estimate), 2 * _ULPS)


def _estimate(inv_freq: tuple[float, ...], index: int) -> float:
    if index >= len(inv_freq) or not inv_freq[index]:
        return math.inf
    return (inv_freq[0] / inv_freq[index]) ** (len(inv_freq) / index)


def _rounded(value: float) -> Iterator[float]:
    if math.isfinite(value):
        yield from dict.fromkeys(float(f"{value:.{digits}g}") for digits in range(1, 9))


def _divisors(table: tuple[float, ...], rotated: tuple[float, ...]) -> Iterator[float]:
    if table == rotated:
        yield 1.0
    elif rotated[0] < table[0]:
        ratio = table[0] / rotated[0]
        for factor in (*_rounded(ratio), *_neighbours(float32(ratio), 2)):
            if factor >= 1.0 and all(
                float32(a / float32(factor)) == b for a, b in zip(table, rotated, strict=True)
            ):
                yield factor


def _share(kept: int, width: int) -> float:
    share = 2 * kept / width
    return share if int(share * width // 2) == kept else (2 * kept + 0.5) / width


def _neighbours(value: float, steps: int) -> Iterator[float]:
    yield value
    up = down = torch.tensor(value, dtype=torch.float32)
    for _ in range(steps):
        up = torch.nextafter(up, torch.tensor(math.inf))
        down = torch.nextafter(down, torch.tensor(0.0))
        yield up.item()
        yield down.item()
