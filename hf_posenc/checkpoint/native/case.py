"""What an export starts from, and the draft of what a target would write."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_posenc.checkpoint.native.report import Unexportable
from hf_posenc.checkpoint.native.rope_forms import DROPPED, RopeForm, RopeShape, normalised, spell
from hf_posenc.checkpoint.native.windows import config_windows
from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, PositionPlan

Weights = dict[str, torch.Tensor]
Order = tuple[int, ...]

_KNOWN_LAYER_FIELDS = {"inv_freq", "rope_scale", "stretch", "permutation", "window", "gained"}
_KNOWN_PLAN_FIELDS = {"layers", "base", "pairing", "scheme", "chosen"}


@dataclass(frozen=True)
class Case:
    """A plan, the base it runs on, and the weights as they lie in memory (half-split).

    config   the base's stock config
    weights  the patched model's state dict; q/k rows in the order `LayerPlan.permutation` says
    """

    plan: PositionPlan
    spec: ModelSpec
    config: Any
    weights: Mapping[str, torch.Tensor]

    @property
    def family(self) -> str:
        return self.spec.family

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The plan's tables alone: what is in the weights left out, negligible frequencies as 0."""
        return tuple(
            normalised(dataclasses.replace(layer, permutation=None, window=None, gained=False))
            for layer in self.plan.layers
        )

    @cached_property
    def kinds(self) -> tuple[LayerPlan, ...]:
        """The distinct tables, in order of their first layer."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def base_windows(self) -> tuple[int | None, ...]:
        """The base's own sliding window per layer; None = full attention."""
        return config_windows(self.config, self.spec.num_layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window per layer under the plan: its own, else the base's."""
        planned = [layer.window for layer in self.plan.layers]
        return tuple(
            own if window is None else window.size
            for own, window in zip(self.base_windows, planned, strict=True)
        )

    @property
    def window_width(self) -> int | None:
        """The one window of all windowed layers, or None; refused when there are several."""
        widths = {width for width in self.windows if width is not None}
        require(len(widths) <= 1, "its layers have windows of different widths")
        return next(iter(widths), None)

    def exactly(self, *forms: RopeForm) -> bool:
        """Whether a target with the base's arithmetic computes the plan bit for bit."""
        # Windows of a plan are cut out of the scores in another order than stock masks.
        return self.windows == self.base_windows and not any(form.ulps_off for form in forms)

    def has(self, name: str) -> bool:
        """Whether layer 0 holds the weight `name`, e.g. "self_attn.q_proj.bias"."""
        return f"model.layers.0.{name}" in self.weights

    def shape(
        self,
        rotary_dim: int | None = None,
        theta: float | None = None,
        allowed: tuple[str, ...] | None = None,
    ) -> RopeShape:
        """What `spell` needs, for the base's rotary width or another one."""
        own = self.spec.rope if "rope_theta" in self.spec.rope else None
        return RopeShape(
            rotary_dim=rotary_dim or self.spec.rotary_dim,
            max_positions=self.spec.max_positions,
            theta=theta or (own or {}).get("rope_theta") or 10000.0,
            own=own if rotary_dim is None else None,
            allowed=allowed,
        )


@dataclass(frozen=True)
class Draft:
    """What a target would write.

    config           of the stock architecture
    orders           per layer: feature n of a written q/k head is feature order[n] in memory
    reshape          fuses or adds weights after the rows are ordered
    weight_changes   in words, against the base's own weights
    exact            the written model computes the plan bit for bit
    fused            modules that lose their own matrix: an adapter on one cannot stay beside
    angle            angle error of frequencies float32 cannot spell, radians at position 131072
    attention        attention implementation of the verification; None = the model's default
    """

    config: Any
    orders: tuple[Order | None, ...]
    reshape: Callable[[Weights], Weights] | None = None
    weight_changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    exact: bool = True
    fused: tuple[str, ...] = ()
    angle: float = 0.0
    attention: str | None = None


def check_known(plan: PositionPlan) -> None:
    """Refuse a plan that says something this package's exports know nothing about.

    Errors: `Unexportable` naming the field.
    """
    _check_fields(plan, _KNOWN_PLAN_FIELDS, plan.label)
    for index, layer in enumerate(plan.layers):
        _check_fields(layer, _KNOWN_LAYER_FIELDS, f"{plan.label}, layer {index}")
        if layer.window is not None and layer.window.chunked:
            raise Unexportable(
                f"{plan.label}, layer {index}: no target has windows that are chunks of the row"
            )


def refuse(reason: str) -> Unexportable:
    """A target's reason for not taking a case."""
    return Unexportable(reason)


def require(condition: bool, reason: str) -> None:
    """Refuse the target unless `condition` holds."""
    if not condition:
        raise refuse(reason)


def spell_kind(case: Case, layer: LayerPlan, shape: RopeShape | None = None) -> RopeForm:
    """`rope_parameters` for one kind of layer, or the target's refusal."""
    try:
        return spell(layer, shape or case.shape())
    except PosencError as error:
        raise refuse(str(error)) from None


def form_notes(*forms: RopeForm) -> tuple[str, ...]:
    """What readers have to know about spelled tables."""
    notes = []
    for form in forms:
        rope_type = form.parameters.get("rope_type")
        if form.ulps_off:
            notes.append(
                f"{form.ulps_off} frequencies are one float32 unit in the last place off "
                f"({form.angle:.1e} rad at position 131072): no stock formula spells them exactly"
            )
        if rope_type == "longrope":
            dropped = DROPPED in form.parameters["short_factor"]
            notes.append(
                "frequencies are written as longrope factors"
                + (f" ({DROPPED:.0e} = not rotated)" if dropped else "")
            )
            if form.parameters["short_factor"] != form.parameters["long_factor"]:
                notes.append(
                    "engines choose between short and long factors differently: transformers by "
                    "the longest position of a call, vLLM once by max_model_len"
                )
        if rope_type == "dynamic":
            notes.append(
                "stock dynamic NTK keeps the longest row's table until a row shorter than the "
                "trained length comes; vLLM uses one table for all lengths"
            )
    return tuple(dict.fromkeys(notes))


def stay(case: Case) -> tuple[Order | None, ...]:
    """Rows stay as they lie in memory."""
    return (None,) * len(case.plan.layers)


def row_changes(case: Case, orders: tuple[Order | None, ...]) -> tuple[str, ...]:
    """In words, whether written q/k rows are in another order than the base's own."""
    moved = [
        index
        for index, (layer, order) in enumerate(zip(case.plan.layers, orders, strict=True))
        if _moves(layer.permutation, order)
    ]
    if not moved:
        return ()
    where = "all layers" if len(moved) == len(orders) else f"{len(moved)} of {len(orders)} layers"
    norms = ", q/k norms" if case.has("self_attn.q_norm.weight") else ""
    biases = ", q/k biases" if case.has("self_attn.q_proj.bias") else ""
    return (f"q/k rows{biases}{norms} re-ordered in {where}",)


def carried(config: Any, *names: str, **more: Any) -> dict[str, Any]:
    """The fields every decoder config shares, copied from the base's, and `names` besides."""
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "attention_dropout",
    )
    result = {
        name: copy.deepcopy(getattr(config, name))
        for name in (*shared, *names)
        if hasattr(config, name)
    }
    head_dim = getattr(config, "head_dim", None)
    derived = config.hidden_size // config.num_attention_heads
    if head_dim is not None and (head_dim != derived or "head_dim" in names):
        result["head_dim"] = head_dim
    return {**result, **more}


def _moves(first: Order | None, second: Order | None) -> bool:
    """Whether `second` after `first` leaves any feature elsewhere than it began."""
    width = len(first or second or ())
    identity = tuple(range(width))
    first, second = first or identity, second or identity
    return tuple(first[index] for index in second) != identity


def _check_fields(value: Any, known: set[str], where: str) -> None:
    for item in dataclasses.fields(value):
        if item.name in known:
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if getattr(value, item.name) != default:
            raise Unexportable(
                f"{where}: no export knows about its {item.name!r}; keep the checkpoint as it is "
                "and load it with hf_posenc"
            )
