"""`interleaved`: feature pairs (2i, 2i + 1) instead of (i, i + F)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, Pairing
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_flag


@dataclass(frozen=True, kw_only=True)
class Interleaved(Scheme):
    """Adjacent features form a pair; each pair keeps the frequency of its index.

    preserve  True: stored q/k rows are re-ordered so that the model computes what it did before.
              False: the weights stay as they are and are read as interleaved, which makes other
              pairs of the trained features rotate together and changes the function.
    With preserve=False in some layers only, the weights are stored as they are used (half-split,
    the re-paired layers re-ordered). With preserve=True the layout of the whole checkpoint changes,
    so it cannot be limited to layers.
    Source: RoFormer, arXiv 2104.09864, eq. 34; LLaMA's original code.
    """

    name: ClassVar[str] = "interleaved"
    source: ClassVar[str] = "RoFormer, arXiv 2104.09864; LLaMA's original code"

    preserve: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("preserve", self.preserve)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own = spec.layers[index]
        if self.preserve:
            return own
        width = spec.rotary_dim
        order = (*range(0, width, 2), *range(1, width, 2), *range(width, spec.head_dim))
        return replace(own, permutation=order)

    def pairing(self, selected: tuple[bool, ...]) -> Pairing:
        if all(selected):
            return "interleaved"
        if self.preserve:
            raise PosencError(
                "interleaved(preserve=True) is about how the whole checkpoint is stored and cannot "
                "be limited to layers; use layers='all', or preserve=False to re-pair some layers"
            )
        return "half_split"
