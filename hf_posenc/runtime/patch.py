"""patch_model, unpatch_model, unpatched, get_plan: a plan on a live model, and off again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan
from hf_posenc.runtime import auto, families
from hf_posenc.runtime.gains import exchange_queries
from hf_posenc.runtime.install import (
    Installation,
    check_plan,
    check_switched_on,
    install,
    installation_of,
    uninstall,
)
from hf_posenc.runtime.selfcheck import check_family
from hf_posenc.runtime.weights import permute_model
from hf_posenc.schemes import Scheme, as_scheme

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration

Model = TypeVar("Model", bound=nn.Module)


def patch_model(
    model: Model,
    scheme: str | Scheme | PositionPlan | Mapping[str, Any],
    *,
    calibration: Calibration | Path | str | None = None,
    **options: Any,
) -> Model:
    """Convert a loaded causal LM (or the base of a PEFT model) to another positional encoding.

    model        a transformers causal LM, changed in place and returned
    scheme       a registered name with its `options`, a `Scheme`, a `PositionPlan`, or a dict
                 `{"name": ..., **options}`
    calibration  of this model (`calibrate`), or the path of its JSON: for a scheme that leaves
                 layers or pairs to it, such as `layers="auto:7"`
    Reversible: `unpatch_model` gives back the bitwise original.
    Errors: `PosencError` before anything changes: an unknown scheme or option, a family that
    cannot be converted, weights that would have to move but cannot, a model patched already.
    """
    base = base_of(model)
    if (found := installation_of(base)) is not None:
        raise PosencError(
            f"{type(base).__name__} is already patched with {found.plan.label}; "
            "call unpatch_model(model) first"
        )
    _check_class(base)
    spec = ModelSpec.from_model(base)
    plan = build_plan(scheme, options, spec, calibration)
    check_plan(base, plan, spec)
    check_family(base, plan, spec)
    apply_plan(base, plan, spec)
    return model


def unpatch_model(model: Model) -> Model:
    """Take the plan off again, in place: weights, modules, class and config as before.

    Errors: `PosencError` before anything changes: the model is not patched, its weights cannot
    move (offloaded or sharded since), or the call is inside an `unpatched` block.
    """
    base = base_of(model)
    check_switched_on(base, "unpatch_model")
    if (found := installation_of(base)) is not None:
        _check_unwrapped(base, found)
        attentions = families.attentions_of(families.decoder_of(base))
        permute_model(attentions, found.plan, undo=True)
        exchange_queries(attentions, found.plan)
    installed = uninstall(base)
    auto.reorder_on_save(base, False)
    base.__class__ = families.causal_lm_class(installed.spec.family)
    _replace_config(base, families.stock_config(base.config))
    return model


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Run the model with its own positional encoding inside the block, without re-installing.

    Made for the teacher of every training step: a flag, plus moving q/k rows back and forth where
    the plan re-pairs features, and exchanging q_proj where it carries gains (there, run the teacher
    before the student: weights that move between a forward and its backward are an error of
    autograd). A model that is not patched runs as it is.
    Errors: `PosencError` when rows would have to move and cannot (offloaded or sharded).
    """
    installed = installation_of(model)
    if installed is None:
        yield
        return
    decoder: Any = families.decoder_of(base_of(model))
    switch = decoder.rotary_emb.switch
    if not switch.active:
        yield
        return
    attentions = families.attentions_of(decoder)
    if installed.plan.permuted:
        _check_unwrapped(base_of(model), installed)
    permute_model(attentions, installed.plan, undo=True)
    exchange_queries(attentions, installed.plan)
    switch.active = False
    try:
        yield
    finally:
        switch.active = True
        exchange_queries(attentions, installed.plan)
        permute_model(attentions, installed.plan)


def get_plan(model: nn.Module) -> PositionPlan | None:
    """The plan a model runs, or None when it is not patched."""
    installed = installation_of(model)
    return None if installed is None else installed.plan


def base_of(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def build_plan(
    scheme: Any,
    options: Mapping[str, Any],
    spec: ModelSpec,
    calibration: Calibration | Path | str | None = None,
) -> PositionPlan:
    """The plan of whatever `patch_model` takes as a scheme and a calibration, for a model.

    Errors: `PosencError` for an unknown scheme or option, or a calibration that does not fit.
    """
    from hf_posenc.calibration.record import Calibration  # whose measuring patches models

    if isinstance(scheme, PositionPlan):
        given = sorted(options) if calibration is None else ["calibration", *sorted(options)]
        if given:
            raise PosencError(f"options {given} have no effect on a finished plan")
        return scheme.without_gains()  # gains lie in the weights of the model they were made for
    if options and not isinstance(scheme, str):
        raise PosencError(f"options {sorted(options)} go into the scheme, or use its name")
    measured = None if calibration is None else Calibration.read(calibration)
    return as_scheme(scheme, **options).build(spec, measured)


def _check_class(model: Any) -> None:
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type is None:
        raise PosencError(f"{type(model).__name__} is not a transformers model; nothing to convert")
    if getattr(config, "is_encoder_decoder", False):
        raise PosencError(f"{type(model).__name__}: encoder-decoder models are not supported")
    stock = families.causal_lm_class(model_type)
    if type(model) is not stock:
        raise PosencError(
            f"{type(model).__name__} is not the causal language model of its family; load it as "
            f"{stock.__name__} (AutoModelForCausalLM)"
        )


def _check_unwrapped(model: Any, installed: Installation) -> None:
    if type(model) is not auto.model_class(installed.spec.family):
        raise PosencError(
            f"{type(model).__name__}: the model was wrapped or sharded after it was patched; do "
            "this before that"
        )


def apply_plan(model: Any, plan: PositionPlan, spec: ModelSpec) -> None:
    """Put a plan that has been checked on an unpatched model."""
    install(model, plan, spec)
    permute_model(families.attentions_of(families.decoder_of(model)), plan)
    auto.reorder_on_save(model, True)
    _replace_config(model, auto.to_posenc_config(model.config, plan))
    model.__class__ = auto.model_class(spec.family)


def _replace_config(model: Any, config: Any) -> None:
    # A copy, set wherever the model holds the old one: other models built from it stay as they are.
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
