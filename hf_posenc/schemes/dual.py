"""`dual`: local layers and global layers with a base each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.schedule import select_layers
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_integer, check_number
from hf_posenc.schemes.pairs import keep_fastest, kept_count, proportional
from hf_posenc.schemes.score_options import parse_window


@dataclass(frozen=True, kw_only=True)
class Dual(Scheme):
    """Plain RoPE with one base in local layers and another in every n-th, global, layer.

    every         the global layers are those with (i + 1) % every == 0: 5, 11, ... for 6
    theta_local   base of the local layers; None leaves them as the checkpoint has them
    theta_global  base of the global layers; None leaves them as the checkpoint has them
    window        sliding window of the local layers, in tokens; None leaves them as they are
    p_global      fraction of the global layers' frequencies that is kept, the fastest (`p_rope`)
    A base that is given replaces the checkpoint's scaling too. A layer that the checkpoint does
    not rotate stays unrotated.
    Source: Gemma 3, arXiv 2503.19786; Gemma 4 in transformers.
    """

    name: ClassVar[str] = "dual"
    source: ClassVar[str] = "Gemma 3, arXiv 2503.19786; Gemma 4"

    every: int = 6
    theta_local: float | None = 1e4
    theta_global: float | None = 1e6
    window: int | None = None
    p_global: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("every", self.every, at_least=1)
        for name in ("theta_local", "theta_global"):
            if (theta := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_number(name, theta, above=1.0))
        parse_window("window", self.window)
        object.__setattr__(self, "p_global", check_number("p_global", self.p_global, at_most=1.0))

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        is_global = select_layers(f"every:{self.every}", spec.num_layers)[index]
        own = spec.layers[index]
        theta, p = (self.theta_global, self.p_global) if is_global else (self.theta_local, 1.0)
        if theta is None or not own.rotated:
            planned = keep_fastest(spec, own, p, option="p_global")
        else:
            kept_count("p_global", p, spec.num_frequencies)
            planned = proportional(spec, theta, p)
        window = None if is_global else parse_window("window", self.window)
        return replace(planned, window=window or own.window)
