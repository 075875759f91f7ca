"""The output folder of a healing run: whose it is, what it can be resumed from, when it is done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hf_posenc.errors import PosencError
from hf_posenc.files import write_text
from hf_posenc.heal.config import Recipe
from hf_posenc.heal.record import HealRecord

CHECKPOINTS = "checkpoints"
_CLAIM = "recipe.yaml"
_STEPS = "checkpoint-*"


def finished_record(out: Path, recipe: Recipe, variant: str) -> HealRecord | None:
    """The record of a finished run of this recipe in `out`; None when there is no finished run.

    Errors: `PosencError` when `out` holds another run, or something else.
    """
    if out.exists() and not out.is_dir():
        raise PosencError(f"{out}: is a file; choose another output folder")
    if (out / "heal.json").is_file():
        record = HealRecord.read(out / "heal.json")
        if (record.recipe_digest, record.variant) != (recipe.digest, variant):
            raise PosencError(
                f"{out}: holds a finished run of another recipe; remove it or choose another output"
            )
        return record
    strangers = [path.name for path in out.iterdir()] if out.is_dir() else []
    if any(name != CHECKPOINTS for name in strangers):
        raise PosencError(f"{out}: exists and is not empty; remove it or choose another output")
    return None


@contextmanager
def claimed_folder(out: Path, recipe: Recipe, variant: str) -> Iterator[Path]:
    """Make `out`/checkpoints for this recipe; an interrupted run of it is kept.

    When the block fails before there is a checkpoint to resume from, the folder is taken away.
    Errors: `PosencError` when the checkpoints there were made by another recipe, naming the first
    key that differs.
    """
    checkpoints = out / CHECKPOINTS
    claim = checkpoints / _CLAIM
    wanted = {"variant": variant, **recipe.model_dump(mode="json", exclude={"name", "eval"})}
    if checkpoints.is_dir() and not claim.is_file() and any(checkpoints.iterdir()):
        raise PosencError(f"{checkpoints}: not made by this program; choose another output")
    found = yaml.safe_load(claim.read_text(encoding="utf-8")) if claim.is_file() else wanted
    if found != wanted and any(checkpoints.glob(_STEPS)):
        raise PosencError(
            f"{checkpoints}: made by another recipe ({_difference(found, wanted)}); "
            "remove it to start anew, or choose another output"
        )
    if found != wanted:
        shutil.rmtree(checkpoints)
    write_text(claim, yaml.safe_dump(wanted, sort_keys=False))
    try:
        yield checkpoints
    except BaseException:
        if not any(checkpoints.glob(_STEPS)):
            shutil.rmtree(checkpoints)
            if not any(out.iterdir()):
                out.rmdir()
        raise


def last_checkpoint(checkpoints: Path) -> str | None:
    """The newest complete checkpoint; one cut short by a kill is removed."""
    found = sorted(checkpoints.glob(_STEPS), key=lambda path: int(path.name.split("-")[1]))
    while found:
        newest = found.pop()
        if _is_complete(newest):
            return str(newest)
        shutil.rmtree(newest)
    return None


def _is_complete(checkpoint: Path) -> bool:
    # The Trainer writes its state last.
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _difference(found: Any, wanted: Any, path: str = "") -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *found]:
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{path}.{key}".lstrip("."))
    return f"{path} was {found}, is {wanted}"
