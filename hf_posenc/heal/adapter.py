"""What healing trains: a LoRA adapter, norms on request, and new position parameters."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.heal.config import LoraSection

_ADAPTER = "default"


def attach_adapter(model: nn.Module, lora: LoraSection, *, train_norms: bool) -> PeftModel:
    """Put a fresh adapter on a causal LM, in place; what it adds is trained in fp32.

    Norms are those of the residual stream; a norm inside attention acts on rotated features and
    stays. Modules that a plan added with parameters of their own are always trained and saved.
    Errors: `PosencError` for a LoRA target that the model does not have, or a second adapter.
    """
    if isinstance(model, PeftModel):
        raise PosencError("the model already carries an adapter; merge or unload it before healing")
    if lora.targets != "all-linear":
        _check_targets(model, lora.targets)
    whole = [*_new_modules(model), *(_norms(model) if train_norms else [])]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        modules_to_save=whole or None,
        task_type="CAUSAL_LM",
    )
    healing = get_peft_model(model, config)
    for module in healing.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save[_ADAPTER].float().register_forward_hook(_as_input)
    return healing


def settle_adapter(model: PeftModel) -> None:
    """Round what was trained as a whole (norms) to the base's dtype, as a reader will load it."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            dtype = next(module.original_module.parameters()).dtype
            module.modules_to_save[_ADAPTER].to(dtype)


def parameter_groups(
    model: nn.Module, *, lr: float, bias_lr_multiplier: float
) -> list[dict[str, Any]]:
    """Optimiser groups of the trainable parameters, without weight decay.

    LoRA matrices and norms learn at `lr`; the parameters of new position modules, which start from
    nothing, at `lr * bias_lr_multiplier`.
    """
    position = {
        id(parameter)
        for module in model.modules()
        if _is_new(module)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in position], "lr": lr},
        {"params": [p for p in trained if id(p) in position], "lr": lr * bias_lr_multiplier},
    ]
    return [{**group, "weight_decay": 0.0} for group in groups if group["params"]]


def trainable_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            linear = {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear)
            }
            hint = did_you_mean(target, linear - {"lm_head"})
            raise PosencError(f"lora.targets: {type(model).__name__} has no {target!r}; {hint}")


def _norms(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        and "attn." not in name
        and next(module.parameters(recurse=False), None) is not None
    ]


def _new_modules(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if _is_new(module)]


def _is_new(module: nn.Module) -> bool:
    own = next(module.parameters(recurse=False), None)
    return own is not None and type(module).__name__.startswith("Posenc")


def _as_input(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(arguments[0].dtype)
