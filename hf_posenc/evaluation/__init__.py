"""Scoring through lm-eval, and the record it leaves.

`evaluate` and `PosencLM` bring lm-eval with them, so they are imported on first use.
"""

from __future__ import annotations

from typing import Any

from hf_posenc.evaluation.record import EvalRecord, Needle, Score

__all__ = ["EvalRecord", "Needle", "PosencLM", "Score", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in ("evaluate", "PosencLM"):
        from hf_posenc.evaluation import harness

        return getattr(harness, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
