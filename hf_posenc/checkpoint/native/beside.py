"""An adapter that stays an adapter, beside the exported base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from hf_posenc.checkpoint.native.case import Draft, Order
from hf_posenc.checkpoint.native.report import Unexportable
from hf_posenc.checkpoint.permute import permute_heads
from hf_posenc.files import read_json, write_json

FOLDER = "adapter"
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_MERGE = "merge it into the base instead"
_PROJECTIONS = ("q_proj", "k_proj")
_NORMS = ("q_norm", "k_norm")
_INPUT_SIDE = ("lora_A.weight",)
_OUTPUT_SIDE = (
    "lora_B.weight",
    "lora_B.bias",
    "lora_magnitude_vector",
    "lora_magnitude_vector.weight",
    "weight",
    "bias",
)


def check_adapter(adapter: Any, draft: Draft) -> None:
    """Refuse an adapter that cannot go onto the target's modules.

    Errors: `Unexportable` naming the module and saying to merge.
    """
    if len(adapter.peft_config) != 1:
        names = ", ".join(adapter.peft_config)
        raise Unexportable(f"the model has several adapters ({names}); {_MERGE}")
    kind = next(iter(adapter.peft_config.values())).peft_type
    if kind != "LORA":
        raise Unexportable(f"a {kind} adapter cannot be re-ordered; {_MERGE}")
    for name, _ in adapter.named_parameters():
        if not _is_adapter(name):
            continue
        module = next((part for part in name.split(".") if part in draft.fused), None)
        if module is not None:
            raise Unexportable(
                f"the adapter works on {module}, which {type(draft.config).__name__} fuses with "
                f"others; {_MERGE}"
            )


def write_adapter(adapter: Any, draft: Draft, stage: Path, final: Path) -> None:
    """Save the adapter to `stage`/adapter with its rows in the target's order.

    final  folder the exported base will be found in
    """
    folder = stage / FOLDER
    adapter.save_pretrained(str(folder))
    weights = load_file(folder / _WEIGHTS)
    save_file(
        {name: _ordered(name, value, draft) for name, value in weights.items()},
        folder / _WEIGHTS,
        metadata={"format": "pt"},
    )
    config = read_json(folder / _CONFIG)
    config["base_model_name_or_path"] = str(final.resolve())
    config["auto_mapping"] = None
    write_json(folder / _CONFIG, config)
    for path in folder.glob("README.md"):
        path.unlink()  # PEFT's card names the unexported base


def with_adapter(stock: Any, stage: Path) -> Any:
    """The exported base with the exported adapter on it, through plain PEFT."""
    return PeftModel.from_pretrained(stock, str(stage / FOLDER))


def _is_adapter(name: str) -> bool:
    return "lora_" in name or ".modules_to_save." in name


def _ordered(name: str, value: torch.Tensor, draft: Draft) -> torch.Tensor:
    order = _order_of(name, draft)
    if order is None:
        return value
    module, _, tail = name.partition("self_attn.")[2].partition(".")
    if module in _NORMS or (module in _PROJECTIONS and tail in _OUTPUT_SIDE):
        return permute_heads(value, order)
    if module not in _PROJECTIONS or tail in _INPUT_SIDE:
        return value
    raise Unexportable(f"{name}: not a LoRA weight whose rows can be re-ordered; {_MERGE}")


def _order_of(name: str, draft: Draft) -> Order | None:
    layer = name.partition(".layers.")[2].partition(".")[0]
    return draft.orders[int(layer)] if layer.isdigit() and "self_attn." in name else None
