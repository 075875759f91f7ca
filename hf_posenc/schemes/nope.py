"""`nope` and `nope_interleaved`: layers without any rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.schedule import Schedule, check_offset, select_layers
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_integer
from hf_posenc.schemes.pairs import drop_rotation
from hf_posenc.schemes.score_options import describe_scale, parse_scale

_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class Nope(Scheme):
    """No rotation in the selected layers, all of them by default (DroPE before its healing).

    Position reaches such a layer through the causal mask and the residual stream alone. The
    attention factor of a YaRN or LongRoPE checkpoint stays: it is a temperature, not a rotation.

    logit_scale  factor on the scores, as in `rope`
    Source: Kazemnejad et al., arXiv 2305.19466; DroPE, arXiv 2512.12167.
    """

    name: ClassVar[str] = "nope"
    source: ClassVar[str] = "Kazemnejad et al., arXiv 2305.19466; DroPE, arXiv 2512.12167"

    logit_scale: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "logit_scale", parse_scale(self.logit_scale))

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        return replace(drop_rotation(spec.layers[index]), logit_scale=self.logit_scale)

    def describe(self) -> dict[str, Any]:
        result = super().describe()
        if self.logit_scale is not None:
            result["logit_scale"] = describe_scale(self.logit_scale)
        return result


@dataclass(frozen=True, kw_only=True)
class NopeInterleaved(Scheme):
    """Every n-th layer has no rotation, the others keep the checkpoint's own.

    every   the unrotated layers are those with (i + 1) % every == 0: 3, 7, 11, ... for 4
    offset  the unrotated layers are those with i % every == offset instead, 0 <= offset < every
    layers  the unrotated layers by name, e.g. "5-7,17" or [5, 6, 7, 17], instead of every
    Source: SmolLM3, Llama 4 and Cohere2 in transformers; RNoPE, arXiv 2501.18795.
    """

    name: ClassVar[str] = "nope_interleaved"
    source: ClassVar[str] = "SmolLM3, Llama 4, Cohere2; RNoPE, arXiv 2501.18795"

    layers: Schedule | None = None
    every: int = _EVERY
    offset: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("every", self.every, at_least=1)
        if self.layers is not None and (self.every != _EVERY or self.offset is not None):
            raise PosencError("layers names the unrotated layers: leave out every and offset")
        if self.offset is not None:
            check_offset(self.every, self.offset)

    def selected(self, num_layers: int) -> tuple[bool, ...]:
        if self.layers is not None:
            return select_layers(self.layers, num_layers)
        return select_layers(f"every:{self.every}", num_layers, offset=self.offset)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        return drop_rotation(spec.layers[index])

    def describe(self) -> dict[str, Any]:
        result = super().describe()
        if self.layers is not None:
            del result["every"]
        return result
