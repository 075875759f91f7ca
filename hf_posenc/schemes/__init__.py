"""The registry of schemes: names, their classes, and the ways to make one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.schemes.absolute import LearnedAbsoluteScheme, Sinusoidal
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.biases import Alibi, QueryBiasScheme, T5BiasScheme
from hf_posenc.schemes.compose import Compose, Group
from hf_posenc.schemes.dual import Dual
from hf_posenc.schemes.interleaved import Interleaved
from hf_posenc.schemes.nope import Nope, NopeInterleaved
from hf_posenc.schemes.p_rope import PRope
from hf_posenc.schemes.partial import Partial
from hf_posenc.schemes.presets import Drope, Gemma4, IRope, RNopeSwa, SmolLM3, Swan
from hf_posenc.schemes.rope import Rope

__all__ = ["Scheme", "as_scheme", "compose", "list_schemes", "make_scheme"]

_REGISTRY: dict[str, type[Scheme]] = {
    Rope.name: Rope,
    Interleaved.name: Interleaved,
    Partial.name: Partial,
    PRope.name: PRope,
    Nope.name: Nope,
    NopeInterleaved.name: NopeInterleaved,
    Dual.name: Dual,
    Alibi.name: Alibi,
    T5BiasScheme.name: T5BiasScheme,
    QueryBiasScheme.name: QueryBiasScheme,
    Sinusoidal.name: Sinusoidal,
    LearnedAbsoluteScheme.name: LearnedAbsoluteScheme,
    Gemma4.name: Gemma4,
    SmolLM3.name: SmolLM3,
    IRope.name: IRope,
    RNopeSwa.name: RNopeSwa,
    Swan.name: Swan,
    Drope.name: Drope,
    Compose.name: Compose,
}


def list_schemes() -> dict[str, type[Scheme]]:
    """Every scheme by its public name; the fields of a class are its options."""
    return dict(_REGISTRY)


def make_scheme(name: str, **options: Any) -> Scheme:
    """The scheme `name` with checked options; PosencError with a hint for an unknown name."""
    if name not in list(_REGISTRY):
        raise PosencError(f"unknown scheme {name!r}; {did_you_mean(str(name), _REGISTRY)}")
    fields = dataclasses.fields(_REGISTRY[name])
    known = [field.name for field in fields]
    for option in options:
        if option not in known:
            raise PosencError(
                f"scheme {name!r} has no option {option!r}; {did_you_mean(option, known)}"
            )
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in options:
            raise PosencError(f"scheme {name!r} needs the option {field.name!r}")
    return _REGISTRY[name](**options)


def as_scheme(scheme: str | Scheme | Mapping[str, Any], **options: Any) -> Scheme:
    """A scheme from its name (with options), its description `{"name": ..., **options}`, or itself.

    `as_scheme(scheme.describe()) == scheme` for every scheme.
    """
    if isinstance(scheme, str):
        return make_scheme(scheme, **options)
    if options:
        raise PosencError(
            f"option {next(iter(options))!r} goes with the name of a scheme; "
            f"put it into the {type(scheme).__name__} that was given"
        )
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, Mapping) or not isinstance(scheme.get("name"), str):
        raise PosencError(
            f"{scheme!r} is no scheme; give a name such as 'nope_interleaved', a Scheme, or a "
            "mapping with 'name'"
        )
    return make_scheme(**{str(key): value for key, value in scheme.items()})


def compose(groups: Sequence[Group | Mapping[str, Any]]) -> Scheme:
    """Another scheme per layer group: `compose([{"layers": "0-3", "scheme": "nope"}, ...])`."""
    return make_scheme("compose", groups=groups)
