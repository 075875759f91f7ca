"""`p_rope`: keep a fraction of the checkpoint's own frequencies, drop the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.options import check_choice, check_number
from hf_posenc.schemes.pairs import keep_fastest, keep_pairs, kept_count

_SELECTIONS = ("high", "low", "uniform")
_CALIBRATED = ("norm", "sensitivity")


@dataclass(frozen=True, kw_only=True)
class PRope(Scheme):
    """r = int(p * rotary_dim // 2) of the F frequencies stay as trained, the others are 0.

    On plain RoPE select="high" is transformers' own "proportional" table, bit for bit; otherwise
    the kept values are the checkpoint's, with its attention factor and length dependence.

    p       fraction of the frequencies that is kept, 0 < p <= 1 (1 is the null scheme)
    select  "high": the fastest r; "low": the slowest r; "uniform": pairs floor(k * F / r)
    Source: p-RoPE, arXiv 2410.06205; Gemma 4 in transformers; "low" and "uniform" as in MHA2MLA,
    arXiv 2502.14837.
    """

    name: ClassVar[str] = "p_rope"
    source: ClassVar[str] = "p-RoPE, arXiv 2410.06205; Gemma 4"

    p: float = 0.25
    select: str = "high"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "p", check_number("p", self.p, at_most=1.0))
        if self.select in _CALIBRATED:
            raise PosencError(
                f"select={self.select!r} needs a calibration of the model, which this version does "
                f"not have; use {', '.join(map(repr, _SELECTIONS))}"
            )
        check_choice("select", self.select, _SELECTIONS)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own, total = spec.layers[index], spec.num_frequencies
        if self.select == "high":
            return keep_fastest(spec, own, self.p)
        kept = kept_count("p", self.p, total)
        if self.select == "low":
            return keep_pairs(own, range(total - kept, total))
        return keep_pairs(own, {k * total // kept for k in range(kept)})
