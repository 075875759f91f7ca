"""Means with standard errors, and the position bins that losses are reported in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

_FIRST_EDGES = (0, 128, 256, 512)


def mean_and_stderr(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, float | None]:
    """Mean of `values` and its standard error, None when it cannot be estimated.

    Values of one cluster (probes that share a haystack) are not independent: with G clusters the
    error is sqrt(G / (G - 1) * sum_g (sum_{i in g} (x_i - mean))^2) / n, the cluster-robust error
    of a mean. With one value per cluster this is the usual s / sqrt(n). One cluster alone says
    nothing about the spread between clusters.
    """
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    residuals: defaultdict[Hashable, list[float]] = defaultdict(list)
    for index, value in enumerate(values):
        residuals[index if clusters is None else clusters[index]].append(value - mean)
    groups = len(residuals)
    if groups < 2:
        return mean, None
    squares = math.fsum(math.fsum(group) ** 2 for group in residuals.values())
    return mean, math.sqrt(groups / (groups - 1) * squares) / len(values)


def position_bins(length: int) -> list[tuple[int, int]]:
    """Half-open bins of 0-based positions: 0-128, 128-256, 256-512, then doubling up to `length`.

    The last bin ends at `length` even where that is not a power of two.
    """
    edges = [edge for edge in _FIRST_EDGES if edge < length]
    while edges[-1] >= 512 and edges[-1] * 2 < length:
        edges.append(edges[-1] * 2)
    return list(zip(edges, edges[1:] + [length], strict=True))


def bin_metric(bounds: tuple[int, int]) -> str:
    """The lm-eval metric name of one position bin, e.g. `nll_256_512`."""
    return f"nll_{bounds[0]}_{bounds[1]}"


def parse_bin_metric(name: str) -> tuple[int, int] | None:
    """The bin of a metric name made by `bin_metric`, or None for another metric."""
    head, _, bounds = name.partition("_")
    low, _, high = bounds.partition("_")
    return (int(low), int(high)) if head == "nll" and low.isdigit() and high.isdigit() else None
