"""What a plan asks of stored weights, found on a model without weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_posenc.checkpoint.permute import Order, interleaved_order
from hf_posenc.checkpoint.safe_reader import StoredTensor
from hf_posenc.checkpoint.source_folder import SourceFolder
from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan
from hf_posenc.runtime import families
from hf_posenc.runtime.install import check_fit, install
from hf_posenc.runtime.selfcheck import check_family

_FLOATS = ("F64", "F32", "F16", "BF16")
_MOVED = {
    *(f"{name}.{kind}" for name in ("q_proj", "k_proj") for kind in ("weight", "bias")),
    *("q_norm.weight", "k_norm.weight"),
}


def stored_orders(
    config: PreTrainedConfig, plan: PositionPlan, spec: ModelSpec, source: SourceFolder
) -> dict[str, Order]:
    """The order of head features that each stored tensor must take on, by its stored name.

    Tensors that stay as they are do not appear. The model is only built on the meta device.
    Errors: `PosencError` for a plan the family cannot run, or that needs weights which the
    checkpoint lacks or which cannot be moved: quantised, fused, of another shape.
    """
    with torch.device("meta"):
        model: Any = families.causal_lm_class(spec.family)(copy.deepcopy(config))
    check_fit(model, plan, spec)
    _check_small(config, plan, spec)
    _check_no_new_weights(model, plan, spec)
    stored = {tensor.name: tensor for _, tensor in source.tensors()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    attentions = families.attentions_of(families.decoder_of(model))
    orders: dict[str, Order] = {}
    for index, attention in enumerate(attentions):
        order = stored_order(plan, index, spec)
        if order is None:
            continue
        _check_unquantised(config, plan)
        for short, parameter in attention.named_parameters():
            if short in _MOVED:
                name = _stored_name(names[id(parameter)], stored, model.base_model_prefix)
                _check_movable(stored[name], tuple(parameter.shape), short, spec)
                orders[name] = order
    return orders


def stored_order(plan: PositionPlan, index: int, spec: ModelSpec) -> Order | None:
    """Feature n of a stored head of layer `index` is the base's feature order[n]; None: no change.

    In memory the plan's permutation applies; storing interleaved re-orders what is in memory.
    """
    identity = tuple(range(spec.head_dim))
    memory = plan.layers[index].permutation or identity
    storage = identity
    if plan.pairing == "interleaved":
        storage = interleaved_order(spec.rotary_dim, spec.head_dim)
    order = tuple(memory[feature] for feature in storage)
    return None if order == identity else order


def _check_small(config: PreTrainedConfig, plan: PositionPlan, spec: ModelSpec) -> None:
    """The runtime's check of untested families needs a forward pass: run it on a narrow copy."""
    if spec.family in families.TESTED_FAMILIES:
        return
    small = copy.deepcopy(config)
    heads, grouped = min(2, spec.num_heads), spec.num_kv_heads < spec.num_heads
    sizes = {
        "hidden_size": heads * spec.head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if grouped else heads,
        "vocab_size": 64,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 1),
    }
    for name, value in sizes.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, value)
    small.pad_token_id = None
    try:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        model = AutoModelForCausalLM.from_config(small, dtype=dtype)
        small_spec = ModelSpec.from_config(small)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise PosencError(
            f"{spec.family}: is not on the list of tested families, and a small one to check it "
            f"with cannot be built ({error}); load the model, patch_model it and save_pretrained"
        ) from None
    check_family(model, plan, small_spec)


def _check_no_new_weights(model: Any, plan: PositionPlan, spec: ModelSpec) -> None:
    before = set(model.state_dict())
    install(model, plan, spec)
    if added := sorted(set(model.state_dict()) - before):
        raise PosencError(
            f"{plan.label} adds trained weights ({added[0]}, ...), which a conversion of files "
            "does not make; load the model, patch_model it and save_pretrained"
        )


def _check_unquantised(config: PreTrainedConfig, plan: PositionPlan) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise PosencError(
            f"the checkpoint is quantised ({method}), and {plan.label} moves rows of q and k; "
            "convert the unquantised checkpoint, then quantise"
        )


def _stored_name(name: str, stored: dict[str, StoredTensor], prefix: str) -> str:
    # A checkpoint of the decoder alone has no prefix; transformers loads it all the same.
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if candidate in stored:
            return candidate
    raise PosencError(
        f"the checkpoint has no tensor {name!r}, which the conversion has to re-order"
    )


def _check_movable(
    tensor: StoredTensor, shape: tuple[int, ...], short: str, spec: ModelSpec
) -> None:
    if tensor.dtype not in _FLOATS:
        raise PosencError(
            f"{tensor.name}: weights are quantised ({tensor.dtype}), and their rows have to move; "
            "convert the unquantised checkpoint, then quantise"
        )
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(short.partition(".")[0])
    rows = tensor.shape[0] if tensor.shape else 0
    whole = rows == heads * spec.head_dim if heads else rows > 0 and rows % spec.head_dim == 0
    if tensor.shape != shape or not whole:
        raise PosencError(
            f"{tensor.name}: has shape {list(tensor.shape)}, config.json asks for {list(shape)} "
            f"in whole heads of {spec.head_dim}; the two do not belong together"
        )
