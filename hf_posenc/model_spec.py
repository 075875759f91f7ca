"""`ModelSpec`: what a checkpoint's own positional encoding is, read once from its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.plan import LayerPlan, PositionPlan, canonical_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder's attention and the frequencies it was trained with.

    family            transformers `model_type`, e.g. "llama"
    head_dim          D, features per head
    rotary_dim        features per head that the family's rotary table covers (2F; D in most)
    max_positions     `max_position_embeddings` of the config
    layers            what each layer of the checkpoint itself does: its own plan
    rope_parameters   the config's `rope_parameters`, canonical JSON
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    hidden_size: int
    max_positions: int
    layers: tuple[LayerPlan, ...]
    rope_parameters: str

    def __post_init__(self) -> None:
        if len(self.layers) != self.num_layers:
            raise PosencError(f"{len(self.layers)} layer plans for {self.num_layers} layers")

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> ModelSpec:
        """Read a config; frequencies come from the family's own rotary class built on it.

        Errors: `PosencError` for a model without a decoder that uses rotary tables.
        """
        from hf_posenc.runtime import families

        return families.spec_from_config(config)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ModelSpec:
        """Read a loaded model; frequencies come from the rotary module it was built with."""
        from hf_posenc.runtime import families

        return families.spec_from_model(model)

    @property
    def num_frequencies(self) -> int:
        """F, the number of feature pairs per head that could rotate."""
        return self.rotary_dim // 2

    @property
    def rope(self) -> dict[str, Any]:
        """`rope_parameters` as a dict."""
        result: dict[str, Any] = json.loads(self.rope_parameters)
        return result

    @property
    def theta(self) -> float:
        """The checkpoint's RoPE base.

        Errors: `PosencError` where the config has one base per layer type.
        """
        theta = self.rope.get("rope_theta")
        if theta is None:
            raise PosencError(
                f"{self.family}: rope_parameters has no single rope_theta; name one (theta=...)"
            )
        return float(theta)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything a plan depends on; weights do not take part."""
        shape = [
            self.family,
            self.num_layers,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary_dim,
        ]
        own = PositionPlan(self.layers, base="").to_json()
        text = canonical_json([shape, own["kinds"], own["layers"]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rope_layer(self, rope_parameters: Mapping[str, Any]) -> LayerPlan:
        """The layer that transformers computes for `rope_parameters` at this model's shape.

        `rope_parameters` is what stands in a config: rope_type, rope_theta and the type's own keys.
        Errors: `PosencError` for an unknown rope_type or missing keys.
        """
        from hf_posenc.runtime import families

        return families.rope_layer(
            rope_parameters, rotary_dim=self.rotary_dim, max_positions=self.max_positions
        )
