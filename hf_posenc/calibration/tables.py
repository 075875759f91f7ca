"""A calibration for people: its layers ranked by damage, its pairs as a heat map."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.calibration.record import LAYER_PREFERENCE, PAIR_PREFERENCE, Calibration
from hf_posenc.model_spec import ModelSpec
from hf_posenc.show import BARS, COLOURS


def layer_table(calibration: Calibration, spec: ModelSpec) -> Table:
    """Layers in the order in which "auto:N" takes them, with what each statistic measured.

    Those that the model `spec` describes does not rotate have none to lose and are left out.
    """
    names = [name for name in LAYER_PREFERENCE if name in calibration.layers]
    damage = calibration.layer_damage()
    table = Table(
        title=Text(f"damage of dropping a layer's rotation, by {names[0]}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for head in ("rank", "layer", *names):
        table.add_column(head, justify="right")
    inside = [index for index, layer in enumerate(spec.layers) if layer.rotated]
    order = sorted(inside, key=lambda layer: (damage[layer], layer))
    for rank, layer in enumerate(order, 1):
        values = (f"{calibration.layers[name][layer]:.3g}" for name in names)
        table.add_row(str(rank), str(layer), *values)
    return table


def pair_heat(calibration: Calibration) -> Text | None:
    """Layers x pairs; taller and lighter is missed more, a dot not at all. None without pairs."""
    name = next((name for name in PAIR_PREFERENCE if name in calibration.pairs), None)
    if name is None:
        return None
    rows = calibration.pairs[name]
    found = [math.log(value) for row in rows for value in row if value > 0]
    low, high = (min(found), max(found)) if found else (0.0, 0.0)
    margin = max(len("layer"), len(str(len(rows) - 1)))
    text = Text(f"{'layer':>{margin}}  damage of pair 0 (fastest) to {len(rows[0]) - 1}, {name}\n")
    for layer, row in enumerate(rows):
        text.append(f"{layer:>{margin}}  ")
        for value in row:
            if value <= 0:
                text.append("·", style="bright_black")
                continue
            share = (math.log(value) - low) / (high - low) if high > low else 1.0
            level = min(len(BARS) - 1, int(share * len(BARS)))
            text.append(BARS[level], style=COLOURS[level])
        text.append("\n")
    if found:
        text.append(" " * margin + f"  {math.exp(low):.2g} ")
        for bar, colour in zip(BARS, COLOURS, strict=True):
            text.append(bar, style=colour)
        text.append(f" {math.exp(high):.2g}")
    return text
