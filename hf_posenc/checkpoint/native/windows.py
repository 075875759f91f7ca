"""Sliding windows of stock configs."""

from __future__ import annotations

from typing import Any

# A window no row reaches: sliding-window layers of that width are full attention.
WIDE_WINDOW = 1 << 20


def config_windows(config: Any, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer of a stock config; None = full attention."""
    width = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if width is None or not getattr(config, "use_sliding_window", True):
        return (None,) * num_layers
    if types is None:
        return (width,) * num_layers
    return tuple(width if kind == "sliding_attention" else None for kind in types)
