"""One self-contained HTML page from one run folder, or from several to compare.

Numbers come from the records as they are; what was not run is said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import figures
from hf_posenc.evaluation.run_folder import RunFolder, read_run
from hf_posenc.evaluation.style import inline_svg, tokens_text, variant_style
from hf_posenc.evaluation.tables import (
    find_score,
    loss_columns,
    loss_tasks,
    shown_variants,
    tables,
    variant_label,
)
from hf_posenc.evaluation.verdict import comparison, control_name, verdict, warnings
from hf_posenc.files import read_json, write_text
from hf_posenc.show import plan_rows, shown_columns

_STRATA = 8
_TASKS = {
    "ppl_bins": "Loss by position on held-out text",
    "niah_single": "A single needle in filler text",
    "niah_essay": "Eight needles in essays",
    "copytext": "Loss on the second copy of a passage",
}


def write_report(folders: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the page of one run folder (default `DIR/report.html`), or a comparison of several.

    Errors: `PosencError` for a folder that is not a run folder or holds a damaged record, and for
    several folders without `out`; nothing is written then.
    """
    if not folders:
        raise PosencError("no run folder given; name at least one that `hf-posenc run` made")
    if out is None and len(folders) > 1:
        raise PosencError("a comparison of several runs needs --out FILE.html")
    runs = [read_run(folder) for folder in folders]
    return write_text(Path(folders[0]) / "report.html" if out is None else out, render(runs))


def render(runs: Sequence[RunFolder]) -> str:
    """The page as HTML text, with every figure inside it."""
    several = len(runs) > 1
    first = runs[0]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title="Comparison of conversions"
            if several
            else f"{first.short_scheme} on {first.model}",
            verdict=comparison(runs) if several else verdict(first),
            warnings=warnings(runs),
            several=several,
            tables=tables(runs),
            loss_figure=_loss_figure(runs),
            runs=[_run_context(run, index) for index, run in enumerate(runs)],
            task_titles=_TASKS,
            colours={
                v: variant_style(v)["color"] for v in ("stock", "converted", "healed", "control")
            },
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hf_posenc.evaluation", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tokens"] = tokens_text
    environment.filters["number"] = _number
    environment.filters["signed"] = _signed
    return environment


def _run_context(run: RunFolder, index: int) -> dict[str, Any]:
    heal = run.heals.get("healed") or run.heals.get("control")
    return {
        "name": run.name,
        "model": run.model,
        "scheme": run.scheme,
        "verdict": verdict(run),
        "objective": _objective_text(run),
        "control": control_name(run),
        "healed_control": run.control == "control",
        "facts": list(_facts(run, heal)),
        "needles": _needle_figure(run, index),
        "healing": _healing_figure(run, index),
        "plan": _plan_figure(run, index),
        "plan_rows": plan_rows(run.plan) if run.plan else [],
        "plan_columns": shown_columns(plan_rows(run.plan)) if run.plan else [],
        "command": f"hf-posenc run recipe.yaml --out {run.path.resolve().name}",
        "recipe": _recipe_text(run),
        "records": list(_records(run)),
        "data": _data_hashes(run),
    }


def _facts(run: RunFolder, heal: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    yield "model", run.model
    yield "scheme", run.scheme
    if heal:
        yield "objective", _objective_text(run)
        yield "healing", f"{tokens_text(heal['tokens'])} tokens, {heal['seconds'] / 60:.1f} min"
        if gentle := run.healing_option("gentle"):
            yield "plan", f"in by {gentle['by']} over the first {gentle['share']:.0%} of the steps"
        if heal.get("full"):
            yield "trained", "whole modules, not LoRA"
    machines = [record.provenance for record in run.evals.values()]
    machines += [record.get("provenance", {}) for record in run.heals.values()]
    if machines:
        machine = machines[0].get("machine") or {}
        name = machine.get("accelerator") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
        yield "machine", str(name)
        yield "date", str(machines[0].get("date", "not recorded"))[:10]


def _objective_text(run: RunFolder) -> str:
    if not run.objective:
        return "not healed"
    main, first = _weights_text(run.objective), run.healing_option("first")
    if first is None:
        return main
    begin = _weights_text(first["objective"])
    return f"{begin} for the first {first['share']:.0%} of the steps, then {main}"


def _weights_text(weights: Mapping[str, float]) -> str:
    names = {
        "kl": "KL divergence from the unconverted model",
        "ce": "cross-entropy",
        "hidden": "distance of layer outputs",
    }
    if len(weights) == 1:
        return names.get(next(iter(weights)), next(iter(weights)))
    return " + ".join(f"{value:g} × {names.get(key, key)}" for key, value in weights.items())


def _loss_figure(runs: Sequence[RunFolder]) -> Markup | None:
    panels: dict[str, list[figures.Curve]] = {}
    for task in loss_tasks(runs):
        columns = [column for column in loss_columns(runs, task) if column.bin is not None]
        curves = []
        for run, variant, label, style in _curve_names(runs):
            found = [(column.bin, find_score(run, variant, column)) for column in columns]
            points = [(bin, score) for bin, score in found if bin and score is not None]
            if points:
                curves.append(
                    figures.Curve(
                        label=label,
                        variant=style,
                        bins=[bin for bin, _ in points],
                        values=[score.value for _, score in points],
                        stderrs=[score.stderr for _, score in points],
                    )
                )
        if curves:
            panels[task] = curves
    if not panels:
        return None
    lengths = {_trained_length(run) for run in runs}
    trained = lengths.pop() if len(lengths) == 1 else None
    figure = figures.loss_by_position(panels, trained_length=trained)
    return _svg(figure, "loss", "Loss in nats per token against position, one line per model")


def _curve_names(runs: Sequence[RunFolder]) -> Iterator[tuple[RunFolder, str, str, str]]:
    """(run, variant, label, style name): all variants of one run; of several, the final ones."""
    if len(runs) == 1:
        for variant in shown_variants(runs[0]):
            yield runs[0], variant, variant_label(variant), variant
        return
    yield runs[0], "stock", f"{runs[0].name}: unconverted", "stock"
    for run in runs:
        if run.control == "control":
            yield run, "control", f"{run.name}: {variant_label('control')}", f"{run.path} control"
        final = "healed" if "healed" in run.evals else "converted"
        yield run, final, f"{run.name}: {variant_label(final)}", str(run.path)


def _needle_figure(run: RunFolder, index: int) -> Markup | None:
    rows: dict[str, list[figures.Needles]] = {}
    for variant in shown_variants(run):
        needles = run.evals[variant].needles if variant in run.evals else []
        for task in dict.fromkeys(needle.task for needle in needles):
            found: dict[tuple[int, float], list[float]] = {}
            for needle in needles:
                if needle.task == task:
                    stratum = min(int(needle.depth * _STRATA), _STRATA - 1)
                    cell = (needle.length, (stratum + 0.5) / _STRATA)
                    found.setdefault(cell, []).append(needle.em)
            cells = {cell: sum(values) / len(values) for cell, values in found.items()}
            rows.setdefault(task, []).append(figures.Needles(variant_label(variant), cells))
    if not rows:
        return None
    return _svg(figures.needle_map(rows), f"needles{index}", "Needles found by depth and length")


def _healing_figure(run: RunFolder, index: int) -> Markup | None:
    logs = [
        figures.Healing(variant_label(v), v, heal["log"], heal.get("heldout", ()))
        for v, heal in run.heals.items()
        if heal.get("log")
    ]
    if not logs:
        return None
    objective = [] if run.healing_option("first") else list(run.objective)
    unit = "KL (nats per token)" if objective == ["kl"] else "training loss"
    unit = "loss (nats per token)" if objective == ["ce"] else unit
    figure = figures.healing_curve(logs, objective=unit)
    return _svg(figure, f"healing{index}", "Training loss against healing tokens")


def _plan_figure(run: RunFolder, index: int) -> Markup | None:
    if run.plan is None:
        return None
    figure = figures.plan_map(run.plan, trained_length=_trained_length(run))
    return _svg(figure, f"plan{index}", "Wavelength of every feature pair in every layer")


def _trained_length(run: RunFolder) -> int | None:
    """`max_position_embeddings` of the converted checkpoint, when it is still in the folder."""
    config = run.path / "converted" / "config.json"
    value = read_json(config).get("max_position_embeddings") if config.exists() else None
    return value if isinstance(value, int) else None


def _recipe_text(run: RunFolder) -> str | None:
    file = run.path / "recipe.yaml"
    return file.read_text(encoding="utf-8") if file.exists() else None


def _records(run: RunFolder) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(heading, facts) for every record of the run: its cost and its provenance, flattened."""
    for variant, heal in run.heals.items():
        kept = {k: v for k, v in heal.items() if k not in ("log", "heldout", "schema", "kind")}
        yield f"healing: {variant_label(variant)}", list(_flatten(kept))
    for variant, record in run.evals.items():
        facts = {
            "model": record.model,
            "plan_digest": record.plan_digest,
            "adapter": record.adapter,
            "cost": record.cost,
            "provenance": record.provenance,
        }
        yield f"evaluation: {variant_label(variant)}", list(_flatten(facts))


def _data_hashes(run: RunFolder) -> list[tuple[str, str]]:
    pairs = {(s, digest) for record in run.evals.values() for s, digest in record.data.items()}
    return sorted(pairs)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, "none" if value is None or value == {} else str(value)


def _svg(figure: Figure, prefix: str, label: str) -> Markup:
    return Markup(inline_svg(figure, prefix=prefix, label=label))


def _number(value: float) -> str:
    """Three decimals below ten, fewer above; whole numbers with thousands separators."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
