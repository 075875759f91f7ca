"""From lm-eval's results to scores with standard errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_posenc.evaluation.record import Needle, Score
from hf_posenc.evaluation.statistics import mean_and_stderr, parse_bin_metric
from hf_posenc.evaluation.suites import PlannedTask

_UNITS = {"nll": "nats/token"}


def own_scores(task: PlannedTask, samples: Sequence[Mapping[str, Any]]) -> list[Score]:
    """Means over documents of one of our tasks; documents of one haystack are one cluster."""
    names = dict.fromkeys(name for sample in samples for name in sample["metrics"])
    scores = []
    for name in names:
        with_it = [sample for sample in samples if name in sample["metrics"]]
        clusters = [sample["doc"]["haystack"] for sample in with_it]
        value, stderr = mean_and_stderr([sample[name] for sample in with_it], clusters)
        bounds = parse_bin_metric(name)
        metric = name if bounds is None else "nll"
        scores.append(
            Score(
                task=task.kind,
                metric=metric,
                value=value,
                stderr=stderr,
                n=len(with_it),
                length=task.length,
                bin=bounds,
                unit=_UNITS.get(metric, "fraction"),
                higher_is_better=metric != "nll",
                clusters=len(set(clusters)),
            )
        )
    return scores


def needles_of(task: PlannedTask, samples: Sequence[Mapping[str, Any]]) -> list[Needle]:
    """The single probes of a needle task; nothing for the others."""
    return [
        Needle(
            task=task.kind,
            length=task.length,
            depth=sample["doc"]["depth"],
            haystack=sample["doc"]["haystack"],
            em=sample["em"],
            acc=sample.get("acc"),
            nll=sample["nll"],
        )
        for sample in samples
        if "depth" in sample["doc"]
    ]


def foreign_scores(results: Mapping[str, Any]) -> list[Score]:
    """The scores of lm-eval's own tasks and groups, with lm-eval's standard errors."""
    better = results["higher_is_better"]
    scores = []
    for name, entry in {**results["results"], **results.get("groups", {})}.items():
        for metric, value, stderr in _metrics(entry):
            scores.append(
                Score(
                    task=name,
                    metric=metric,
                    value=value,
                    stderr=stderr,
                    n=int(entry.get("sample_len") or entry.get("sample_count") or 0),
                    higher_is_better=better.get(name, {}).get(metric.partition(",")[0]),
                )
            )
    return scores


def _metrics(entry: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    # Keys are "metric,filter" and "metric_stderr,filter".
    for key, value in entry.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        stderr = entry.get(f"{metric}_stderr,{chosen}")
        yield (
            metric if chosen == "none" else key,
            float(value),
            float(stderr) if isinstance(stderr, (int, float)) else None,
        )
