"""What healing trains: LoRA or whole copies, norms on request, and new position parameters."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import Tensor, nn
from torch.nn import functional

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.heal.sections import LoraSection

_ADAPTER = "default"


def attach_adapter(model: nn.Module, lora: LoraSection, *, train_norms: bool) -> PeftModel:
    """Put a fresh adapter on a causal LM, in place; what it adds is trained in fp32.

    With `lora.full` the targets are trained as whole copies, which PEFT switches, saves and merges
    as it does LoRA.
    Norms are those of the residual stream; a norm inside attention acts on rotated features and
    stays. Modules that a plan added with parameters of their own are always trained and saved.
    Errors: `PosencError` for a target that the model does not have or that cannot be trained as a
    whole, or a second adapter.
    """
    if isinstance(model, PeftModel):
        raise PosencError("the model already carries an adapter; merge or unload it before healing")
    if lora.targets != "all-linear":
        _check_targets(model, lora.targets)
    whole = [*_new_modules(model), *(_norms(model) if train_norms else [])]
    targets: str | list[str] = lora.targets if lora.targets == "all-linear" else list(lora.targets)
    if lora.full:
        whole += _linear(model, lora.targets)
        targets = DUMMY_TARGET_MODULES  # PEFT's word for an adapter without any
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=whole or None,
        task_type="CAUSAL_LM",
    )
    healing = get_peft_model(model, config)
    for module in healing.modules():
        if isinstance(module, ModulesToSaveWrapper):
            trained: Any = module.modules_to_save[_ADAPTER].float()
            if type(trained) is nn.Linear:
                trained.__class__ = _Float32Linear
            else:
                trained.register_forward_hook(_as_input)
    return healing


def settle_adapter(model: PeftModel) -> None:
    """Round what was trained as a whole to the base's dtype, as a reader will load it."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            dtype = next(module.original_module.parameters()).dtype
            if isinstance(module.modules_to_save[_ADAPTER].to(dtype), _Float32Linear):
                module.modules_to_save[_ADAPTER].__class__ = nn.Linear


def parameter_groups(
    model: nn.Module, *, lr: float, bias_lr_multiplier: float
) -> list[dict[str, Any]]:
    """Optimiser groups of the trainable parameters, without weight decay.

    Adapters and norms learn at `lr`; the parameters of new position modules, which start from
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


def _linear(model: Any, targets: str | tuple[str, ...]) -> list[str]:
    """The names of the linear layers that `targets` means."""
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if targets == "all-linear":
            wanted = isinstance(module, nn.Linear) and module is not head
        else:
            wanted = f".{name}".endswith(tuple(f".{target}" for target in targets))
        if not wanted:
            continue
        if type(module) is not nn.Linear or not module.weight.is_floating_point():
            raise PosencError(
                f"lora.full: {name} is a {type(module).__name__}, not a plain linear layer "
                "(quantised?); train it with LoRA (lora.full=false)"
            )
        found.append(name)
    return found


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


class _Float32Linear(nn.Linear):
    """Weights in fp32, multiplied in the dtype of the input: what `settle_adapter` leaves."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.to(input.dtype), bias)


def _as_input(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(arguments[0].dtype)
