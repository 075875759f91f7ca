"""`plan_search`: greedy dropping, measured again after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hf_posenc.calibration.ablation import Damage, without_pairs
from hf_posenc.calibration.measure import Progress, at_rest, check_unconverted, checked_rows
from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.schemes import Scheme, make_scheme
from hf_posenc.schemes.options import check_choice, check_integer
from hf_posenc.schemes.pairs import drop_rotation

Unit = Literal["layers", "pairs"]


@dataclass(frozen=True)
class SearchStep:
    """One step: what was dropped, and the measured KL of all that is dropped by then."""

    dropped: int
    damage: float


@dataclass(frozen=True)
class SearchResult:
    """The scheme that was found, and how: `steps` in the order of dropping."""

    scheme: Scheme
    steps: tuple[SearchStep, ...]


def plan_search(
    model: Any,
    rows: Iterable[Tensor],
    *,
    drop: int,
    unit: Unit = "layers",
    shortlist: int = 8,
    progress: Progress | None = None,
) -> SearchResult:
    """Drop layers, or pairs in all layers alike, one by one, each time the one that costs least.

    rows       token ids as for `calibrate`; every candidate costs one forward over all of them
    drop       how many of the L layers or F pairs lose their rotation
    unit       "layers" finds a `nope_interleaved`, "pairs" a `p_rope` with explicit pairs
    shortlist  candidates tried in each step: those that were cheapest when last tried; the first
               step tries all
    Damage is the KL to the unconverted model in nats per token. Deterministic: ties go to the lower
    index. Errors: `PosencError` for a converted model, no rows, or a budget out of range.
    """
    check_budget(ModelSpec.from_model(model), drop, unit, shortlist)
    check_unconverted(model)
    batch = checked_rows(rows, model)
    report = progress or (lambda share, text: None)
    with at_rest(model):
        damage = Damage(model, batch)
        spec = damage.spec
        total = spec.num_layers if unit == "layers" else spec.num_frequencies
        candidates = _droppable(spec) if unit == "layers" else list(range(total))
        found = _greedy(
            lambda gone: damage.of(_dropped(spec.layers, unit, gone)),
            candidates,
            drop,
            shortlist,
            report,
            unit,
        )
    gone = sorted(step.dropped for step in found)
    if unit == "layers":
        return SearchResult(make_scheme("nope_interleaved", layers=gone), found)
    kept = [pair for pair in range(total) if pair not in gone]
    return SearchResult(make_scheme("p_rope", select=kept), found)


def check_budget(spec: ModelSpec, drop: int, unit: str, shortlist: int) -> None:
    """Refuse a budget that the model `spec` describes does not have. Errors: `PosencError`."""
    check_choice("unit", unit, ("layers", "pairs"))
    check_integer("shortlist", shortlist, at_least=1)
    most = len(_droppable(spec)) if unit == "layers" else spec.num_frequencies - 1
    if isinstance(drop, bool) or not isinstance(drop, int) or not 1 <= drop <= most:
        raise PosencError(f"drop={drop!r} is out of range; use 1 to {most} {unit}")


def _droppable(spec: ModelSpec) -> list[int]:
    """Layers that the checkpoint rotates."""
    return [index for index, layer in enumerate(spec.layers) if layer.rotated]


def _greedy(
    cost: Callable[[set[int]], float],
    candidates: list[int],
    drop: int,
    shortlist: int,
    report: Progress,
    unit: str,
) -> tuple[SearchStep, ...]:
    last_seen = dict.fromkeys(candidates, 0.0)
    trials = len(candidates) + (drop - 1) * min(shortlist, len(candidates))
    tried = 0
    steps: list[SearchStep] = []
    while len(steps) < drop:
        gone = {step.dropped for step in steps}
        left = sorted(set(last_seen) - gone, key=lambda item: (last_seen[item], item))
        # Only what is tried in the same step is comparable.
        now = left[:shortlist] if steps else left
        for item in now:
            report(tried / trials, f"dropping {unit}: {len(steps) + 1} of {drop}")
            last_seen[item] = cost({*gone, item})
            tried += 1
        best = min(now, key=lambda item: (last_seen[item], item))
        steps.append(SearchStep(best, last_seen[best]))
    report(1.0, "done")
    return tuple(steps)


def _dropped(layers: tuple[LayerPlan, ...], unit: str, gone: set[int]) -> list[LayerPlan]:
    if unit == "pairs":
        return without_pairs(layers, gone)
    return [drop_rotation(k) if index in gone else k for index, k in enumerate(layers)]
