"""Reading a run folder: what is there is checked, what is missing stays missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.record import EvalRecord
from hf_posenc.files import read_json
from hf_posenc.plan import PositionPlan, scheme_label

_SHORT = 60
VARIANTS = ("stock", "converted", "healed", "control")


@dataclass(frozen=True)
class RunFolder:
    """What `hf-posenc run` left in one folder; every part may be absent.

    heals  variant ("healed", "control") -> heal.json;  evals  variant -> eval/<variant>.json
    """

    path: Path
    recipe: Mapping[str, Any] = field(default_factory=dict)
    plan: PositionPlan | None = None
    heals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evals: Mapping[str, EvalRecord] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.recipe.get("name") or self.path.resolve().name)

    @property
    def model(self) -> str:
        """The source the model came from, as the records give it."""
        names = [record.model for record in self.evals.values()]
        names += [str(record.get("model", "")) for record in (*self.heals.values(), self.recipe)]
        return next((name for name in names if name), "unknown model")

    @property
    def scheme(self) -> str:
        """Short text of the scheme."""
        if self.plan is not None:
            return self.plan.label
        schemes = [record.get("scheme") for record in (*self.heals.values(), self.recipe)]
        schemes += [record.scheme for record in self.evals.values()]
        return next((scheme_label(s) for s in schemes if isinstance(s, Mapping)), "unknown scheme")

    @property
    def short_scheme(self) -> str:
        """The scheme where there is little room: its options only while they are few."""
        text = self.scheme
        return text if len(text) <= _SHORT else f"{text.partition('(')[0]}(...)"

    @property
    def objective(self) -> dict[str, float]:
        """Weights of the healing objective: of the record, or of the recipe before it is healed."""
        heal = self.recipe.get("heal")
        planned = heal.get("objective", {}) if isinstance(heal, Mapping) else {}
        record = self.heals.get("healed") or self.heals.get("control") or {"objective": planned}
        weights = record.get("objective", {})
        weights = weights if isinstance(weights, Mapping) else {weights: 1.0}
        return {str(key): float(value) for key, value in weights.items() if value}

    def healing_option(self, name: str) -> dict[str, Any] | None:
        """What the healed model's record holds as "first" or "gentle"; None when it had none."""
        option = self.heals.get("healed", {}).get(name)
        return option if isinstance(option, dict) else None

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
            evals[variant] = EvalRecord.read(file)
        if (file := path / variant / "heal.json").exists():
            heals[variant] = _heal_record(file)
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
    )


def _heal_record(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != "heal":
        raise PosencError(f"{path}: not a healing record; remove it and heal again")
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
