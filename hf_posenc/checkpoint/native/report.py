"""What an export did, or why it could not be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.errors import PosencError


class Unexportable(PosencError):
    """No stock architecture (or not the one asked for) computes the plan; the text says why.

    reasons  per target name, in one line each
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


@dataclass(frozen=True)
class ExportReport:
    """One finished export.

    target                name in the registry, e.g. "smollm3"
    architecture          stock class (or GGUF architecture) that loads the result
    weight_changes        in words, against the base's own weights; empty when none changed
    max_logit_difference  between the reloaded export and the plan, over all probes, absolute; None
                          for a GGUF file, which is read back but not run
    max_logit             largest absolute logit of the probes, to judge the difference by, or None
    notes                 what a reader of the result has to know about its config
    """

    target: str
    architecture: str
    weight_changes: tuple[str, ...]
    max_logit_difference: float | None
    max_logit: float | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
