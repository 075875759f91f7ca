"""The one value in the middle: what every decoder layer does with positions.

Schemes produce a `PositionPlan`; the runtime, checkpoints, healing, evaluation and the report
consume it. It is immutable, hashable, equal by value, and survives JSON bit for bit.

Conventions (they hold in the whole package):
  frequencies   radians per token, index 0 is the fastest; float32 values held as Python floats
  pairs         in memory always half-split: pair i is the features (i, i + F) of a head
  positions     0-based; layers 0-based
  shapes        B batch, T query length, S key length, H heads, K kv heads, D head_dim, L layers,
                F = rotary_dim / 2 frequencies
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_posenc.errors import PosencError
from hf_posenc.parts import (
    LEARNED,
    Bias,
    Embedding,
    LogitScale,
    Window,
    part_from_json,
    part_to_json,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Pairing = Literal["half_split", "interleaved"]
FORMAT_VERSION = 1
_PARTS = ("window", "logit_scale", "bias")


def float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python float."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def _frequencies(values: Sequence[float], what: str) -> tuple[float, ...]:
    result = tuple(float32(float(value)) for value in values)
    bad = [value for value in result if not (math.isfinite(value) and value >= 0.0)]
    if bad:
        raise PosencError(f"{what}: {bad[0]} is not a frequency; use finite values >= 0")
    return result


@dataclass(frozen=True, slots=True)
class LongFactors:
    """LongRoPE: rows longer than `original_length` use `inv_freq` instead (arXiv 2402.13753).

    `inv_freq` has F entries in radians per token; the switch looks at the largest position of
    the forward call, as transformers does.
    """

    original_length: int
    inv_freq: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", _frequencies(self.inv_freq, "LongFactors.inv_freq"))


@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """Dynamic NTK: theta grows with the row once it passes `original_length`.

    theta(n) = theta * (factor * n / original_length - (factor - 1)) ** (d / (d - 2)), d = 2F.
    Pairs whose `LayerPlan.inv_freq` is 0 stay unrotated.
    """

    original_length: int
    theta: float
    factor: float


Stretch = LongFactors | DynamicNTK


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one decoder layer does with positions.

    inv_freq      F frequencies in radians per token, index 0 fastest; 0.0 = not rotated
    rope_scale    multiplies cos and sin of all pairs (the attention factor of YaRN and LongRoPE)
    stretch       how the frequencies depend on the length of the row, or None
    permutation   feature n of every q and k head in memory is the base's feature permutation[n]
                  (length D); None leaves the order as it is
    window        which earlier tokens the layer sees; None leaves the family's own mask
    logit_scale   factor on the scores (on q), or None
    bias          what is added to the scores, or None
    gained        q_proj or q_norm carries gains for the pairs that lost their rotation; the base's
                  own weights are kept beside it (`runtime/gains.py`)
    """

    inv_freq: tuple[float, ...]
    rope_scale: float = 1.0
    stretch: Stretch | None = None
    permutation: tuple[int, ...] | None = None
    window: Window | None = None
    logit_scale: LogitScale | None = None
    bias: Bias | None = None
    gained: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", _frequencies(self.inv_freq, "LayerPlan.inv_freq"))
        if not (math.isfinite(self.rope_scale) and self.rope_scale > 0):
            raise PosencError(f"rope_scale {self.rope_scale} must be finite and above 0")
        object.__setattr__(self, "rope_scale", float(self.rope_scale))
        if self.permutation is not None:
            order = tuple(int(n) for n in self.permutation)
            if sorted(order) != list(range(len(order))):
                raise PosencError("LayerPlan.permutation must name every feature exactly once")
            identity = order == tuple(range(len(order)))
            object.__setattr__(self, "permutation", None if identity else order)
        if isinstance(self.stretch, LongFactors) and len(self.stretch.inv_freq) != len(
            self.inv_freq
        ):
            raise PosencError("LongFactors.inv_freq must be as long as LayerPlan.inv_freq")

    @property
    def num_rotated(self) -> int:
        """How many of the F pairs are rotated."""
        return sum(value != 0.0 for value in self.inv_freq)

    @property
    def scores_changed(self) -> bool:
        """Whether the layer does more to the scores than rotate q and k."""
        return any(part is not None for part in (self.window, self.logit_scale, self.bias))

    @property
    def rotated(self) -> bool:
        """Whether any pair of this layer is rotated (False: NoPE)."""
        return self.num_rotated > 0


@dataclass(frozen=True, slots=True)
class PositionPlan:
    """One `LayerPlan` per decoder layer, and how feature pairs lie in the stored weights.

    layers    one per decoder layer
    base      fingerprint of the model it was built for (`ModelSpec.fingerprint`)
    pairing   layout of q/k rows in STORED weights; in memory they are always half-split
    embedding what is added once to the token embeddings, or None
    scheme    name and options that produced it, canonical JSON, for people: not compared
    chosen    the same scheme with the layers and pairs that a calibration chose for it written
              out, canonical JSON; None where nothing was left to a calibration. Not compared
    """

    layers: tuple[LayerPlan, ...]
    base: str
    pairing: Pairing = "half_split"
    embedding: Embedding | None = None
    scheme: str = field(default='{"name": "custom"}', compare=False)
    chosen: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise PosencError("a plan needs at least one layer")
        widths = {len(layer.inv_freq) for layer in self.layers}
        if len(widths) != 1 or 0 in widths:
            raise PosencError(
                f"layers of a plan must share one number of frequencies, not {widths}"
            )
        if self.pairing not in ("half_split", "interleaved"):
            raise PosencError(
                f"pairing {self.pairing!r} is unknown; use 'half_split' or 'interleaved'"
            )
        object.__setattr__(self, "scheme", canonical_json(json.loads(self.scheme)))
        if self.chosen is not None:
            object.__setattr__(self, "chosen", canonical_json(json.loads(self.chosen)))

    @property
    def num_frequencies(self) -> int:
        """F, the number of feature pairs per head that could rotate."""
        return len(self.layers[0].inv_freq)

    @property
    def scheme_dict(self) -> dict[str, Any]:
        """The scheme as `{"name": ..., **options}`."""
        result: dict[str, Any] = json.loads(self.scheme)
        return result

    @property
    def chosen_dict(self) -> dict[str, Any] | None:
        """The scheme as it can be built again without the calibration; None if it needed none."""
        return None if self.chosen is None else dict(json.loads(self.chosen))

    @property
    def label(self) -> str:
        """Short text for tables and messages, e.g. `nope_interleaved(every=4)`."""
        return scheme_label(self.scheme_dict)

    @property
    def digest(self) -> str:
        """16 hex digits over everything that is compared."""
        text = ("scheme", "chosen")
        compared = {key: value for key, value in self.to_json().items() if key not in text}
        return hashlib.sha256(canonical_json(compared).encode()).hexdigest()[:16]

    @property
    def permuted(self) -> bool:
        """Whether any layer's q/k features are re-ordered in memory."""
        return any(layer.permutation is not None for layer in self.layers)

    @property
    def gained(self) -> bool:
        """Whether any layer's q_proj carries gains."""
        return any(layer.gained for layer in self.layers)

    def without_gains(self) -> PositionPlan:
        """The same plan before its queries were compensated."""
        return replace(self, layers=tuple(replace(k, gained=False) for k in self.layers))

    @property
    def adds_parameters(self) -> bool:
        """Whether the plan brings parameters of its own, which are trained and saved."""
        in_layers = [part for k in self.layers for part in (k.logit_scale, k.bias)]
        return any(isinstance(part, LEARNED) for part in (self.embedding, *in_layers))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; equal layers are written once."""
        distinct = list(dict.fromkeys(self.layers))
        result = {
            "format": FORMAT_VERSION,
            "scheme": self.scheme_dict,
            "base": self.base,
            "pairing": self.pairing,
            "kinds": [_layer_to_json(layer) for layer in distinct],
            "layers": [distinct.index(layer) for layer in self.layers],
        }
        if self.chosen is not None:
            result["chosen"] = self.chosen_dict
        if self.embedding is not None:
            result["embedding"] = part_to_json(self.embedding)
        return result

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PositionPlan:
        """The plan `to_json` wrote; anything else is a `PosencError`."""
        try:
            if value["format"] != FORMAT_VERSION:
                raise PosencError(
                    f"plan format {value['format']!r} is unknown to this version of hf_posenc "
                    f"(it reads {FORMAT_VERSION}); upgrade hf_posenc"
                )
            kinds = [_layer_from_json(kind) for kind in value["kinds"]]
            return cls(
                layers=tuple(kinds[_index(index)] for index in value["layers"]),
                base=value["base"],
                pairing=value["pairing"],
                embedding=part_from_json(value["embedding"]) if "embedding" in value else None,
                scheme=canonical_json(value["scheme"]),
                chosen=canonical_json(value["chosen"]) if "chosen" in value else None,
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise PosencError(f"not a position plan ({type(error).__name__}: {error})") from None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> PositionPlan:
        """The plan a stock or converted checkpoint's config amounts to, described in words.

        Errors: `PosencError` for a model without rotary tables.
        """
        from hf_posenc.checkpoint.read_back import plan_from_config

        return plan_from_config(config)


def canonical_json(value: Any) -> str:
    """One spelling per value: keys sorted, no NaN."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def scheme_label(scheme: Mapping[str, Any]) -> str:
    """`name(option=value, ...)`, leaving out options that are None."""
    shown = [
        f"{key}={value}" for key, value in scheme.items() if key != "name" and value is not None
    ]
    return f"{scheme['name']}({', '.join(shown)})" if shown else str(scheme["name"])


def _index(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"layer index {value!r}")
    return value


def _layer_to_json(layer: LayerPlan) -> dict[str, Any]:
    result: dict[str, Any] = {"inv_freq": list(layer.inv_freq), "rope_scale": layer.rope_scale}
    if isinstance(layer.stretch, LongFactors):
        result["long_factors"] = {
            "original_length": layer.stretch.original_length,
            "inv_freq": list(layer.stretch.inv_freq),
        }
    elif isinstance(layer.stretch, DynamicNTK):
        result["dynamic_ntk"] = {
            "original_length": layer.stretch.original_length,
            "theta": layer.stretch.theta,
            "factor": layer.stretch.factor,
        }
    if layer.permutation is not None:
        result["permutation"] = list(layer.permutation)
    for name in _PARTS:
        if (part := getattr(layer, name)) is not None:
            result[name] = part_to_json(part)
    if layer.gained:
        result["gained"] = True
    return result


def _layer_from_json(value: Mapping[str, Any]) -> LayerPlan:
    known = {"inv_freq", "rope_scale", "long_factors", "dynamic_ntk", "permutation", "gained"}
    known |= set(_PARTS)
    if unknown := set(value) - known:
        raise PosencError(
            f"plan carries {sorted(unknown)[0]!r}, which this version of hf_posenc does not know; "
            "upgrade hf_posenc"
        )
    stretch: Stretch | None = None
    if "long_factors" in value:
        stretch = LongFactors(
            value["long_factors"]["original_length"], tuple(value["long_factors"]["inv_freq"])
        )
    elif "dynamic_ntk" in value:
        stretch = DynamicNTK(**value["dynamic_ntk"])
    order = value.get("permutation")
    return LayerPlan(
        inv_freq=tuple(value["inv_freq"]),
        rope_scale=value["rope_scale"],
        stretch=stretch,
        permutation=None if order is None else tuple(order),
        gained=value.get("gained", False) is True,
        **{name: part_from_json(value[name]) for name in _PARTS if name in value},
    )
