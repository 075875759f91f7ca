"""The base that a healed adapter is loaded onto: where it is, and saving it where it is nowhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from peft import PeftModel

from hf_posenc.checkpoint.adapter import save_adapter
from hf_posenc.files import read_json, staged_directory, write_json
from hf_posenc.plan import PositionPlan
from hf_posenc.runtime.patch import get_plan

_BASE = "base"


def saved_base(model: Any, tokenizer: Any, checkpoints: Path) -> Path | str:
    """Where the base of the adapter can be loaded from; saved among the checkpoints if nowhere."""
    plan = get_plan(model)
    origin = str(getattr(model, "name_or_path", "") or "")
    if plan is None and origin:
        return origin
    if plan is not None and (Path(origin) / "config.json").is_file():
        stored = read_json(Path(origin) / "config.json").get("posenc")
        if stored is not None and PositionPlan.from_json(stored["plan"]).digest == plan.digest:
            return origin
    base = checkpoints / _BASE
    if not base.is_dir():
        with staged_directory(base) as stage:
            model.save_pretrained(stage)
            tokenizer.save_pretrained(stage)
    return base


def save_beside_base(healing: PeftModel, base: Path | str, stage: Path, out: Path) -> None:
    """Save the adapter into `stage`, with its base where nothing else holds it.

    out  the folder that `stage` becomes
    """
    if isinstance(base, Path):
        base = Path(shutil.copytree(base, stage / _BASE))
    save_adapter(healing, stage / "adapter", base=base)
    if isinstance(base, Path):
        path = stage / "adapter" / "adapter_config.json"
        final = str(out.resolve() / _BASE)
        write_json(path, {**read_json(path), "base_model_name_or_path": final})
