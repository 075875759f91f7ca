"""`p_rope`: keep a fraction of the checkpoint's own frequencies, drop the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.schedule import uncalibrated
from hf_posenc.schemes.base import Scheme, rotated_layers
from hf_posenc.schemes.options import check_choice, check_flag, check_number
from hf_posenc.schemes.pairs import keep_chosen, keep_fastest, keep_pairs, kept_count

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration

_SELECTIONS = ("high", "low", "uniform")
_CALIBRATED = ("norm", "score", "sensitivity")
_P = 0.25

Pairs = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PRope(Scheme):
    """r = int(p * rotary_dim // 2) of the F frequencies stay as trained, the others are 0.

    On plain RoPE select="high" is transformers' own "proportional" table, bit for bit; otherwise
    the kept values are the checkpoint's, with its attention factor and length dependence.

    p          fraction of the frequencies that is kept, 0 < p <= 1 (1 is the null scheme)
    select     "high": the fastest r; "low": the slowest r; "uniform": pairs floor(k * F / r);
               "norm", "score" or "sensitivity": the r that are missed most by that statistic of a
               calibration, summed over the selected layers; or pairs by name instead of p: a list
               such as [0, 1, 5], or such a list for every layer of the model (those of layers that
               are not selected are not read)
    per_layer  a calibrated choice spends r pairs per layer over all selected layers together: a
               layer keeps as many as it needs, or none
    Source: p-RoPE, arXiv 2410.06205; Gemma 4 in transformers; "low", "uniform" and "norm" as in
    MHA2MLA, arXiv 2502.14837; "score", "sensitivity" and per_layer: this project.
    """

    name: ClassVar[str] = "p_rope"
    source: ClassVar[str] = "p-RoPE, arXiv 2410.06205; Gemma 4"

    p: float = _P
    select: str | Sequence[int] | Sequence[Sequence[int]] = "high"
    per_layer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "p", check_number("p", self.p, at_most=1.0))
        check_flag("per_layer", self.per_layer)
        if isinstance(self.select, str):
            check_choice("select", self.select, (*_SELECTIONS, *_CALIBRATED))
        else:
            object.__setattr__(self, "select", _named_pairs(self.select))
            if self.p != _P:
                raise PosencError(f"select names the pairs: leave out p={self.p:g}")
        if self.per_layer and self.select not in _CALIBRATED:
            raise PosencError(
                "per_layer=True goes with a calibrated choice; use "
                + " or ".join(f"select={name!r}" for name in _CALIBRATED)
            )

    @property
    def needs_calibration(self) -> bool:
        return super().needs_calibration or self.select in _CALIBRATED

    def resolve(
        self, spec: ModelSpec, calibration: Calibration, among: Sequence[int] | None = None
    ) -> Self:
        placed = super().resolve(spec, calibration, among)
        if self.select not in _CALIBRATED:
            return placed
        chosen = placed.selected(spec.num_layers)
        members = [i for i in range(spec.num_layers) if chosen[i] and (among is None or i in among)]
        if not members:
            return placed
        kept = calibration.kept_pairs(
            kept_count("p", self.p, spec.num_frequencies),
            str(self.select),
            per_layer=self.per_layer,
            layers=rotated_layers(spec, members) or members,
        )
        uniform = next(pairs for pairs in kept if pairs)
        return replace(placed, select=kept if self.per_layer else uniform, p=_P, per_layer=False)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own, total = spec.layers[index], spec.num_frequencies
        if not isinstance(self.select, str):
            return keep_chosen(spec, own, self._pairs_of(index, spec))
        if self.select in _CALIBRATED:
            raise uncalibrated(f"select={self.select!r}")
        if self.select == "high":
            return keep_fastest(spec, own, self.p)
        kept = kept_count("p", self.p, total)
        if self.select == "low":
            return keep_pairs(own, range(total - kept, total))
        return keep_pairs(own, {k * total // kept for k in range(kept)})

    def describe(self) -> dict[str, Any]:
        result = super().describe()
        if not self.per_layer:
            del result["per_layer"]
        if not isinstance(self.select, str):
            del result["p"]
        return result

    def _pairs_of(self, index: int, spec: ModelSpec) -> Pairs:
        pairs: Any = self.select
        if isinstance(pairs[0], tuple):
            if len(pairs) != spec.num_layers:
                raise PosencError(
                    f"select names the pairs of {len(pairs)} layers; this model has "
                    f"{spec.num_layers}, give a list for each"
                )
            pairs = pairs[index]
        if pairs and pairs[-1] >= spec.num_frequencies:
            raise PosencError(
                f"pair {pairs[-1]} in select is out of range; this model has pairs 0 to "
                f"{spec.num_frequencies - 1}"
            )
        found: Pairs = pairs
        return found


def _named_pairs(given: object) -> Pairs | tuple[Pairs, ...]:
    """Sorted pair indices, or such a tuple for each layer."""
    listed = list(given) if isinstance(given, Sequence) else []
    lists = [isinstance(item, Sequence) and not isinstance(item, str) for item in listed]
    rows = listed if any(lists) else [listed]
    if any(lists) != all(lists) or not any(rows):
        raise PosencError(
            f"select={given!r:.60} must be {', '.join(map(repr, (*_SELECTIONS, *_CALIBRATED)))}, a "
            "list of pairs, or a list of pairs for every layer, with at least one pair"
        )
    for value in (value for row in rows for value in row):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PosencError(f"select: {value!r} is no pair; use whole numbers from 0 (fastest)")
    named = tuple(tuple(sorted(set(row))) for row in rows)
    return named if any(lists) else named[0]
