"""Which number format a model is best trained and scored in on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

_FAST_ON_CPU = ("amx_bf16", "avx512_bf16")


def resolve_dtype(dtype: str) -> Literal["bfloat16", "float32"]:
    """`dtype` itself, or for "auto" bfloat16 where the hardware multiplies it, else float32.

    Processors without AMX or AVX512-BF16 emulate bfloat16: its matrix products take about four
    times as long there as those of float32. Errors: ValueError for another name.
    """
    if dtype not in ("auto", "bfloat16", "float32"):
        raise ValueError("is auto, bfloat16 or float32")
    if dtype == "float32" or (dtype == "auto" and not _multiplies_bfloat16()):
        return "float32"
    return "bfloat16"


def _multiplies_bfloat16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    # Missing in older releases of torch: then float32, which is never slow.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in _FAST_ON_CPU)
