"""The main job, one call: convert, heal, evaluate, report, in one folder that can be resumed.

What a finished stage leaves appears under its final name only when it is complete, so a stage is
finished when its files are there. The folder belongs to the recipe stored in it.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from hf_posenc.calibration import Calibration, calibration_rows
from hf_posenc.calibration.compensation import compensable, compensate
from hf_posenc.calibration.watched import calibrate_watched
from hf_posenc.checkpoint.io import load_model, save_converted
from hf_posenc.errors import PosencError
from hf_posenc.estimate import (
    Speed,
    bytes_text,
    calibrate_seconds,
    duration_text,
    eval_seconds,
    heal_bytes,
    heal_seconds,
    measure_speed,
    model_bytes,
)
from hf_posenc.evaluation.harness import evaluate
from hf_posenc.evaluation.load import check_foreign
from hf_posenc.evaluation.report import write_report
from hf_posenc.evaluation.run_folder import RunFolder, read_run
from hf_posenc.evaluation.suites import PlannedTask, plan_tasks
from hf_posenc.evaluation.tasks import documents
from hf_posenc.files import write_json, write_text
from hf_posenc.heal import Recipe, heal
from hf_posenc.heal.checks import check_request
from hf_posenc.heal.data import PackedRows
from hf_posenc.heal.gentle import Transition
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan, scheme_label
from hf_posenc.preview import (
    CALIBRATION,
    CALIBRATION_TOKENS,
    calibration_row_tokens,
    scored_model,
    scored_variants,
    trained_variants,
    wants_calibration,
)
from hf_posenc.runtime.patch import get_plan, patch_model
from hf_posenc.schemes import as_scheme
from hf_posenc.show import choice_text, read_plan
from hf_posenc.sources import load_pretrained, load_tokenizer

Say = Callable[[str], None]
# What the single commands leave, each of which is checked: a calibration, healing begun or done.
_ADOPTED = {CALIBRATION, "healed", "control"}


def run(recipe: Recipe, out: Path | str, *, say: Say = print) -> RunFolder:
    """Run every stage of a recipe that `out` does not hold yet; returns the finished folder.

    out  recipe.yaml, calibration.json (where the scheme needs one and the recipe has none),
         plan.json, converted/, healed/, control/ (only with ce), eval/<variant>.json, report.html;
         made by an earlier call of the same recipe, it is gone on with
    say  takes the lines for the person who waits
    Errors: `PosencError` for anything wrong with the recipe, before anything is written.
    """
    out = Path(out)
    _check_folder(recipe, out)
    spec, plan = _checked_plan(recipe, out)
    tokenizer = load_tokenizer(recipe.model)
    tasks = _checked_tasks(recipe, spec, tokenizer)
    if recipe.heal.tokens:
        check_request(recipe, "healed")
        _check_rows(recipe, tokenizer, spec)
    unseen = _calibration_rows(recipe, tokenizer) if plan is None else None
    text = _calibration_rows(recipe, tokenizer) if recipe.compensate else None

    label = scheme_label(as_scheme(recipe.scheme).describe())
    say(f"{recipe.name}: {recipe.model}, {label}, into {out}")
    converted = out / "converted"
    done = (converted / "config.json").is_file()
    model = load_pretrained(str(converted) if done else recipe.model, dtype=recipe.dtype)
    if plan is not None and recipe.heal.tokens and recipe.heal.gentle is not None:
        Transition.of(plan, spec.layers, recipe.heal.gentle)
    if text is not None and not done:
        # What a calibration is still to choose does not change whether it can be done.
        like_it = Calibration.indifferent(spec)
        compensable(model, plan or as_scheme(recipe.scheme).build(spec, like_it))
    _estimate(recipe, out, model, tasks, 0 if unseen is None else unseen.numel(), say)

    write_text(out / "recipe.yaml", recipe.to_yaml())
    if unseen is not None:
        plan = _calibrate(model, unseen, recipe, spec, out, say)
    elif (out / CALIBRATION).is_file():
        say("calibrate: done before, skipped")
    assert plan is not None
    _convert(recipe, model, tokenizer, plan, text, out, done, say)
    del model
    gc.collect()
    for variant in scored_variants(recipe):
        if variant in ("stock", "converted"):
            _evaluate(recipe, out, variant, tokenizer, say)
    for variant in trained_variants(recipe):
        _heal(recipe, out, variant, tokenizer, say)
    for variant in scored_variants(recipe):
        if variant in ("healed", "control"):
            _evaluate(recipe, out, variant, tokenizer, say)
    say(f"report: {write_report([out])}")
    return read_run(out)


def _check_folder(recipe: Recipe, out: Path) -> None:
    """Refuse a folder that another recipe or something else has filled."""
    if out.exists() and not out.is_dir():
        raise PosencError(f"{out}: is a file; choose another --out")
    stored = out / "recipe.yaml"
    if stored.is_file():
        try:
            found = yaml.safe_load(stored.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            raise PosencError(
                f"{stored}: not valid YAML; remove {out} or choose another --out"
            ) from None
        difference = _difference(found, recipe.model_dump(mode="json"))
        if difference:
            raise PosencError(
                f"{out}: holds a run of another recipe ({difference}); choose another --out, or "
                "remove the folder to start anew"
            )
    elif out.is_dir() and not {path.name for path in out.iterdir()} <= _ADOPTED:
        raise PosencError(f"{out}: not empty and not a run folder; choose another --out")


def _checked_plan(recipe: Recipe, out: Path) -> tuple[ModelSpec, PositionPlan | None]:
    """The plan that the recipe makes; None where a calibration has to be made first."""
    scheme, converted = as_scheme(recipe.scheme), out / "converted"
    stored = None
    if (converted / "config.json").is_file():
        _, stored = read_plan(str(converted))
    made = wants_calibration(recipe)
    if made and not (out / CALIBRATION).is_file():
        spec, _ = read_plan(recipe.model, as_scheme("rope"))  # which a converted model refuses
        scheme.resolve(spec, Calibration.indifferent(spec))  # is the budget one of this model?
        plan = stored
        fits = stored is None or (stored.base, stored.scheme_dict) == (
            spec.fingerprint,
            scheme.describe(),
        )
    else:
        calibration = str(out / CALIBRATION) if made else recipe.calibration
        spec, plan = read_plan(recipe.model, scheme, calibration)
        fits = stored is None or stored.without_gains() == plan
    if stored is not None and not (fits and stored.gained == recipe.compensate):
        raise PosencError(
            f"{converted}: holds {stored.label} on another base or by another choice, not what the "
            "recipe makes; remove it, or choose another --out"
        )
    return spec, plan


def _checked_tasks(recipe: Recipe, spec: ModelSpec, tokenizer: Any) -> list[PlannedTask]:
    """The evaluation's own tasks, each proven to have documents at its length."""
    if not scored_variants(recipe):
        return []
    planned, foreign = plan_tasks(*_task_request(recipe), recipe.eval.limit)
    if foreign:
        check_foreign(foreign)
    for task in planned:
        if task.length > spec.max_positions:
            raise PosencError(
                f"eval.lengths: {task.length} exceeds the model's {spec.max_positions} positions; "
                "leave it out"
            )
        documents(kind=task.kind, length=task.length, tokenizer=tokenizer, counts={task.name: 1})
    return planned


def _check_rows(recipe: Recipe, tokenizer: Any, spec: ModelSpec) -> None:
    if recipe.data.row_tokens > spec.max_positions:
        raise PosencError(
            f"data.row_tokens: {recipe.data.row_tokens} exceeds the model's {spec.max_positions} "
            "positions"
        )
    next(iter(PackedRows(recipe.data, tokenizer, seed=recipe.seed)))


def _estimate(
    recipe: Recipe, out: Path, model: Any, tasks: list[PlannedTask], calibrating: int, say: Say
) -> None:
    """Say how long the stages that are left take and what they write; refuse a full disk.

    calibrating  tokens that are to be calibrated on
    """
    speed = measure_speed(model, recipe.data.row_tokens)
    lines, seconds = _timed_stages(recipe, out, tasks, speed)
    if calibrating:
        layers = model.config.get_text_config().num_hidden_layers
        measuring = calibrate_seconds(calibrating, layers, speed)
        lines, seconds = [f"calibrate {duration_text(measuring)}", *lines], seconds + measuring
    size = 0 if (out / "converted" / "config.json").is_file() else model_bytes(model)
    size += sum(
        heal_bytes(recipe, model)
        for variant in trained_variants(recipe)
        if not (out / variant / "heal.json").is_file()
    )
    free = shutil.disk_usage(_existing(out)).free
    if size > free:
        raise PosencError(
            f"{out}: the run writes about {bytes_text(size)}, only {bytes_text(free)} are free; "
            "choose another --out"
        )
    if lines:
        say(f"about {duration_text(seconds)} and {bytes_text(size)} of disk: {', '.join(lines)}")


def _timed_stages(
    recipe: Recipe, out: Path, tasks: list[PlannedTask], speed: Speed
) -> tuple[list[str], float]:
    lines, total = [], 0.0
    for variant in trained_variants(recipe):
        if not (out / variant / "heal.json").is_file():
            seconds = heal_seconds(recipe, speed)
            lines.append(f"{_stage_name(variant)} {duration_text(seconds)}")
            total += seconds
    missing = [v for v in scored_variants(recipe) if not (out / "eval" / f"{v}.json").is_file()]
    if missing:
        seconds = eval_seconds(tasks, speed) * len(missing)
        lines.append(f"score {len(missing)} models {duration_text(seconds)}")
        total += seconds
    return lines, total


def _calibration_rows(recipe: Recipe, tokenizer: Any) -> Tensor:
    return calibration_rows(
        tokenizer,
        tokens=CALIBRATION_TOKENS,
        row_tokens=calibration_row_tokens(recipe),
        sources=_sources(recipe),
    )


def _calibrate(
    model: Any, rows: Tensor, recipe: Recipe, spec: ModelSpec, out: Path, say: Say
) -> PositionPlan:
    say(f"calibrate: {rows.numel():,} tokens")
    label = f"calibrating {recipe.name}"
    found = calibrate_watched(model, rows, sources=_sources(recipe), label=label, seed=recipe.seed)
    # The file has fewer digits; what is chosen by it is what a later call finds again.
    written = Calibration.load(found.save(out / CALIBRATION))
    plan = as_scheme(recipe.scheme).build(spec, written)
    say(str(choice_text(plan)))
    return plan


def _sources(recipe: Recipe) -> tuple[str, ...]:
    return tuple(source.source for source in recipe.data.sources)


def _convert(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    plan: PositionPlan,
    text: Tensor | None,
    out: Path,
    done: bool,
    say: Say,
) -> None:
    if done:
        say("convert: done before, skipped")
    else:
        patch_model(model, plan)
        if text is not None:
            say(f"compensate: {text.numel():,} tokens")
            compensate(model, text, say=say)
        say(f"convert: {plan.label}, saving {bytes_text(model_bytes(model))}")
    write_json(out / "plan.json", (get_plan(model) or plan).to_json())
    if not done:
        save_converted(model, tokenizer, out / "converted", source=recipe.model)


def _heal(recipe: Recipe, out: Path, variant: Any, tokenizer: Any, say: Say) -> None:
    folder = out / variant
    if (folder / "heal.json").is_file():
        say(f"{_stage_name(variant)}: done before, skipped")
        heal(recipe, out=folder, variant=variant)  # checks that it is this recipe's
        return
    say(f"{_stage_name(variant)}: {recipe.heal.tokens:,} tokens")
    base = str(out / "converted") if variant == "healed" else recipe.model
    model = load_model(base, dtype=recipe.dtype)
    record = heal(recipe, out=folder, model=model, tokenizer=tokenizer, variant=variant)
    say(
        f"{_stage_name(variant)}: {record.steps} steps in {duration_text(record.seconds)}, "
        f"{record.tokens_per_second:,.0f} tokens/s"
    )
    del model
    gc.collect()


def _evaluate(recipe: Recipe, out: Path, variant: str, tokenizer: Any, say: Say) -> None:
    file = out / "eval" / f"{variant}.json"
    if file.is_file():
        say(f"score {variant}: done before, skipped")
        return
    say(f"score {variant}")
    tasks, lengths = _task_request(recipe)
    evaluate(
        scored_model(recipe, out, variant),
        tokenizer,
        tasks,
        lengths=lengths,
        limit=recipe.eval.limit,
        seed=recipe.seed,
        out=file,
        variant=variant,
        dtype=recipe.dtype,
        model_name=recipe.model,
    )
    gc.collect()


def _task_request(recipe: Recipe) -> tuple[str | list[str], list[int] | None]:
    tasks = recipe.eval.tasks
    return tasks if isinstance(tasks, str) else list(tasks), list(recipe.eval.lengths) or None


def _stage_name(variant: str) -> str:
    return "heal" if variant == "healed" else "heal the control"


def _difference(found: Any, wanted: Any, path: str = "") -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*wanted, *found]):
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{path}.{key}".lstrip("."))
    return "" if found == wanted else f"{path} was {found}, is {wanted}"


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path
