"""`alibi`, `t5_bias`, `query_bias`: a bias on the scores, in place of RoPE or beside it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import ALiBi, Bias, QueryBias, T5Bias, alibi_slopes
from hf_posenc.plan import LayerPlan
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_flag
from hf_posenc.schemes.pairs import drop_rotation


@dataclass(frozen=True, kw_only=True)
class BiasScheme(Scheme):
    """A bias on the scores of the selected layers.

    keep_rope  whether the layer's rotation stays beside the bias
    """

    keep_rope: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("keep_rope", self.keep_rope)

    @abstractmethod
    def bias(self, spec: ModelSpec) -> Bias:
        """The bias of every selected layer."""

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own = spec.layers[index]
        return replace(own if self.keep_rope else drop_rotation(own), bias=self.bias(spec))


@dataclass(frozen=True, kw_only=True)
class Alibi(BiasScheme):
    """-slope_h * distance on the scores, one fixed slope per query head; no rotation by default.

    keep_rope  whether the layer's rotation stays beside the bias
    A fresh conversion changes the function: there is no setting of the slopes that does not.
    Source: Press et al., arXiv 2108.12409.
    """

    name: ClassVar[str] = "alibi"
    source: ClassVar[str] = "Press et al., arXiv 2108.12409"

    keep_rope: bool = False

    def bias(self, spec: ModelSpec) -> ALiBi:
        return ALiBi(alibi_slopes(spec.num_heads))


@dataclass(frozen=True, kw_only=True)
class T5BiasScheme(BiasScheme):
    """A learned bias per query head and distance bucket, zero at first.

    buckets       even: the first half exact distances, the rest log-spaced to max_distance
    max_distance  tokens; farther keys share the last bucket
    share_layers  one table for the whole model, as in T5, else one per layer
    keep_rope     whether the layer's rotation stays beside the bias
    With keep_rope a fresh conversion changes nothing; without it, it is `nope`.
    Source: T5, arXiv 1910.10683.
    """

    name: ClassVar[str] = "t5_bias"
    source: ClassVar[str] = "T5, arXiv 1910.10683"

    buckets: int = 32
    max_distance: int = 128
    share_layers: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("share_layers", self.share_layers)
        T5Bias(self.buckets, self.max_distance, self.share_layers)

    def bias(self, spec: ModelSpec) -> T5Bias:
        return T5Bias(self.buckets, self.max_distance, self.share_layers)


@dataclass(frozen=True, kw_only=True)
class QueryBiasScheme(BiasScheme):
    """A learned bias from the query token's hidden state and the distance, zero at first.

    rank    numbers per query head that mix the distance profiles
    extent  tokens; the bias is zero from that distance on
    keep_rope  whether the layer's rotation stays beside the bias
    With keep_rope a fresh conversion changes nothing; without it, it is `nope`.
    Source: Inkling in transformers.
    """

    name: ClassVar[str] = "query_bias"
    source: ClassVar[str] = "Inkling in transformers"

    rank: int = 16
    extent: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        QueryBias(self.rank, self.extent)

    def bias(self, spec: ModelSpec) -> QueryBias:
        return QueryBias(self.rank, self.extent)
