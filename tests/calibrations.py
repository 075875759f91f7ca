"""Calibrations made by hand, so that what they choose can be read off."""

from __future__ import annotations

from collections.abc import Sequence

from hf_posenc.calibration import STATISTICS, Calibration
from hf_posenc.calibration.record import PAIR_PREFERENCE
from hf_posenc.model_spec import ModelSpec


def calibration_of(
    spec: ModelSpec,
    *,
    layers: dict[str, Sequence[float]] | None = None,
    pairs: dict[str, Sequence[Sequence[float]]] | None = None,
) -> Calibration:
    """A calibration of the model `spec` describes that holds these values alone."""
    return Calibration(
        base=spec.fingerprint,
        tokens=1,
        layers={name: tuple(values) for name, values in (layers or {}).items()},
        pairs={name: tuple(map(tuple, rows)) for name, rows in (pairs or {}).items()},
    )


def falling(spec: ModelSpec) -> Calibration:
    """By every statistic a layer is missed less than the one before, a pair less than a faster."""
    count, pairs = spec.num_layers, spec.num_frequencies
    table = [[float((count - i) * (pairs - j)) for j in range(pairs)] for i in range(count)]
    return calibration_of(
        spec,
        layers={name: [sum(row) for row in table] for name in STATISTICS},
        pairs=dict.fromkeys(PAIR_PREFERENCE, table),
    )
