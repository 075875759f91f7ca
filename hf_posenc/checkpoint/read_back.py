"""The plan a stock config amounts to: what its layers rotate, whoever wrote it.

Knows the architectures that skip rotation by layer (SmolLM3, Exaone, Cohere 2, GraniteSWA), those
with one table per layer type (Mellum, Gemma 3), partial-rotary families, and the masks that
exports write as longrope factors.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from hf_posenc.checkpoint.native.rope_forms import normalised, spaced
from hf_posenc.checkpoint.native.windows import WIDE_WINDOW, config_windows
from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import Window
from hf_posenc.plan import LayerPlan, LongFactors, PositionPlan, canonical_json
from hf_posenc.runtime import auto, families

# Families whose full-attention layers have no rotation while they have a sliding window.
_UNROTATED_WHEN_FULL = ("exaone4", "exaone_moe", "cohere2")


def plan_from_config(config: Any) -> PositionPlan:
    """What the layers of a stock (or converted) checkpoint do with positions.

    Partial-rotary families come out at full head width: rotated pairs first, the rest 0. `base`
    is the fingerprint of the same config with default RoPE in all layers where one base theta can
    be read off, else of the config itself. `scheme` says it in words.
    Errors: `PosencError` for models without rotary tables.
    """
    if auto.family_of_type(config.model_type) is not None:
        return auto.plan_of_config(config)
    spec = ModelSpec.from_config(config)
    own = _granite_layers(config) or _by_window(config, spec)
    windows = config_windows(config, spec.num_layers)
    layers = tuple(
        replace(normalised(_widened(layer, spec)), window=_window(width))
        for layer, width in zip(own, windows, strict=True)
    )
    return PositionPlan(
        layers=layers,
        base=_default_base(config, spec, layers).fingerprint,
        pairing=_pairing(config),
        scheme=canonical_json({"name": f"{config.model_type}: {in_words(layers)}"}),
    )


def in_words(layers: tuple[LayerPlan, ...]) -> str:
    """One sentence: which layers rotate what."""
    from hf_posenc.show import layers_text

    kinds = list(dict.fromkeys(layers))
    if len(kinds) == 1:
        return f"{_kind_text(kinds[0])} in all layers"
    parts = []
    for kind in kinds:
        where = [index for index, layer in enumerate(layers) if layer == kind]
        word = "layer" if len(where) == 1 else "layers"
        parts.append(f"{_kind_text(kind)} in {word} {layers_text(where)}")
    return "; ".join(parts)


def _kind_text(layer: LayerPlan) -> str:
    total, kept = len(layer.inv_freq), layer.num_rotated
    theta = _theta_of(layer)
    if not layer.rotated:
        text = "no rotation"
    elif kept == total:
        text = "full rotation"
    elif all(layer.inv_freq[:kept]):
        text = f"rotation of the first {kept} of {total} pairs"
    else:
        text = f"rotation of {kept} of {total} pairs"
    if theta is not None:
        text += f" (theta {theta:,.10g})"
    if layer.rope_scale != 1.0:
        text += f", cos and sin times {layer.rope_scale:.4g}"
    if layer.stretch is not None:
        text += f", other frequencies beyond {layer.stretch.original_length} tokens"
    if layer.window is not None:
        text += f", window of {layer.window.size} tokens"
    return text


def _theta_of(layer: LayerPlan) -> float | None:
    kept = layer.num_rotated
    if kept < 2 or layer.inv_freq[0] != 1.0 or not all(layer.inv_freq[:kept]):
        return None
    width = 2 * len(layer.inv_freq)
    estimate = layer.inv_freq[kept - 1] ** (-len(layer.inv_freq) / (kept - 1))
    rounded = (float(f"{estimate:.{digits}g}") for digits in range(1, 8))
    return next((t for t in rounded if spaced(t, width)[:kept] == layer.inv_freq[:kept]), None)


def _window(width: int | None) -> Window | None:
    """A window that some row can outgrow; exports write wider ones for full attention."""
    return None if width is None or width >= WIDE_WINDOW else Window(width)


def _granite_layers(config: Any) -> tuple[LayerPlan, ...] | None:
    thetas = getattr(config, "layer_rope_theta", None)
    if thetas is None:
        return None
    by_theta = {}
    for theta in dict.fromkeys(value for value in thetas if value):
        one = families.stock_config(config).__class__.from_dict(config.to_dict())
        one.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
        one.layer_rope_theta = one.no_rope_layers = None
        by_theta[theta] = ModelSpec.from_config(one).layers[0]
    some = next(iter(by_theta.values()), None) or ModelSpec.from_config(config).layers[0]
    still = LayerPlan((0.0,) * len(some.inv_freq))
    return tuple(by_theta[theta] if theta else still for theta in thetas)


def _by_window(config: Any, spec: ModelSpec) -> tuple[LayerPlan, ...]:
    if config.model_type not in _UNROTATED_WHEN_FULL or config.sliding_window is None:
        return spec.layers
    return tuple(
        layer if kind == "sliding_attention" else LayerPlan((0.0,) * len(layer.inv_freq))
        for layer, kind in zip(spec.layers, config.layer_types, strict=True)
    )


def _widened(layer: LayerPlan, spec: ModelSpec) -> LayerPlan:
    missing = spec.head_dim // 2 - len(layer.inv_freq)
    if missing <= 0 or layer.rope_scale != 1.0:
        return layer  # a scale covers the rotated features alone: no full-width table says that
    zeros = (0.0,) * missing
    stretch = layer.stretch
    if isinstance(stretch, LongFactors):
        stretch = replace(stretch, inv_freq=stretch.inv_freq + zeros)
    elif stretch is not None:
        return layer
    return replace(layer, inv_freq=layer.inv_freq + zeros, stretch=stretch)


def _default_base(config: Any, spec: ModelSpec, layers: tuple[LayerPlan, ...]) -> ModelSpec:
    rope = config.rope_parameters or {}
    theta = rope.get("rope_theta")
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0
    if rope.get("rope_type") == "proportional":
        partial = False
    several = len({value for value in getattr(config, "layer_rope_theta", None) or () if value}) > 1
    scaled = rope.get("rope_type") not in ("default", "proportional", "longrope")
    if theta is None or theta <= 1.0 or partial or several or scaled:
        return replace(spec, layers=layers, rotary_dim=2 * len(layers[0].inv_freq))
    try:
        default = spec.rope_layer({"rope_type": "default", "rope_theta": theta})
    except PosencError:
        return spec
    return replace(spec, layers=(default,) * spec.num_layers)


def _pairing(config: Any) -> Any:
    """How the family's rotate_half pairs the features of the stored weights."""
    module = importlib.import_module(families.causal_lm_class(config.model_type).__module__)
    rotate = getattr(module, "rotate_half", None)
    if rotate is None:
        return "half_split"
    probe = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
    return "interleaved" if probe == [-2.0, 1.0, -4.0, 3.0] else "half_split"
