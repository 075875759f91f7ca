"""`rope`: the checkpoint's own rotary encoding, optionally at another base or scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_number
from hf_posenc.schemes.scaling import RopeScaling
from hf_posenc.schemes.score_options import describe_scale, parse_scale, parse_window


@dataclass(frozen=True, kw_only=True)
class Rope(Scheme):
    """Rotary position embedding; without options exactly the checkpoint's own plan.

    theta    base of the frequencies theta^(-2i/d); None keeps the checkpoint's own
    scaling  {"type": "pi" | "linear" | "ntk" | "dynamic" | "yarn" | "llama3" | "longrope",
             "factor": s, ...} with the keys of transformers' rope_parameters, or "yarn:4";
             replaces the checkpoint's scaling ("default" removes it); None keeps it. The trained
             length is the config's unless original_max_position_embeddings is given.
    window   sliding window in tokens, the query included; None leaves the family's own mask
    logit_scale  factor on the scores: a number, "per_head" (learned), or {"kind": "llama4" | "log"
             | "inkling" | "drope", "floor": tokens, "alpha": ...}
    Frequencies come from transformers' own functions. A layer that the checkpoint does not rotate
    stays unrotated.
    Source: RoFormer, arXiv 2104.09864; PI 2306.15595; YaRN 2309.00071; LongRoPE 2402.13753.
    """

    name: ClassVar[str] = "rope"
    source: ClassVar[str] = "RoFormer, arXiv 2104.09864"

    theta: float | None = None
    scaling: RopeScaling | Mapping[str, Any] | str | None = None
    window: int | None = None
    logit_scale: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta is not None:
            object.__setattr__(self, "theta", check_number("theta", self.theta, above=1.0))
        if self.scaling is not None:
            object.__setattr__(self, "scaling", RopeScaling.parse(self.scaling))
        parse_window("window", self.window)
        object.__setattr__(self, "logit_scale", parse_scale(self.logit_scale))

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        planned = self._rotation(spec, spec.layers[index])
        window = parse_window("window", self.window) or planned.window
        return replace(planned, window=window, logit_scale=self.logit_scale)

    def describe(self) -> dict[str, Any]:
        result = super().describe()
        if self.logit_scale is not None:
            result["logit_scale"] = describe_scale(self.logit_scale)
        return result

    def _rotation(self, spec: ModelSpec, own: LayerPlan) -> LayerPlan:
        if (self.theta is None and self.scaling is None) or not own.rotated:
            return own
        theta = spec.theta if self.theta is None else self.theta
        if self.scaling is None:
            if "rope_theta" not in spec.rope:
                raise PosencError(
                    f"{spec.family}: rope_parameters differ by layer type; with theta= name the "
                    "scaling too (scaling='default' for none), or use the scheme 'dual'"
                )
            return spec.rope_layer({**spec.rope, "rope_theta": theta})
        return spec.rope_layer(RopeScaling.parse(self.scaling).rope_parameters(spec, theta))
