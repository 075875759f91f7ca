"""Putting a plan's hooks on a model and taking them off; weights and classes are not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import ALiBi, HeadScale, LearnedAbsolute, T5Bias
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime import families, scores
from hf_posenc.runtime.bias import BIAS, HEAD_SCALE, PosencHeadScale, make_bias_module
from hf_posenc.runtime.embedding import TABLE, AddPositions, PosencPositions
from hf_posenc.runtime.gains import STOCK_QUERY, attach_stock_queries, check_gains
from hf_posenc.runtime.rotary import PickTable, PosencRotaryEmbedding
from hf_posenc.runtime.weights import check_named_projections, check_permutable


class Installation:
    """What `install` did to a model; kept on its rotary module, so copies carry their own."""

    def __init__(self, plan: PositionPlan, spec: ModelSpec, original: nn.Module | None) -> None:
        self.plan = plan
        self.spec = spec
        self.original = original  # the stock rotary module; None when a saved model was loaded
        self.picks: list[PickTable] = []  # one per layer
        self.remove: list[Callable[[], None]] = []


def installation_of(model: nn.Module) -> Installation | None:
    """The installation on a model (or on the base of a PEFT model), or None."""
    for module in model.modules():
        if isinstance(module, PosencRotaryEmbedding):
            found: Any = module.installation
            return found if isinstance(found, Installation) else None
    return None


def check_switched_on(model: nn.Module, what: str) -> None:
    """Refuse `what` inside an `unpatched` block, where q/k rows lie as the base has them.

    Errors: `PosencError`.
    """
    for module in model.modules():
        if isinstance(module, PosencRotaryEmbedding) and not module.switch.active:
            raise PosencError(
                f"{type(model).__name__}: {what} inside an unpatched(model) block, where the plan "
                "is off; do it after the block"
            )


def check_plan(model: Any, plan: PositionPlan, spec: ModelSpec) -> None:
    """Everything that can be refused is refused here, before the model changes.

    Errors: `PosencError` when the plan was built for another model or the family cannot run it, or
    weights that have to move cannot.
    """
    check_fit(model, plan, spec)
    check_permutable(families.attentions_of(families.decoder_of(model)), plan)


def check_fit(model: Any, plan: PositionPlan, spec: ModelSpec) -> None:
    """The part of `check_plan` that needs no weights: a model on the meta device will do."""
    attentions = families.attentions_of(families.decoder_of(model))
    if plan.base != spec.fingerprint:
        raise PosencError(
            f"the plan {plan.label} was built for a model with fingerprint {plan.base}, this "
            f"{spec.family} has {spec.fingerprint}; build the scheme anew for this model"
        )
    if len(plan.layers) != len(attentions) or plan.num_frequencies != spec.num_frequencies:
        raise PosencError(
            f"the plan has {len(plan.layers)} layers of {plan.num_frequencies} frequencies, this "
            f"{spec.family} {len(attentions)} of {spec.num_frequencies}"
        )
    if plan.permuted or plan.pairing != "half_split":
        if not families.pairs_half_split(model.config):
            raise PosencError(
                f"{spec.family} does not pair features (i, i + rotary_dim/2) in memory; schemes "
                "that re-pair features are not supported on it"
            )
        check_named_projections(attentions, f"{plan.label}")
    if plan.pairing != "half_split" and not families.stores_heads_apart(spec.family):
        raise PosencError(
            f"{spec.family} stores q and k under other names than in memory; schemes that store "
            "features interleaved are not supported on it"
        )
    check_gains(attentions, plan)
    shared = {k.bias for k in plan.layers if isinstance(k.bias, T5Bias) and k.bias.shared}
    if len(shared) > 1:
        raise PosencError(
            f"{plan.label}: {len(shared)} different T5 tables are to be shared by all layers; use "
            "one, or share_layers=False"
        )
    for index, layer in enumerate(plan.layers):
        if isinstance(layer.bias, ALiBi) and len(layer.bias.slopes) != spec.num_heads:
            raise PosencError(
                f"layer {index}: {len(layer.bias.slopes)} ALiBi slopes for {spec.num_heads} query "
                "heads; give one per head"
            )
        if layer.scores_changed:
            name = model.config._attn_implementation
            scores.check_implementation(scores.PREFIX + name.removeprefix(scores.PREFIX), layer)


def install(model: Any, plan: PositionPlan, spec: ModelSpec, *, loaded: bool = False) -> None:
    """Replace the rotary module and hook every attention so that `plan` runs; see `uninstall`.

    `loaded` marks a model whose weights were saved under the plan: no stock module to keep.
    """
    decoder: Any = families.decoder_of(model)
    attentions = families.attentions_of(decoder)
    planned, planned_index = _distinct(plan.layers)
    base, base_index = _distinct(spec.layers)
    original = decoder.rotary_emb
    layout = families.table_layout(families.build_stock_rotary(model.config), spec)
    rotary: Any = PosencRotaryEmbedding(
        decoder.config, planned, base, layout, device=_device(original)
    )
    installed = Installation(plan, spec, None if loaded else original)
    for index, attention in enumerate(attentions):
        hook = PickTable(rotary.switch, planned_index[index], len(planned) + base_index[index])
        handle = attention.register_forward_pre_hook(hook, with_kwargs=True)
        installed.picks.append(hook)
        installed.remove.append(handle.remove)
    rotary.installation = installed
    decoder.rotary_emb = rotary
    attach_stock_queries(attentions, plan)
    _install_scores(decoder, attentions, installed, rotary.switch)
    _install_embedding(decoder, installed, rotary.switch)
    keep_scores(model)
    families.open_rotation_gates(attentions)


@contextmanager
def retabled(model: Any, layers: Sequence[LayerPlan]) -> Iterator[None]:
    """Run a patched model on the tables of other layers, one per layer, inside the block.

    Only `inv_freq`, `rope_scale` and `stretch` of `layers` are read: windows, scales, biases and
    feature orders stay the plan's, and so does what `get_plan` says and a save writes. Nothing is
    hooked anew. The plan's own tables are back after the block, whatever happens in it.
    """
    found = [module for module in model.modules() if isinstance(module, PosencRotaryEmbedding)]
    if not found:
        raise PosencError(f"{type(model).__name__} is not patched; it runs no plan's tables")
    rotary: Any = found[0]
    _retable(rotary, layers)
    try:
        yield
    finally:
        _retable(rotary, rotary.installation.plan.layers)


def _retable(rotary: Any, layers: Sequence[LayerPlan]) -> None:
    installed = rotary.installation
    planned, index = _distinct(tuple(layers))
    _, base_index = _distinct(installed.spec.layers)
    rotary.retable(planned)
    for pick, mine, base in zip(installed.picks, index, base_index, strict=True):
        pick.planned, pick.base = mine, len(planned) + base


def keep_scores(model: Any) -> None:
    """Put our attention over the stock implementation the model is set to, where a plan needs it.

    Errors: `PosencError` when that implementation cannot do what the plan asks.
    """
    installed = installation_of(model)
    changed = [] if installed is None else [k for k in installed.plan.layers if k.scores_changed]
    name = scores.PREFIX + str(model.config._attn_implementation).removeprefix(scores.PREFIX)
    for layer in dict.fromkeys(changed):
        scores.check_implementation(name, layer)
    if changed:
        model.config._attn_implementation = name


def uninstall(model: Any) -> Installation:
    """Undo `install`: the stock rotary module stands where it stood, the hooks are gone."""
    installed = installation_of(model)
    if installed is None:
        raise PosencError(f"{type(model).__name__} is not patched; there is nothing to undo")
    decoder: Any = families.decoder_of(model)
    device = decoder.rotary_emb.inv_freq.device
    for remove in installed.remove:
        remove()
    for module in list(decoder.modules()):
        for name in (BIAS, HEAD_SCALE, TABLE, STOCK_QUERY):
            if name in module._modules:
                delattr(module, name)
    name = model.config._attn_implementation
    model.config._attn_implementation = name.removeprefix(scores.PREFIX)
    original = installed.original or families.build_stock_rotary(model.config)
    decoder.rotary_emb = original.to(device)
    families.restore_rotation_gates(
        families.attentions_of(decoder), families.stock_config(model.config)
    )
    return installed


def _install_scores(decoder: Any, attentions: list[Any], installed: Any, switch: Any) -> None:
    plan, spec = installed.plan, installed.spec
    for attention, layer in zip(attentions, plan.layers, strict=True):
        if not layer.scores_changed:
            continue
        factory = _factory(attention)
        shared = isinstance(layer.bias, T5Bias) and layer.bias.shared
        holder = decoder if shared else attention
        bias = make_bias_module(layer.bias, spec.num_heads, spec.hidden_size, **factory)
        if bias is not None and BIAS not in holder._modules:
            setattr(holder, BIAS, bias)
        if isinstance(layer.logit_scale, HeadScale):
            setattr(attention, HEAD_SCALE, PosencHeadScale(spec.num_heads, **factory))
        hook = scores.ScoreHook(switch, layer, [decoder] if shared else [])
        handle = attention.register_forward_pre_hook(hook, with_kwargs=True)
        installed.remove.append(handle.remove)


def _install_embedding(decoder: Any, installed: Any, switch: Any) -> None:
    part = installed.plan.embedding
    if part is None:
        return
    if isinstance(part, LearnedAbsolute):
        factory = _factory(decoder.layers[0].self_attn)
        setattr(decoder, TABLE, PosencPositions(part, installed.spec.hidden_size, **factory))
    hook = AddPositions(switch, part, [decoder])
    handle = decoder.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    installed.remove.append(handle.remove)


def _factory(attention: nn.Module) -> dict[str, Any]:
    # New parameters in the dtype and on the device of the layer's own (first floating) weights.
    for parameter in attention.parameters():
        if parameter.is_floating_point():
            return {"dtype": parameter.dtype, "device": parameter.device}
    return {}


def _distinct(layers: tuple[LayerPlan, ...]) -> tuple[tuple[LayerPlan, ...], list[int]]:
    # Feature orders live in the weights: layers that differ only there share one table.
    tables = [LayerPlan(layer.inv_freq, layer.rope_scale, layer.stretch) for layer in layers]
    kinds = list(dict.fromkeys(tables))
    return tuple(kinds), [kinds.index(table) for table in tables]


def _device(rotary: nn.Module) -> torch.device | None:
    buffers = list(rotary.buffers())
    return buffers[0].device if buffers else None
