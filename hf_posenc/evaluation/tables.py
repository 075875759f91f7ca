"""The tables of a report: which score stands in which cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_posenc.evaluation.record import Score
from hf_posenc.evaluation.run_folder import VARIANTS, RunFolder
from hf_posenc.evaluation.style import length_text

LOSS_TASK = "ppl_bins"
_METRICS = {
    "nll": "nats per answer token",
    "em": "exact match",
    "em_strict": "exact match, spaces included",
    "acc": "forced choice",
    "margin": "margin over the best wrong answer (nats)",
}

Judgement = Literal["better", "worse", "same", ""]


@dataclass(frozen=True)
class Column:
    """One score, found in every variant under the same four keys."""

    task: str
    metric: str
    length: int | None
    bin: tuple[int, int] | None
    head: str
    higher_is_better: bool | None


@dataclass(frozen=True)
class Cell:
    """A value with its error and its difference to the control; None where there is none."""

    value: float | None = None
    stderr: float | None = None
    n: int | None = None
    difference: float | None = None
    judgement: Judgement = ""


@dataclass(frozen=True)
class Row:
    """A variant: what was trained, and one cell per column."""

    variant: str
    label: str
    against: str
    trained: int | None
    tokens: int | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Scores of one task: column groups, and rows per run.

    counts  per column the n that all rows share, None where they differ
    """

    task: str
    groups: tuple[tuple[str, int], ...]
    columns: tuple[Column, ...]
    bodies: tuple[tuple[str, tuple[Row, ...]], ...]
    counts: tuple[int | None, ...]


def variant_label(variant: str) -> str:
    """The words the report uses for a variant."""
    return {
        "stock": "unconverted",
        "converted": "converted",
        "healed": "converted, healed",
        "control": "unconverted, healed",
    }[variant]


def tables(runs: Sequence[RunFolder]) -> list[Table]:
    """Loss by position first, then one table per other task, in the order they were run."""
    scores = list(_all_scores(runs))
    tasks = list(dict.fromkeys(score.task for score in scores))
    result = []
    for task in sorted(tasks, key=lambda name: not name.startswith(LOSS_TASK)):
        if task.startswith(LOSS_TASK):
            columns = loss_columns(runs, task)
            groups: list[tuple[str, int]] = [("nats per token, by position", len(columns))]
        else:
            columns = _other_columns([score for score in scores if score.task == task])
            metrics = list(dict.fromkeys(column.metric for column in columns))
            groups = [
                (_METRICS.get(name, name), sum(column.metric == name for column in columns))
                for name in metrics
            ]
        result.append(_table(runs, task, groups, columns))
    return result


def loss_columns(runs: Sequence[RunFolder], task: str) -> list[Column]:
    """One column per position bin and one over all, at the longest length that all records have."""
    chosen = [score for score in _all_scores(runs) if score.task == task and score.metric == "nll"]
    length = _common_length(runs, task)
    bins = sorted({score.bin for score in chosen if score.bin and score.length == length})
    columns = [Column(task, "nll", length, edges, _bin_text(edges), False) for edges in bins]
    return [*columns, Column(task, "nll", length, None, "all", False)]


def loss_tasks(runs: Iterable[RunFolder]) -> list[str]:
    """The tasks that measure loss by position on a text."""
    names = dict.fromkeys(score.task for score in _all_scores(runs))
    return [name for name in names if name.startswith(LOSS_TASK)]


def shown_variants(run: RunFolder) -> list[str]:
    """Every variant a reader expects: stock, converted, healed, and the control of ce."""
    wanted = {"stock", "converted", "healed", *run.evals, *run.heals, run.control}
    return [variant for variant in VARIANTS if variant in wanted]


def reference_of(run: RunFolder, variant: str) -> str | None:
    """What a variant is compared with: healed with the control, everything else with stock."""
    if variant == "stock":
        return None
    return run.control if variant == "healed" else "stock"


def find_score(run: RunFolder, variant: str, column: Column) -> Score | None:
    """The score of a column, or None; the mean over bins stands in for a missing whole-row loss."""
    scores = run.evals[variant].scores if variant in run.evals else []
    key = (column.task, column.metric, column.length)
    matching = [score for score in scores if (score.task, score.metric, score.length) == key]
    exact = [score for score in matching if score.bin == column.bin]
    if not exact and column.bin is None and column.task.startswith(LOSS_TASK):
        return _mean_over_bins(matching)
    return exact[0] if exact else None


def _table(
    runs: Sequence[RunFolder],
    task: str,
    groups: Sequence[tuple[str, int]],
    columns: Sequence[Column],
) -> Table:
    bodies = tuple((run.name, tuple(_rows(run, columns))) for run in runs)
    counts = []
    for index in range(len(columns)):
        cells = [row.cells[index] for _, rows in bodies for row in rows]
        found = {cell.n for cell in cells if cell.n is not None}
        counts.append(found.pop() if len(found) == 1 else None)
    return Table(task, tuple(groups), tuple(columns), bodies, tuple(counts))


def _rows(run: RunFolder, columns: Sequence[Column]) -> Iterable[Row]:
    for variant in shown_variants(run):
        reference = reference_of(run, variant)
        heal = run.heals.get(variant, {})
        yield Row(
            variant=variant,
            label=variant_label(variant),
            against=variant_label(reference) if reference else "",
            trained=heal.get("trainable_parameters"),
            tokens=heal.get("tokens"),
            cells=tuple(_cell(run, variant, reference, column) for column in columns),
        )


def _cell(run: RunFolder, variant: str, reference: str | None, column: Column) -> Cell:
    score = find_score(run, variant, column)
    if score is None:
        return Cell()
    base = find_score(run, reference, column) if reference else None
    if base is None:
        return Cell(score.value, score.stderr, score.n)
    difference = score.value - base.value
    return Cell(score.value, score.stderr, score.n, difference, _judge(score, base, column))


def _judge(score: Score, base: Score, column: Column) -> Judgement:
    """Whether a difference exceeds two standard errors; "" where an error is unknown."""
    if score.stderr is None or base.stderr is None or column.higher_is_better is None:
        return ""
    difference = score.value - base.value
    if abs(difference) <= 2 * math.hypot(score.stderr, base.stderr):
        return "same"
    return "better" if (difference > 0) == column.higher_is_better else "worse"


def _other_columns(scores: Sequence[Score]) -> list[Column]:
    keys = {(s.metric, s.length, s.bin): s.higher_is_better for s in scores}
    metrics = list(dict.fromkeys(metric for metric, _, _ in keys))
    ordered = sorted(keys, key=lambda key: (metrics.index(key[0]), key[1] or 0, key[2] or (0, 0)))
    return [
        Column(scores[0].task, metric, length, edges, _head(length, edges), keys[key])
        for key in ordered
        for metric, length, edges in [key]
    ]


def _head(length: int | None, edges: tuple[int, int] | None) -> str:
    if edges is not None:
        return _bin_text(edges)
    return "score" if length is None else length_text(length)


def _mean_over_bins(scores: Sequence[Score]) -> Score | None:
    """Mean weighted by the positions of each bin; its error assumes fully correlated bins."""
    parts = [(score, score.bin[1] - score.bin[0]) for score in scores if score.bin is not None]
    if not parts:
        return None
    total = sum(width for _, width in parts)
    errors = [score.stderr * width / total for score, width in parts if score.stderr is not None]
    return Score(
        task=parts[0][0].task,
        metric=parts[0][0].metric,
        value=sum(score.value * width for score, width in parts) / total,
        stderr=sum(errors) if len(errors) == len(parts) else None,
        n=min(score.n for score, _ in parts),
        length=parts[0][0].length,
        unit=parts[0][0].unit,
        higher_is_better=False,
    )


def _all_scores(runs: Iterable[RunFolder]) -> Iterable[Score]:
    for run in runs:
        for record in run.evals.values():
            yield from record.scores


def _common_length(runs: Iterable[RunFolder], task: str) -> int | None:
    """The longest row length that every record of the task has, else the longest of any."""
    per_record = [
        {s.length for s in record.scores if s.task == task and s.length is not None}
        for run in runs
        for record in run.evals.values()
    ]
    present = [lengths for lengths in per_record if lengths]
    if not present:
        return None
    return max(set.intersection(*present) or set.union(*present))


def _bin_text(edges: tuple[int, int]) -> str:
    return f"{length_text(edges[0])}–{length_text(edges[1])}"
