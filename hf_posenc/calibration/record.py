"""`Calibration`: what dropping rotation would damage, measured once, kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.files import read_json, write_text
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import canonical_json

SCHEMA = 1
STATISTICS = ("norm", "score", "sensitivity", "ablation")
# What a choice is made by when the user names no statistic, best predictor first (docs/results.md).
LAYER_PREFERENCE = ("ablation", "score", "sensitivity", "norm")
PAIR_PREFERENCE = ("score", "sensitivity", "norm")

LayerValues = tuple[float, ...]
PairValues = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Calibration:
    """Damage of dropping rotation, by layer and by pair, larger is worse.

    base        fingerprint of the model it was measured on (`ModelSpec.fingerprint`)
    tokens      how many tokens were measured
    pairs       statistic -> [L][F], pair f of layer l dropped alone: "norm" in squared feature
                units, "score" in nats of the attention distributions, "sensitivity" in nats per
                token of the output
    layers      statistic -> [L], the whole layer dropped: the same, and "ablation", the measured
                KL to the unconverted model in nats per token
    joint       statistic -> [L][F][F], where the damage of several pairs is known too: that of a
                set of pairs is the sum over its members' rows and columns ("score")
    heads       statistic -> [L][H][F], where a value per query head comes for free ("norm")
    provenance  how it was made
    """

    base: str
    tokens: int
    pairs: Mapping[str, PairValues] = field(default_factory=dict)
    layers: Mapping[str, LayerValues] = field(default_factory=dict)
    joint: Mapping[str, tuple[PairValues, ...]] = field(default_factory=dict)
    heads: Mapping[str, tuple[PairValues, ...]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def check(self, spec: ModelSpec) -> None:
        """PosencError unless it was measured on the model that `spec` describes."""
        if self.base != spec.fingerprint:
            raise PosencError(
                f"the calibration was made for another model ({self.base}), this {spec.family} is "
                f"{spec.fingerprint}; calibrate the model that is to be converted"
            )
        for name, rows in self.pairs.items():
            shape = (len(rows), {len(row) for row in rows})
            if shape != (spec.num_layers, {spec.num_frequencies}):
                raise PosencError(f"the calibration's {name!r} is damaged: {shape} values")
        for name, matrices in self.joint.items():
            sizes = {len(row) for matrix in matrices for row in (matrix, *matrix)}
            if (len(matrices), sizes) != (spec.num_layers, {spec.num_frequencies}):
                raise PosencError(f"the calibration's joint {name!r} is damaged: {sizes} values")
        for name, values in self.layers.items():
            if len(values) != spec.num_layers:
                raise PosencError(f"the calibration's {name!r} is damaged: {len(values)} layers")

    def layer_damage(self, by: str | None = None) -> LayerValues:
        """[L], by the statistic `by`, or the best predictor that was measured."""
        return self.layers[_chosen(by, self.layers, LAYER_PREFERENCE, "layers")]

    def pair_damage(self, by: str | None = None) -> PairValues:
        """[L][F], by the statistic `by`, or the best predictor that was measured."""
        return self.pairs[_chosen(by, self.pairs, PAIR_PREFERENCE, "pairs")]

    def harmless_layers(
        self, count: int, by: str | None = None, *, layers: Collection[int] | None = None
    ) -> tuple[int, ...]:
        """The `count` layers whose rotation is missed least, in order of the layer.

        layers  those to choose from; None: all
        Errors: `PosencError` for a count outside 1 to their number.
        """
        damage = self.layer_damage(by)
        inside = range(len(damage)) if layers is None else layers
        if isinstance(count, bool) or not 1 <= count <= len(inside):
            raise PosencError(
                f"auto:{count} is out of range; there are {len(inside)} rotated layers to choose "
                "from"
            )
        order = sorted(inside, key=lambda layer: (damage[layer], layer))
        return tuple(sorted(order[:count]))

    def kept_pairs(
        self,
        count: int,
        by: str | None = None,
        *,
        per_layer: bool = False,
        layers: Collection[int] | None = None,
    ) -> tuple[tuple[int, ...], ...]:
        """Pairs to keep in each layer: `count` of F, those that are missed most.

        Pairs are dropped one by one, each time the one that adds least to the damage of all that
        are gone by then; where only the damage of single pairs is known, in the order of that.
        per_layer  False: the same pairs everywhere, by the sum over layers. True: count pairs
                   times layers, of all layers together, so that a layer keeps as many as it needs,
                   or none
        layers     those that count; the others keep none. None: all
        Errors: `PosencError` for a count outside 1 to F.
        """
        by = _chosen(by, self.pairs, PAIR_PREFERENCE, "pairs")
        damage = self._joint_damage(by)
        pairs = damage.shape[1]
        inside = sorted(range(len(damage)) if layers is None else set(layers))
        if isinstance(count, bool) or not 1 <= count <= pairs:
            raise PosencError(f"{count} pairs is out of range; use 1 to {pairs}")
        chosen = damage[inside] if per_layer else damage[inside].sum(0, keepdims=True)
        kept = _eliminate(chosen, count * len(chosen))
        if not per_layer:
            kept = kept * len(inside)
        return tuple(
            kept[inside.index(layer)] if layer in inside else () for layer in range(len(damage))
        )

    def _joint_damage(self, by: str) -> np.ndarray:
        """[L, F, F]; diagonal where nothing is known of pairs together."""
        if by in self.joint:
            return np.asarray(self.joint[by])
        return np.stack([np.diag(row) for row in self.pairs[by]])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, six significant digits."""
        return {
            "schema": SCHEMA,
            "kind": "calibration",
            "base": self.base,
            "tokens": self.tokens,
            "layers": {name: _rounded(values) for name, values in self.layers.items()},
            "pairs": {name: _rounded(rows) for name, rows in self.pairs.items()},
            "joint": {name: _rounded(rows) for name, rows in self.joint.items()},
            "heads": {name: _rounded(rows) for name, rows in self.heads.items()},
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, value: Any) -> Calibration:
        """What `to_json` wrote; anything else is a `PosencError`."""
        try:
            if (value["schema"], value["kind"]) != (SCHEMA, "calibration"):
                raise PosencError(
                    f"calibration schema {value['schema']!r} is unknown; calibrate again"
                )
            return cls(
                base=str(value["base"]),
                tokens=int(value["tokens"]),
                layers={name: _finite(name, v, 1) for name, v in value["layers"].items()},
                pairs={name: _finite(name, v, 2) for name, v in value["pairs"].items()},
                joint={name: _finite(name, v, 3) for name, v in value.get("joint", {}).items()},
                heads={name: _finite(name, v, 3) for name, v in value["heads"].items()},
                provenance=dict(value["provenance"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise PosencError(
                f"not a calibration ({type(error).__name__}: {error}); make one with "
                "`hf-posenc calibrate`"
            ) from None

    def save(self, path: Path | str) -> Path:
        """Write it as JSON; the file appears complete or not at all."""
        # On one line: indented, the joint damage of a large model takes three times the space.
        return write_text(path, canonical_json(self.to_json()) + "\n")

    @classmethod
    def read(cls, value: Calibration | Path | str) -> Calibration:
        """A calibration as it is, or the one a path leads to."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str | Path):
            raise PosencError(
                f"calibration={value!r:.60} must be a Calibration or the path of its JSON file"
            )
        return cls.load(value)

    @classmethod
    def indifferent(cls, spec: ModelSpec) -> Calibration:
        """One in which nothing is missed, to try a budget on a model before it is measured."""
        row = (0.0,) * spec.num_frequencies
        return cls(
            base=spec.fingerprint,
            tokens=0,
            pairs={name: (row,) * spec.num_layers for name in PAIR_PREFERENCE},
            layers={name: (0.0,) * spec.num_layers for name in STATISTICS},
        )

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Read a file that `save` wrote. Errors: `PosencError` naming the file."""
        value = read_json(path)
        try:
            return cls.from_json(value)
        except PosencError as error:
            raise PosencError(f"{path}: {error}") from None


def _eliminate(damage: np.ndarray, keep: int) -> list[tuple[int, ...]]:
    """Which pairs stay in each of N rows, `keep` in all: damage [N, F, F] of sets of pairs."""
    rows, pairs = damage.shape[:2]
    # What dropping each pair adds to the damage of those that are gone.
    added = np.diagonal(damage, axis1=1, axis2=2).copy()
    gone = np.zeros((rows, pairs), dtype=bool)
    for _ in range(rows * pairs - keep):
        # The last of equals goes first: ties keep the lower number.
        candidates = np.where(gone, np.inf, added).ravel()[::-1]
        row, pair = divmod(rows * pairs - 1 - int(candidates.argmin()), pairs)
        gone[row, pair] = True
        added[row] += damage[row, pair] + damage[row, :, pair]
    return [tuple(int(pair) for pair in np.flatnonzero(~row)) for row in gone]


def _chosen(
    by: str | None, measured: Mapping[str, Any], preference: Sequence[str], what: str
) -> str:
    if by is None:
        by = next((name for name in preference if name in measured), None)
        if by is None:
            raise PosencError(f"the calibration measured no {what}; calibrate again")
    if by not in STATISTICS:
        raise PosencError(f"statistic {by!r} is unknown; {did_you_mean(str(by), STATISTICS)}")
    if by not in measured:
        raise PosencError(
            f"the calibration holds no {by!r} of {what}, only {', '.join(sorted(measured))}; "
            f"calibrate again with it (--statistics {by})"
        )
    return by


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}")


def _finite(name: str, value: Any, depth: int) -> Any:
    """Nested lists as tuples, `depth` deep, of finite numbers."""
    if isinstance(value, list) and depth:
        return tuple(_finite(name, item, depth - 1) for item in value)
    if depth or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name!r} holds {value!r}")
    return float(value)
