"""Reading a run folder: what is there is checked, what is missing stays missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json
from hf_posenc.plan import PositionPlan, scheme_label

VARIANTS = ("stock", "converted", "healed", "control")
_SCORE_KEYS = ("task", "metric", "length", "value", "n")


@dataclass(frozen=True)
class Score:
    """One number of an evaluation.

    length  tokens of the rows or prompts it was measured on, None for tasks without one
    bin     positions (start, end) it covers, None for whole rows
    stderr  standard error of `value`, None when the task gives none
    n       documents (or rows, or probes) behind it
    """

    task: str
    metric: str
    length: int | None
    bin: tuple[int, int] | None
    value: float
    stderr: float | None
    n: int
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class RunFolder:
    """What `hf-posenc run` left in one folder; every part may be absent.

    heals  variant ("healed", "control") -> heal.json;  evals  variant -> eval/<variant>.json
    """

    path: Path
    recipe: Mapping[str, Any] = field(default_factory=dict)
    plan: PositionPlan | None = None
    heals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scores: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.recipe.get("name") or self.path.resolve().name)

    @property
    def model(self) -> str:
        """The source the model came from, as the records give it."""
        for record in (*self.evals.values(), *self.heals.values(), self.recipe):
            if record.get("model"):
                return str(record["model"])
        return "unknown model"

    @property
    def scheme(self) -> str:
        """Short text of the scheme."""
        if self.plan is not None:
            return self.plan.label
        for record in (*self.heals.values(), *self.evals.values(), self.recipe):
            if isinstance(record.get("scheme"), Mapping):
                return scheme_label(record["scheme"])
        return "unknown scheme"

    @property
    def objective(self) -> dict[str, float]:
        """Weights of the healing objective; empty when nothing was healed."""
        record = self.heals.get("healed") or self.heals.get("control") or {}
        return {key: float(value) for key, value in record.get("objective", {}).items() if value}

    @property
    def control(self) -> str:
        """The variant a healed model is measured against.

        With cross-entropy in the objective it is the unconverted model healed on the same tokens;
        otherwise the unconverted model itself, which is what the objective pulls towards.
        """
        return "control" if "ce" in self.objective else "stock"


def read_run(path: Path | str) -> RunFolder:
    """Read a run folder.

    Errors: `PosencError` when it is none, or when one of its files is corrupt (named).
    """
    path = Path(path)
    if not path.is_dir():
        raise PosencError(f"{path}: no such folder; give one that `hf-posenc run` made")
    evals, heals = {}, {}
    for variant in VARIANTS:
        if (file := path / "eval" / f"{variant}.json").exists():
            evals[variant] = _record(file, "eval")
        if (file := path / variant / "heal.json").exists():
            heals[variant] = _record(file, "heal")
    plan_file, recipe_file = path / "plan.json", path / "recipe.yaml"
    if not (evals or heals or plan_file.exists()):
        raise PosencError(
            f"{path}: not a run folder (no plan.json, heal.json or eval/*.json in it); "
            "give one that `hf-posenc run` made"
        )
    return RunFolder(
        path=path,
        recipe=_recipe(recipe_file) if recipe_file.exists() else {},
        plan=PositionPlan.from_json(read_json(plan_file)) if plan_file.exists() else None,
        heals=heals,
        evals=evals,
        scores={variant: _scores(path, variant, record) for variant, record in evals.items()},
    )


def _record(path: Path, kind: str) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise PosencError(f"{path}: not an {kind} record of hf-posenc; remove or re-create it")
    if value.get("schema") != 1:
        raise PosencError(f"{path}: schema {value.get('schema')!r} is unknown; upgrade hf-posenc")
    return value


def _recipe(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise PosencError(f"{path}: not valid YAML; restore it") from None
    if not isinstance(value, dict):
        raise PosencError(f"{path}: not a recipe; restore it")
    return value


def _scores(path: Path, variant: str, record: Mapping[str, Any]) -> tuple[Score, ...]:
    result = []
    for index, row in enumerate(record.get("scores", [])):
        missing = [key for key in _SCORE_KEYS if key not in row]
        if missing:
            raise PosencError(
                f"{path / 'eval' / variant}.json: score {index} has no {missing[0]!r}; "
                "run the evaluation again"
            )
        edges = row.get("bin")
        result.append(
            Score(
                task=str(row["task"]),
                metric=str(row["metric"]),
                length=row["length"],
                bin=None if edges is None else (int(edges[0]), int(edges[1])),
                value=float(row["value"]),
                stderr=None if row.get("stderr") is None else float(row["stderr"]),
                n=int(row["n"]),
                unit=str(row.get("unit", "")),
                higher_is_better=bool(row.get("higher_is_better", False)),
            )
        )
    return tuple(result)
