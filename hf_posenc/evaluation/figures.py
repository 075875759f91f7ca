"""Every figure of reports, `hf-posenc show` and healing runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from hf_posenc.evaluation.style import (
    INK,
    MUTED,
    PAPER,
    house_style,
    length_text,
    save_png,
    tokens_text,
    variant_style,
)
from hf_posenc.plan import PositionPlan

_NEEDLE_COLOURS = LinearSegmentedColormap.from_list(
    "needles", ["#b3261e", "#ec8f5e", "#f7ecd0", "#7fc7a4", "#00785a"]
)
_PLAN_COLOURS = "viridis"
_TITLE_WIDTH = 80  # characters
_LEGEND_WIDTH = 112  # characters, with 8 per entry for its line and the gap


@dataclass(frozen=True)
class Curve:
    """Loss by position: one point per (start, end) bin in tokens, values in nats per token."""

    label: str
    variant: str
    bins: Sequence[tuple[int, int]]
    values: Sequence[float]
    stderrs: Sequence[float | None]


@dataclass(frozen=True)
class Needles:
    """Exact-match rate by (length in tokens, depth as a fraction of the prompt)."""

    label: str
    cells: Mapping[tuple[int, float], float]


@dataclass(frozen=True)
class Healing:
    """The log of one healing run: rows with `tokens` and `loss`."""

    label: str
    variant: str
    log: Sequence[Mapping[str, Any]]
    heldout: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def loss_by_position(
    panels: Mapping[str, Sequence[Curve]], *, trained_length: int | None = None
) -> Figure:
    """Loss against position with bands of one standard error; one panel per text."""
    with house_style():
        figure = Figure(figsize=(8.6, 3.6 if len(panels) < 3 else 3.4), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (title, curves) in zip(axes, panels.items(), strict=True):
            edges = _draw_curves(axis, curves)
            _token_axis(axis, edges, trained_length)
            if len(panels) > 1:
                axis.set_title(_fitting(title))
        axes[0].set_ylabel("loss (nats per token)")
        handles, labels = axes[0].get_legend_handles_labels()
        columns = max(1, min(len(labels), _LEGEND_WIDTH // (max(map(len, labels)) + 8)))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        return figure


def needle_map(rows: Mapping[str, Sequence[Needles]]) -> Figure:
    """Needle retrieval by depth and length, red (none) to green (all), one shared scale.

    One row of panels per task, one column per variant; the rate stands in each cell.
    """
    columns = max(len(panels) for panels in rows.values())
    lengths = sorted({length for panels in rows.values() for p in panels for length, _ in p.cells})
    width = min(8.6, 1.5 + columns * max(1.5, 0.62 * len(lengths) + 0.5))
    with house_style(), matplotlib.rc_context({"axes.grid": False}):
        figure = Figure(figsize=(width, 0.7 + 2.5 * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey="row")
        for axis_row, (task, panels) in zip(axes, rows.items(), strict=True):
            for axis, panel in zip(axis_row, panels, strict=False):
                _draw_needles(axis, panel)
                axis.set_title(panel.label)
            for axis in axis_row[len(panels) :]:
                axis.set_visible(False)
            axis_row[0].set_ylabel(
                f"{task}\nneedle depth (%)" if len(rows) > 1 else "needle depth (%)"
            )
        for axis in axes[-1]:
            axis.set_xlabel("prompt (tokens)")
        bar = figure.colorbar(
            axes[0, 0].images[0], ax=axes.ravel().tolist(), fraction=0.03, pad=0.02
        )
        bar.set_label("needles found (rate)")
        bar.outline.set_visible(False)
        return figure


def healing_curve(runs: Sequence[Healing], *, objective: str = "loss") -> Figure:
    """Training loss against healing tokens, raw (thin) and smoothed; held-out loss beside it."""
    heldout = any(len(run.heldout) for run in runs)
    with house_style():
        figure = Figure(figsize=(8.6, 3.2), layout="constrained")
        axes = figure.subplots(1, 2 if heldout else 1, squeeze=False)[0]
        for index, run in enumerate(runs):
            style = variant_style(run.variant, index)
            _draw_log(axes[0], run.log, run.label, style)
            if heldout and run.heldout:
                tokens = [row["tokens"] for row in run.heldout]
                axes[1].plot(tokens, [row["loss"] for row in run.heldout], label=run.label, **style)
        axes[0].set_ylabel(objective)
        axes[0].set_title("training")
        if heldout:
            axes[1].set_title("held-out text")
            axes[1].set_ylabel("loss (nats per token)")
        for axis in axes:
            axis.set_xlabel("healing tokens")
            axis.xaxis.set_major_formatter(lambda value, _: tokens_text(value))
            axis.set_xlim(left=0)
            if len(runs) > 1:
                axis.legend()
        return figure


def plan_map(
    plan: PositionPlan, *, trained_length: int | None = None, title: str | None = None
) -> Figure:
    """Layers x frequencies, coloured by wavelength in tokens; unrotated pairs are hatched."""
    frequencies = np.array([layer.inv_freq for layer in plan.layers])
    count, width = frequencies.shape
    with house_style(), matplotlib.rc_context({"axes.grid": False}):
        figure = Figure(
            figsize=(8.6, min(7.5, max(2.4, 1.3 + 0.105 * count))), layout="constrained"
        )
        axis = figure.subplots()
        axis.add_patch(
            Rectangle((-0.5, -0.5), width, count, facecolor="#f1f2f4", edgecolor="#aab2bc",
                      hatch="////", linewidth=0, zorder=0)
        )  # fmt: skip
        waves = np.ma.masked_where(
            frequencies == 0, 2 * math.pi / np.where(frequencies == 0, 1, frequencies)
        )
        low, high = _wave_range(waves)
        image = axis.imshow(
            waves, aspect="auto", interpolation="nearest", cmap=_PLAN_COLOURS,
            norm=LogNorm(low, high), zorder=1,
        )  # fmt: skip
        axis.set_xlabel("frequency (feature pair; 0 is the fastest)")
        axis.set_ylabel("decoder layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        _layer_lines(axis, count, width)
        if title:
            axis.set_title(_fitting(title))
        bar = figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02)
        bar.ax.yaxis.set_major_formatter(lambda value, _: tokens_text(value))
        bar.ax.yaxis.set_minor_formatter(lambda value, _: "")
        bar.set_label("wavelength (tokens)")
        bar.outline.set_visible(False)
        if trained_length and low < trained_length < high:
            bar.set_label(
                f"wavelength (tokens; line: trained length {length_text(trained_length)})"
            )
            bar.ax.axhline(trained_length, color="white", linewidth=3.2)
            bar.ax.axhline(trained_length, color=INK, linewidth=1.4)
        unrotated = int((frequencies == 0).sum())
        if unrotated:
            patch = Rectangle((0, 0), 1, 1, facecolor="#f1f2f4", edgecolor="#aab2bc", hatch="////")
            figure.legend([patch], [f"not rotated ({unrotated} of {frequencies.size} pairs)"],
                          loc="outside upper right")  # fmt: skip
        return figure


def loss_curve(log: Sequence[Mapping[str, Any]], path: Path | str, title: str) -> Path:
    """Draw the loss of a healing log (rows with `tokens` or `step`, and `loss`) as a PNG."""
    key = "tokens" if all("tokens" in row for row in log) else "step"
    rows = [{"tokens": row[key], "loss": row["loss"]} for row in log]
    with house_style():
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axis = figure.subplots()
        _draw_log(axis, rows, "", variant_style("healed"))
        axis.set_title(_fitting(title))
        axis.set_ylabel("loss (nats per token)")
        axis.set_xlabel("healing tokens" if key == "tokens" else "step")
        axis.xaxis.set_major_formatter(lambda value, _: tokens_text(value))
        return save_png(figure, path)


def _fitting(title: str) -> str:
    return title if len(title) <= _TITLE_WIDTH else f"{title[: _TITLE_WIDTH - 1]}…"


def _draw_curves(axis: Axes, curves: Iterable[Curve]) -> list[int]:
    edges: set[int] = set()
    for index, curve in enumerate(curves):
        style = variant_style(curve.variant, index)
        # The geometric centre, with the first bin (which starts at 0) counted from half its end.
        centres = [math.sqrt(max(start, end / 4) * end) for start, end in curve.bins]
        values = np.array(curve.values, dtype=float)
        errors = np.array([error or 0.0 for error in curve.stderrs], dtype=float)
        axis.fill_between(
            centres, values - errors, values + errors, color=style["color"], alpha=0.16, linewidth=0
        )
        axis.plot(centres, values, label=curve.label, **style)
        edges.update(edge for pair in curve.bins for edge in pair)
    return sorted(edges)


def _token_axis(axis: Axes, edges: Sequence[int], trained_length: int | None) -> None:
    axis.set_xscale("log", base=2)
    ticks = [edge for edge in edges if edge > 0]
    axis.set_xticks(ticks, [length_text(edge) for edge in ticks])
    axis.minorticks_off()
    axis.set_xlabel("position (tokens; ticks are the edges of the bins)")
    if ticks:
        axis.set_xlim(ticks[0] / 2.4, ticks[-1] * 1.1)
    if trained_length and ticks:
        if trained_length <= ticks[-1]:
            axis.axvline(trained_length, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
            axis.annotate(
                "trained length", (trained_length, 1), xycoords=("data", "axes fraction"),
                xytext=(-4, -3), textcoords="offset points", ha="right", va="top", color=MUTED,
                rotation=90, fontsize=8, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        else:
            axis.annotate(
                f"trained length {length_text(trained_length)} →", (1, 1), xycoords="axes fraction",
                xytext=(-2, -2), textcoords="offset points", ha="right", va="top", color=MUTED,
                fontsize=8,
            )  # fmt: skip


def _draw_needles(axis: Axes, panel: Needles) -> None:
    lengths = sorted({length for length, _ in panel.cells})
    depths = sorted({depth for _, depth in panel.cells})
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), value in panel.cells.items():
        grid[depths.index(depth), lengths.index(length)] = value
    axis.set_facecolor("#f1f2f4")
    axis.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap=_NEEDLE_COLOURS, vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(grid):
        if not math.isnan(value):
            dark = value < 0.12 or value > 0.9
            axis.text(
                column, row, f"{value:.2g}", ha="center", va="center", fontsize=8,
                color=PAPER if dark else INK,
            )  # fmt: skip
    axis.set_xticks(range(len(lengths)), [length_text(length) for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
    axis.tick_params(length=0)
    axis.hlines(
        np.arange(len(depths) - 1) + 0.5, -0.5, len(lengths) - 0.5, color=PAPER, linewidth=1
    )
    axis.vlines(
        np.arange(len(lengths) - 1) + 0.5, -0.5, len(depths) - 0.5, color=PAPER, linewidth=1
    )
    for spine in axis.spines.values():
        spine.set_visible(False)


def _draw_log(
    axis: Axes, log: Sequence[Mapping[str, Any]], label: str, style: Mapping[str, Any]
) -> None:
    tokens = np.array([row["tokens"] for row in log], dtype=float)
    losses = np.array([row["loss"] for row in log], dtype=float)
    plain = {key: value for key, value in style.items() if key != "marker"}
    if len(losses) < 8:
        axis.plot(tokens, losses, label=label, **style)
        return
    axis.plot(tokens, losses, **{**plain, "linewidth": 0.8, "alpha": 0.35})
    axis.plot(tokens, _smooth(losses), label=label, **plain)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean over a tenth of the run; shorter windows at both ends."""
    half = max(1, len(values) // 20)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _wave_range(waves: Any) -> tuple[float, float]:
    if waves.count() == 0:
        return 2 * math.pi, 1e6
    low, high = float(waves.min()), float(waves.max())
    return (low, high) if high > low else (low / 2, high * 2)


def _layer_lines(axis: Axes, count: int, width: int) -> None:
    if count <= 64:
        axis.hlines(np.arange(count - 1) + 0.5, -0.5, width - 0.5, color=PAPER, linewidth=0.7)
