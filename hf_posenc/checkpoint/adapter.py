"""LoRA adapters that know which positional encoding they were healed on.

PEFT itself loads an adapter onto any base whose layers have the right names, so an adapter healed
under one scheme runs silently under another. Ours carries the scheme in
`adapter_config.json["auto_mapping"]["posenc"]`, and `load_adapter` compares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, staged_directory
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan, scheme_label
from hf_posenc.runtime.install import installation_of
from hf_posenc.runtime.patch import base_of

_CONFIG = "adapter_config.json"


def save_adapter(model: PeftModel, path: Path | str, *, base: Path | str) -> Path:
    """Save the adapters of a PEFT model beside the base they were trained on.

    base  where the base can be loaded from: the folder of the converted checkpoint when the model
          is patched, else the folder or hub id of the unconverted one
    Errors: `PosencError` when `base` is a folder that does not hold the model's plan, or `path`
    exists and is not empty.
    """
    mark = _mark_of(model)
    mark["base_relative"] = _check_base(mark, Path(base), Path(path))
    location = str(Path(base).resolve()) if Path(base).is_dir() else str(base)
    stock = type(base_of(model))
    for config in model.peft_config.values():
        config.base_model_name_or_path = location
        # Without a task type PEFT writes its own auto_mapping over ours.
        config.task_type = config.task_type or "CAUSAL_LM"
        config.auto_mapping = {
            "base_model_class": stock.__name__,
            "parent_library": stock.__module__,
            "posenc": mark,
        }
    with staged_directory(path) as stage:
        model.save_pretrained(str(stage))
    return Path(path)


def load_adapter(model: Any, path: Path | str, *, is_trainable: bool = False) -> PeftModel:
    """Load an adapter onto the base it was healed on, and refuse any other.

    model  a patched model, a loaded converted checkpoint, or (for an adapter trained on the
           unconverted model) a stock one
    Errors: `PosencError` naming both schemes when they differ, or the file that is damaged.
    """
    wanted = adapter_mark(path)
    found = _mark_of(model)
    if wanted["plan_digest"] != found["plan_digest"]:
        raise PosencError(
            f"{path}: this adapter was healed on {_describe(wanted)}, the model runs "
            f"{_describe(found)}; load it onto a model with the scheme it was healed on"
        )
    if wanted["base"] not in (None, found["base"]):
        raise PosencError(
            f"{path}: this adapter belongs to a base with fingerprint {wanted['base']} "
            f"({_describe(wanted)}), the model has {found['base']} ({_describe(found)})"
        )
    try:
        return PeftModel.from_pretrained(model, str(path), is_trainable=is_trainable)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise PosencError(f"{path}: the adapter cannot be loaded ({error})") from None


def adapter_mark(path: Path | str) -> dict[str, Any]:
    """What an adapter folder says it was healed on: scheme, plan_digest, base fingerprint."""
    config = read_json(Path(path) / _CONFIG)
    mark = (config.get("auto_mapping") or {}).get("posenc")
    if mark is None:
        return {"scheme": None, "plan_digest": None, "base": None}
    return dict(mark)


def base_of_adapter(path: Path | str) -> str:
    """Folder or hub id of the base an adapter was saved for; follows a moved run folder."""
    location = read_json(Path(path) / _CONFIG).get("base_model_name_or_path")
    if not location:
        raise PosencError(f"{path}: adapter_config.json names no base model")
    relative = adapter_mark(path).get("base_relative")
    if not Path(location).is_dir() and relative and (Path(path) / relative).is_dir():
        return str((Path(path) / relative).resolve())
    return str(location)


def is_adapter(path: Path | str) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(path) / _CONFIG).is_file()


def _mark_of(model: Any) -> dict[str, Any]:
    installed = installation_of(model)
    if installed is None:
        base = ModelSpec.from_model(base_of(model)).fingerprint
        return {"scheme": None, "plan_digest": None, "base": base}
    plan = installed.plan
    return {"scheme": plan.scheme_dict, "plan_digest": plan.digest, "base": plan.base}


def _check_base(mark: dict[str, Any], base: Path, path: Path) -> str | None:
    if not base.is_dir():
        if mark["scheme"] is not None:
            raise PosencError(
                f"{base}: an adapter healed on {_describe(mark)} needs the folder of its converted "
                "base; save that first (model.save_pretrained)"
            )
        return None
    posenc = read_json(base / "config.json").get("posenc")
    stored = None if posenc is None else PositionPlan.from_json(posenc["plan"])
    if (None if stored is None else stored.digest) != mark["plan_digest"]:
        held = "the unconverted model" if stored is None else stored.label
        raise PosencError(f"{base} holds {held}, the adapter was healed on {_describe(mark)}")
    return os.path.relpath(base.resolve(), path.resolve())


def _describe(mark: dict[str, Any]) -> str:
    return "plain RoPE (unconverted)" if mark["scheme"] is None else scheme_label(mark["scheme"])
