"""The house style of all figures, and how a figure becomes a PNG or part of a page.

Figures are built without pyplot, so nothing here touches a process-wide state or needs a display.
Text is never read as mathematics: names of models and schemes may hold any character.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from hf_posenc.files import write_bytes

INK, MUTED, RULE, PAPER = "#1d2530", "#5b6675", "#d8dde3", "#ffffff"
# Okabe-Ito colours: told apart with every common colour vision; markers differ as well.
VARIANT_STYLE: dict[str, tuple[str, str, str]] = {
    "stock": ("#3a4250", "o", "-"),
    "converted": ("#d55e00", "v", "-"),
    "healed": ("#0072b2", "s", "-"),
    "control": ("#009e73", "D", "--"),
}
_OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6f4e9c", "#3a4250")
_MARKERS = "svDo^P*X"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa3ad",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_posenc",
}


@contextmanager
def house_style() -> Iterator[None]:
    """matplotlib settings of the project, inside a `with` block only."""
    with matplotlib.rc_context(_STYLE):
        yield


def variant_style(variant: str, index: int = 0) -> dict[str, Any]:
    """Colour, marker and line of a variant; `index` separates names that are not known."""
    known = VARIANT_STYLE.get(variant)
    if known:
        return {"color": known[0], "marker": known[1], "linestyle": known[2]}
    place = index % len(_OTHERS)
    return {"color": _OTHERS[place], "marker": _MARKERS[place], "linestyle": "-"}


def save_png(figure: Figure, path: Path | str, *, dpi: int = 160) -> Path:
    """Write a figure as PNG, complete or not at all."""
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="png", dpi=dpi)
    return write_bytes(path, buffer.getvalue())


def inline_svg(figure: Figure, *, prefix: str, label: str) -> str:
    """The figure as an `<svg>` element for an HTML page.

    `prefix` makes its ids unique on the page; `label` is its text for screen readers.
    """
    buffer = io.StringIO()
    with house_style():
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = svg.replace("'DejaVu Sans'", "var(--sans), sans-serif")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def tokens_text(value: float) -> str:
    """An amount of tokens in few characters, k = 1000: 512, 2.05k, 123k, 1.5M."""
    if value >= 999_500:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if value >= 1000 else f"{value:.3g}"


def length_text(value: int) -> str:
    """A context length in few characters, k = 1024 where it is whole: 512, 2k, 128k, 1000."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else f"{value}"
