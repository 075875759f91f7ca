"""The findings of a report in words, computed from its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_posenc.evaluation.run_folder import RunFolder
from hf_posenc.evaluation.style import tokens_text
from hf_posenc.evaluation.tables import find_score, loss_columns, loss_tasks, variant_label

Mean = tuple[float, float | None]


def mean_loss(run: RunFolder, variant: str) -> Mean | None:
    """Loss over all positions in nats per token and its standard error, averaged over the texts.

    None when any text was not scored for this variant.
    """
    found = [find_score(run, variant, loss_columns([run], task)[-1]) for task in loss_tasks([run])]
    present = [score for score in found if score is not None]
    if not present or len(present) < len(found):
        return None
    errors = [score.stderr for score in present if score.stderr is not None]
    error = math.hypot(*errors) / len(errors) if len(errors) == len(present) else None
    return sum(score.value for score in present) / len(present), error


def needles_found(run: RunFolder, variant: str) -> float | None:
    """Rate of needles found, averaged over tasks and lengths; None if not run."""
    scores = run.evals[variant].scores if variant in run.evals else []
    rates = [s.value for s in scores if s.task.startswith("niah") and s.metric == "em"]
    return sum(rates) / len(rates) if rates else None


def verdict(run: RunFolder) -> str:
    """One sentence on what the conversion costs."""
    losses = {v: mean_loss(run, v) for v in ("stock", "converted", "healed", "control")}
    stock, converted, healed = losses["stock"], losses["converted"], losses["healed"]
    control = losses[run.control]
    if healed is not None and control is not None:
        tokens = run.heals.get("healed", {}).get("tokens")
        after = f"healed on {tokens_text(tokens)} tokens" if tokens else "healed"
        text = f"{run.short_scheme}, {after}, {_gap(healed, control)} {control_name(run)}"
        text += _needles(run, "healed", run.control)
        if run.control == "stock" and converted is not None and converted[0] > control[0]:
            lost = converted[0] - control[0]
            share = (converted[0] - healed[0]) / lost
            text += f"; healing won back {share:.0%} of the {lost:.2f} that converting lost"
        return f"{text}."
    if stock is not None and converted is not None:
        text = (
            f"{run.short_scheme}, without healing, {_gap(converted, stock)} the unconverted model"
        )
        return f"{text}{_needles(run, 'converted', 'stock')}."
    missing = [variant_label(v) for v in ("stock", "converted") if losses[v] is None]
    return (
        f"{run.short_scheme}: no verdict; loss by position was not run for {' and '.join(missing)}."
    )


def comparison(runs: Sequence[RunFolder]) -> str:
    """One sentence naming the runs closest to and furthest from their controls."""
    gaps = []
    for run in runs:
        healed, control = mean_loss(run, "healed"), mean_loss(run, run.control)
        if healed is not None and control is not None:
            gaps.append((healed[0] - control[0], f"{run.short_scheme} ({run.name})"))
    if not gaps:
        return f"{len(runs)} runs; none has both a healed model and its control scored."
    (best, first), (worst, last) = min(gaps), max(gaps)
    text = f"Closest to its control after healing: {first}, {best:+.2f} nats per token"
    return f"{text}; furthest: {last}, {worst:+.2f}." if len(gaps) > 1 else f"{text}."


def warnings(runs: Sequence[RunFolder]) -> list[str]:
    """Reasons why numbers on one page must not be compared; empty when there is none."""
    found = []
    if len({run.model for run in runs}) > 1:
        found.append("The runs start from different models.")
    hashes: dict[str, set[str]] = {}
    for record in (record for run in runs for record in run.evals.values()):
        for source, digest in record.data.items():
            hashes.setdefault(source, set()).add(digest)
    if changed := sorted(source for source, digests in hashes.items() if len(digests) > 1):
        found.append(f"The text of {', '.join(changed)} differs between the evaluations.")
    if len({heal.get("tokens") for run in runs for heal in run.heals.values()}) > 1:
        found.append("Not every model was healed on the same number of tokens.")
    return found


def control_name(run: RunFolder) -> str:
    """The control in words."""
    if run.control == "control":
        return "the unconverted model healed on the same tokens"
    return "the unconverted model"


def _gap(one: Mean, other: Mean) -> str:
    gap = one[0] - other[0]
    if one[1] is not None and other[1] is not None and abs(gap) <= 2 * math.hypot(one[1], other[1]):
        return f"is within two standard errors ({gap:+.3f} nats per token) of"
    size = f"{abs(gap):.2f}" if abs(gap) >= 0.095 else f"{abs(gap):.3f}"
    return f"is {size} nats per token {'worse' if gap > 0 else 'better'} than"


def _needles(run: RunFolder, variant: str, reference: str) -> str:
    one, other = needles_found(run, variant), needles_found(run, reference)
    if one is None or other is None:
        return ""
    return f" and finds {one:.0%} of the needles against {other:.0%}"
