"""Options that several schemes share: `window` and `logit_scale`, from plain values to parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.parts import (
    SCALE_FORMS,
    ConstantScale,
    HeadScale,
    LogitScale,
    PositionScale,
    Window,
)

_PER_HEAD = "per_head"


def parse_window(name: str, value: object) -> Window | None:
    """None, or a sliding window of `value` tokens (the query itself included)."""
    if value is None or isinstance(value, Window):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PosencError(f"{name}={value!r} must be a whole number of tokens, at least 1")
    return Window(value)


def parse_scale(value: object) -> LogitScale | None:
    """None, a number, "per_head", or {"kind": form, "floor": ..., "alpha": ...}.

    The forms are those of `PositionScale`; "per_head" is learned.
    """
    if value is None or isinstance(value, ConstantScale | PositionScale | HeadScale):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ConstantScale(float(value))
    if value == _PER_HEAD:
        return HeadScale()
    kinds = (*SCALE_FORMS, _PER_HEAD)
    if not isinstance(value, Mapping) or "kind" not in value:
        raise PosencError(
            f"logit_scale={value!r} must be a number or {{'kind': ...}}; kinds: {', '.join(kinds)}"
        )
    fields: dict[str, Any] = dict(value)
    kind = fields.pop("kind")
    if kind not in kinds:
        raise PosencError(f"logit_scale kind {kind!r} is unknown; {did_you_mean(str(kind), kinds)}")
    known = () if kind == _PER_HEAD else ("floor", "alpha")
    for key in fields:
        if key not in known:
            hint = did_you_mean(str(key), known) if known else "it has none"
            raise PosencError(f"logit_scale {kind!r} has no option {key!r}; {hint}")
    if kind == _PER_HEAD:
        return HeadScale()
    if "floor" not in fields:
        raise PosencError(f"logit_scale {kind!r} needs 'floor', in tokens")
    return PositionScale(form=kind, **fields)


def describe_scale(scale: LogitScale | None) -> Any:
    """What `parse_scale` reads back."""
    if isinstance(scale, ConstantScale):
        return scale.value
    if isinstance(scale, HeadScale):
        return {"kind": _PER_HEAD}
    if isinstance(scale, PositionScale):
        return {"kind": scale.form, "floor": scale.floor, "alpha": scale.alpha}
    return None
