"""What every export target is: a name, its stock class, and a draft or a reason against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_posenc.checkpoint.native.case import Case, Draft


@dataclass(frozen=True)
class Target:
    """One stock architecture that computes some plans.

    name          registry name, public
    architecture  class that loads the result, "" for the base's own
    draft         what would be written for a case; raises `Unexportable` with the reason
    automatic     "auto" may choose it
    """

    name: str
    architecture: str
    draft: Callable[[Case], Draft]
    automatic: bool = True
