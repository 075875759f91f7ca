"""Attention scores of rotary encodings in float64, slow and written from the papers alone.

Nothing here imports hf_posenc or transformers, so that a test which compares against it compares
two independent readings. Vectors are lists of D floats, positions and features count from 0, and a
score is q . k / sqrt(D) before any mask.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence

Vector = Sequence[float]
Rotate = Callable[[Vector, int], list[float]]


def frequencies(width: int, theta: float) -> list[float]:
    """theta_i = theta^(-2(i-1)/d), i = 1 .. d/2 (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    return [theta ** (-2 * (i - 1) / width) for i in range(1, width // 2 + 1)]


def turn(x: Vector, pairs: Sequence[tuple[int, int]], angles: Sequence[float]) -> list[float]:
    """`x` with each pair of features, seen as a complex number, multiplied by e^(i angle)."""
    result = [float(value) for value in x]
    for (first, second), angle in zip(pairs, angles, strict=True):
        turned = complex(x[first], x[second]) * cmath.exp(1j * angle)
        result[first], result[second] = turned.real, turned.imag
    return result


def half_split_pairs(width: int) -> list[tuple[int, int]]:
    """(i, i + d/2): GPT-NeoX's layout."""
    return [(i, i + width // 2) for i in range(width // 2)]


def interleaved_pairs(width: int) -> list[tuple[int, int]]:
    """(2i, 2i + 1): RoFormer's layout, equation 15."""
    return [(2 * i, 2 * i + 1) for i in range(width // 2)]


def rope(theta: float) -> Rotate:
    """RoFormer with the pairs of GPT-NeoX: every pair turns."""
    return lambda x, m: turn(
        x, half_split_pairs(len(x)), [m * f for f in frequencies(len(x), theta)]
    )


def interleaved(theta: float) -> Rotate:
    """RoFormer as printed: neighbours turn together."""
    return lambda x, m: turn(
        x, interleaved_pairs(len(x)), [m * f for f in frequencies(len(x), theta)]
    )


def partial(theta: float, width: int) -> Rotate:
    """GPT-NeoX (arXiv 2204.06745, section 2.1): the first `width` features turn, as in a head of
    that width; the others pass."""
    return lambda x, m: turn(x, half_split_pairs(width), [m * f for f in frequencies(width, theta)])


def p_rope(theta: float, p: float) -> Rotate:
    """p-RoPE (arXiv 2410.06205, section 6): of the d/2 frequencies the fraction p that is highest
    stays, the lowest are set to 0."""

    def rotate(x: Vector, m: int) -> list[float]:
        pairs = len(x) // 2
        kept = math.floor(p * pairs)
        used = [f if i < kept else 0.0 for i, f in enumerate(frequencies(len(x), theta))]
        return turn(x, half_split_pairs(len(x)), [m * f for f in used])

    return rotate


def nope(x: Vector, m: int) -> list[float]:
    """No positional encoding (Kazemnejad et al., arXiv 2305.19466)."""
    return [float(value) for value in x]


def scores(rotate: Rotate, q: Sequence[Vector], k: Sequence[Vector], q_positions, k_positions):
    """All scores [T, S]: token t of `q` at q_positions[t] against token s of `k`."""
    turned_q = [rotate(x, m) for x, m in zip(q, q_positions, strict=True)]
    turned_k = [rotate(x, n) for x, n in zip(k, k_positions, strict=True)]
    scale = math.sqrt(len(q[0]))
    return [
        [sum(a * b for a, b in zip(x, y, strict=True)) / scale for y in turned_k] for x in turned_q
    ]
