"""Recipes: what to convert, how to heal it and how to score it, as one YAML file.

A recipe holds only its differences from `recipes/defaults.yaml`. Unknown keys are refused at
every depth, and each error names the file and the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.heal.precision import resolve_dtype
from hf_posenc.heal.sections import DataSection, EvalSection, HealSection, LoraSection, Section
from hf_posenc.resources import recipes_dir

_REPLACED = ("scheme", "heal.objective")


class Recipe(Section):
    """A whole run: model, scheme, data, healing and evaluation, validated and immutable.

    dtype "auto" of a file becomes the one that suits this machine (`precision.resolve_dtype`).
    `calibration` is the file of one (`hf-posenc calibrate`), for a scheme that leaves layers or
    pairs to it; where that is None, `run` makes one. `compensate` folds gains into the queries of
    the converted model (`hf_posenc/calibration/compensation.py`).
    """

    name: str
    model: str
    dtype: Literal["bfloat16", "float32"]
    seed: int = Field(ge=0, lt=2**32)
    scheme: dict[str, Any]
    calibration: str | None
    compensate: bool
    data: DataSection
    lora: LoraSection
    heal: HealSection
    eval: EvalSection

    @field_validator("dtype", mode="before")
    @classmethod
    def _for_this_machine(cls, value: Any) -> Any:
        return resolve_dtype(str(value))

    @field_validator("scheme", mode="before")
    @classmethod
    def _buildable_scheme(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ValueError("needs a name, e.g. {name: p_rope, p: 0.5}")
        from hf_posenc.schemes import as_scheme

        as_scheme(dict(value))
        return dict(value)

    @model_serializer(mode="wrap")
    def _without_what_is_not_used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Recipes without these read, and are told apart, as before there were any.
        content: dict[str, Any] = handler(self)
        if self.calibration is None:
            content.pop("calibration", None)
        if not self.compensate:
            content.pop("compensate", None)
        return content

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step on one process: rows x row_tokens x accumulation."""
        return self.heal.rows * self.data.row_tokens * self.heal.gradient_accumulation

    @property
    def steps(self) -> int:
        """Optimiser steps on one process, rounded up so that `heal.tokens` are seen."""
        return -(-self.heal.tokens // self.tokens_per_step)

    @property
    def wants_control(self) -> bool:
        """Whether the unconverted model is healed too: ce moves it, so it must be compared."""
        return (
            self.heal.tokens > 0 and "ce" in self.heal.objective and "control" in self.eval.variants
        )

    @property
    def digest(self) -> str:
        """16 hex digits over everything that shapes the healed weights (not `name` or `eval`)."""
        content = self.model_dump(mode="json", exclude={"name": True, "eval": True})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The complete recipe, defaults included; `load_recipe` reads it back unchanged."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in recipes_dir().glob("*.yaml") if path.stem != "defaults")


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or path over the defaults, then apply `key.path=value` overrides.

    Values of overrides are YAML. Mappings merge key by key, except that the recipe's `scheme`
    and `heal.objective` replace those of the defaults; lists replace lists.
    Errors: `PosencError`, one line naming the file, or the override, and the key path.
    """
    path = _find(recipe)
    merged = _merge(_read(recipes_dir() / "defaults.yaml"), _read(path))
    merged.setdefault("name", path.stem)
    origins = [(_apply(merged, override), override) for override in overrides]
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise PosencError(_one_line(error, path, origins)) from None


def _find(recipe: str | Path) -> Path:
    path = Path(recipe)
    if path.is_file():
        return path
    if path.is_dir():
        raise PosencError(f"{path}: is a folder, not a recipe file")
    is_name = path.name == str(recipe) and path.suffix not in (".yaml", ".yml")
    if is_name and str(recipe) in list_recipes():
        return recipes_dir() / f"{recipe}.yaml"
    hint = did_you_mean(path.stem if not is_name else str(recipe), list_recipes())
    raise PosencError(f"{recipe}: no such recipe or recipe file; {hint}")


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, except that a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} is given twice", node.start_mark
            )
        return mapping


def _read(path: Path) -> dict[str, Any]:
    try:
        content = _parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise PosencError(f"{path}: not a text file; a recipe is YAML") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise PosencError(f"{path}: a recipe is a mapping of sections, not {content!r:.60}")
    return content


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise PosencError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def _merge(base: dict[str, Any], top: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        path = f"{prefix}{key}"
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and path not in _REPLACED:
            value = _merge(below, value, f"{path}.")
        merged[key] = value
    return merged


def _apply(merged: dict[str, Any], override: str) -> tuple[str, ...]:
    key_path, equals, value = override.partition("=")
    keys = tuple(key_path.strip().split("."))
    if not equals or not all(keys):
        raise PosencError(f"override {override!r}: write key.path=value, e.g. heal.tokens=4096")
    section: Any = merged
    for depth, key in enumerate(keys[:-1]):
        below = section.get(key)
        below = {} if below is None else below
        if depth == 0 and key == "scheme" and isinstance(below, str):
            below = {"name": below}
        if not isinstance(below, dict):
            raise PosencError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])} has no keys below it"
            )
        section[key] = below = dict(below)
        section = below
    section[keys[-1]] = _parse(value, f"override {override!r}")
    return keys


def _one_line(
    error: ValidationError, path: Path, origins: Sequence[tuple[tuple[str, ...], str]]
) -> str:
    found = [(_location(item["loc"]), item) for item in error.errors()]
    # A union reports each of its branches; the deepest says most.
    location = max((where for where, _ in found if where[:2] == found[0][0][:2]), key=len)
    items = [item for where, item in found if where == location]
    source = str(path)
    for keys, override in origins:
        shared = min(len(keys), len(location))
        if keys[:shared] == location[:shared]:
            source = f"override {override!r}"
    kind, given = items[0]["type"], items[0]["input"]
    if kind == "extra_forbidden":
        reason = f"unknown key; {did_you_mean(location[-1], _keys_at(location[:-1]))}"
    elif kind == "missing":
        reason = "is missing; add it to the recipe"
    else:
        messages = [str(item["msg"]).removeprefix("Value error, ") for item in items]
        reason = " or ".join(message[0].lower() + message[1:] for message in messages)
        reason += "" if kind == "value_error" else f" (got {given!r:.80})"
    return f"{source}: {'.'.join(location)}: {reason}"


def _location(loc: tuple[str | int, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in loc if not _is_union_branch(part))


def _is_union_branch(part: str | int) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("bool", "str", "tuple"))


def _keys_at(location: tuple[str, ...]) -> list[str]:
    """The keys allowed in the section that a location of the recipe leads to."""
    section: type[BaseModel] = Recipe
    for part in location:
        if part.isdigit():
            continue
        annotation = section.model_fields[part].annotation
        types = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
        section = next(item for item in types if issubclass(item, BaseModel))
    return list(section.model_fields)
