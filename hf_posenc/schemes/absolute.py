"""`sinusoidal` and `learned_absolute`: vectors added once to the token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import Embedding, LearnedAbsolute
from hf_posenc.parts import Sinusoidal as SinusoidalPart
from hf_posenc.plan import LayerPlan
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_choice, check_flag, check_integer
from hf_posenc.schemes.pairs import drop_rotation


@dataclass(frozen=True, kw_only=True)
class AbsoluteScheme(Scheme):
    """Position vectors on the token embeddings; no rotation in the selected layers by default.

    keep_rope  whether the layers' rotation stays beside the vectors
    """

    keep_rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("keep_rope", self.keep_rope)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own = spec.layers[index]
        return own if self.keep_rope else drop_rotation(own)


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(AbsoluteScheme):
    """Fixed sines and cosines of the position, frequencies 10000^(-2i/d_model).

    scale_embeddings  multiply the token embeddings by sqrt(d_model) first, as the paper does
    keep_rope         whether the layers' rotation stays beside the vectors
    Source: Vaswani et al., arXiv 1706.03762.
    """

    name: ClassVar[str] = "sinusoidal"
    source: ClassVar[str] = "Transformer, arXiv 1706.03762"

    scale_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("scale_embeddings", self.scale_embeddings)

    def embedding(self, spec: ModelSpec) -> Embedding:
        if spec.hidden_size % 2:
            raise PosencError(f"sinusoidal needs an even model width, not {spec.hidden_size}")
        return SinusoidalPart(self.scale_embeddings)


@dataclass(frozen=True, kw_only=True)
class LearnedAbsoluteScheme(AbsoluteScheme):
    """A trained vector per position; a longer input than the table is refused when it comes.

    max_positions  rows of the table; None takes the config's max_position_embeddings
    init           "zero" (with keep_rope a fresh conversion changes nothing) or "sinusoidal"
    keep_rope      whether the layers' rotation stays beside the vectors
    Source: GPT-2.
    """

    name: ClassVar[str] = "learned_absolute"
    source: ClassVar[str] = "GPT-2"

    max_positions: int | None = None
    init: str = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_positions is not None:
            check_integer("max_positions", self.max_positions, at_least=1)
        check_choice("init", self.init, ("zero", "sinusoidal"))

    def embedding(self, spec: ModelSpec) -> Embedding:
        rows = spec.max_positions if self.max_positions is None else self.max_positions
        return LearnedAbsolute(rows, "zero" if self.init == "zero" else "sinusoidal")
