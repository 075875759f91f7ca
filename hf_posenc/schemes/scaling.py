"""The `scaling` option of `rope`: how the frequencies are stretched for longer context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.model_spec import ModelSpec
from hf_posenc.schemes.options import check_choice, check_flag, check_integer, check_number

Value = float | int | bool | tuple[float, ...]

_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        _ORIGINAL,
    ),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL),
}
_REQUIRED = {"longrope": ("short_factor", "long_factor"), "default": ()}
_DEFAULTS: dict[str, dict[str, Value]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # Llama 3.1's own
}


@dataclass(frozen=True)
class RopeScaling:
    """Checked scaling parameters, hashable: (key, value) in order of the key.

    Keys and meanings are those of `rope_parameters` in transformers' configs. `ntk` (static
    NTK-aware: theta * s^(d/(d-2))) is the one type that transformers has no name for.
    """

    rope_type: str
    parameters: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def parse(cls, value: object) -> RopeScaling:
        """From a mapping with "rope_type" (or "type"), "yarn:4" (type:factor), or "default"."""
        if isinstance(value, RopeScaling):
            return value
        if isinstance(value, str):
            rope_type, _, factor = value.partition(":")
            return cls.parse({"rope_type": rope_type, **_factor_of(value, factor)})
        if not isinstance(value, Mapping):
            raise PosencError(
                f"scaling={value!r} must be a mapping such as {{'type': 'yarn', 'factor': 4}} "
                "or text such as 'yarn:4'"
            )
        return cls._from_mapping(dict(value))

    @classmethod
    def _from_mapping(cls, given: dict[str, Any]) -> RopeScaling:
        names = {str(given.pop(key)) for key in ("type", "rope_type") if key in given}
        if len(names) != 1:
            raise PosencError(f"scaling needs one 'type' ({', '.join(_KEYS)}), not {len(names)}")
        name = names.pop()
        rope_type = "linear" if name == "pi" else check_choice("scaling type", name, [*_KEYS, "pi"])
        if "rope_theta" in given:
            raise PosencError("scaling takes no 'rope_theta'; use the option theta=")
        for key in given:
            if key not in _KEYS[rope_type]:
                known = _KEYS[rope_type]
                hint = did_you_mean(str(key), known) if known else "it takes no parameters"
                raise PosencError(f"scaling {rope_type!r} has no {key!r}; {hint}")
        for key in _REQUIRED.get(rope_type, ("factor",)):
            if given.get(key) is None:
                raise PosencError(
                    f"scaling {rope_type!r} needs {key!r}, e.g. "
                    f"{{'type': {rope_type!r}, {key!r}: {'[...]' if '_' in key else 4}}}"
                )
        values = {key: _check(key, value) for key, value in given.items() if value is not None}
        values = {**_DEFAULTS.get(rope_type, {}), **values}
        _check_order(values, "low_freq_factor", "high_freq_factor")
        _check_order({"beta_slow": 1.0, "beta_fast": 32.0, **values}, "beta_slow", "beta_fast")
        return cls(rope_type, tuple(sorted(values.items())))

    def describe(self) -> dict[str, Any]:
        """The mapping that `parse` reads, in plain JSON values."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in self.parameters}
        return {"rope_type": self.rope_type, **values}

    def rope_parameters(self, spec: ModelSpec, theta: float) -> dict[str, Any]:
        """What transformers reads from a config: this scaling at base `theta` for `spec`.

        The length the model was trained at is the config's own unless it was given.
        """
        values = self.describe()
        width = spec.rotary_dim
        if self.rope_type in ("ntk", "dynamic") and width <= 2:
            raise PosencError(f"scaling {self.rope_type!r} is not defined for rotary width {width}")
        if self.rope_type == "ntk":
            stretched = theta * values["factor"] ** (width / (width - 2))
            return {"rope_type": "default", "rope_theta": stretched}
        for key in ("short_factor", "long_factor"):
            if key in values and len(values[key]) != spec.num_frequencies:
                raise PosencError(
                    f"scaling 'longrope': {key} has {len(values[key])} entries; this model has "
                    f"{spec.num_frequencies} frequencies"
                )
        if _ORIGINAL in _KEYS[self.rope_type] and _ORIGINAL not in values:
            values[_ORIGINAL] = spec.rope.get(_ORIGINAL) or spec.max_positions
        return {**values, "rope_theta": theta}


def _factor_of(text: str, factor: str) -> dict[str, float]:
    if not factor:
        return {}
    try:
        return {"factor": float(factor)}
    except ValueError:
        raise PosencError(f"scaling={text!r}: {factor!r} is no number, as in 'yarn:4'") from None


def _check(key: str, value: object) -> Value:
    name = f"scaling {key}"
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or not value:
            raise PosencError(f"{name}={value!r} must be a list of numbers, one per frequency")
        return tuple(check_number(name, item) for item in value)
    if key == _ORIGINAL:
        return check_integer(name, value, at_least=1)
    if key == "truncate":
        return check_flag(name, value)
    number = check_number(name, value)
    if key == "factor" and number < 1.0:
        raise PosencError(f"{name}={value!r} must be at least 1 (it stretches the context)")
    return number


def _check_order(values: Mapping[str, Value], low: str, high: str) -> None:
    small, large = values.get(low, 0.0), values.get(high, 1.0)
    if isinstance(small, float) and isinstance(large, float) and small >= large:
        raise PosencError(f"scaling {low}={small:g} must be below {high}={large:g}")
