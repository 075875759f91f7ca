"""Checks for scheme options: a bool is no number, text is no number, NaN is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_posenc.errors import PosencError, did_you_mean


def check_number(
    name: str, value: object, *, above: float = 0.0, at_most: float = math.inf
) -> float:
    """`value` as a float, when it is a finite number with above < value <= at_most."""
    wanted = f"a number above {above:g}"
    if at_most != math.inf:
        wanted += f" and at most {at_most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PosencError(f"{name}={value!r} must be {wanted}, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and above < number <= at_most):
        raise PosencError(f"{name}={value!r} must be {wanted}")
    return number


def check_integer(name: str, value: object, *, at_least: int) -> int:
    """`value`, when it is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PosencError(f"{name}={value!r} must be a whole number of at least {at_least}")
    return value


def check_flag(name: str, value: object) -> bool:
    """`value`, when it is True or False."""
    if not isinstance(value, bool):
        raise PosencError(f"{name}={value!r} must be true or false")
    return value


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """`value`, when it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise PosencError(f"{name}={value!r} is unknown; {did_you_mean(str(value), choices)}")
    return value
