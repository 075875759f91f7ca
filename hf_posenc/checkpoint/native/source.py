"""Turning what the user points at into a `Case`: a live model, a checkpoint, an adapter."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.checkpoint.native.case import Case
from hf_posenc.errors import PosencError
from hf_posenc.runtime import families
from hf_posenc.runtime.gains import STOCK_QUERY
from hf_posenc.runtime.install import installation_of
from hf_posenc.runtime.patch import base_of


@dataclass
class Source:
    """A patched model ready to be read, and where its other files lie.

    model     the patched causal LM, adapters merged
    adapter   the PEFT model itself when its adapter is to stay beside the base, else None
    folder    where tokenizer, generation config and licence are, or None
    owned     the model was loaded or copied for this export and may be changed
    """

    model: Any
    adapter: Any
    folder: Path | None
    owned: bool

    @property
    def case(self) -> Case:
        """The plan, its base and its weights."""
        installed = installation_of(self.model)
        assert installed is not None, "open_source lets no other model through"
        return Case(
            plan=installed.plan,
            spec=installed.spec,
            config=families.stock_config(self.model.config),
            weights=_base_weights(self.model),
        )


def open_source(model_or_path: Any, *, merge: bool) -> Source:
    """Load or take a patched model; adapters are merged in float32 and rounded once, or kept.

    Errors: `PosencError` for a model that is not patched, quantised, offloaded or sharded weights,
    and whatever loading refuses.
    """
    given = isinstance(model_or_path, str | Path)
    model, folder = _load(model_or_path) if given else (model_or_path, _folder_of(model_or_path))
    base = base_of(model)
    if installation_of(base) is None:
        raise PosencError(
            f"{model_or_path if given else type(base).__name__}: not converted by hf_posenc; its "
            "own files are what stock code loads, there is nothing to export"
        )
    _check_weights(base)
    if base is model:
        return Source(model, None, folder, owned=given)
    if not merge:
        return Source(base, model, folder, owned=given)
    return Source(merged(model if given else copy.deepcopy(model)), None, folder, owned=True)


def merged(model: Any) -> Any:
    """The base of a PEFT model with its adapters merged in float32, then rounded to its dtypes."""
    dtypes = {
        name.replace(".base_layer", ""): parameter.dtype
        for name, parameter in base_of(model).named_parameters()
    }
    model.float()
    try:
        result = model.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise PosencError(f"the adapter cannot be merged ({error}); export it without") from None
    for name, parameter in result.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    return result


def _base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The base's own weights under their own names, also while PEFT layers wrap them."""
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): value
        for name, value in model.state_dict().items()
        if ".lora_" not in name
        and ".modules_to_save." not in name
        and f".{STOCK_QUERY}." not in name
    }


def _load(path: str | Path) -> tuple[Any, Path | None]:
    from hf_posenc.checkpoint.adapter import base_of_adapter, is_adapter
    from hf_posenc.checkpoint.io import load_model
    from hf_posenc.sources import resolve_model

    location = base_of_adapter(path) if is_adapter(path) else str(path)
    folder = Path(resolve_model(location).path)
    return load_model(path), folder if folder.is_dir() else None


def _folder_of(model: Any) -> Path | None:
    name = getattr(base_of(model).config, "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def _check_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise PosencError(
                f"{name}: weights are quantised ({parameter.dtype}); export the unquantised "
                "checkpoint, then quantise"
            )
        if parameter.device.type == "meta":
            raise PosencError(f"{name}: weights are offloaded; load the model without offloading")
        if parameter.numel() == 0 or type(parameter.data) is not torch.Tensor:
            raise PosencError(f"{name}: weights are sharded or wrapped; gather the model first")
