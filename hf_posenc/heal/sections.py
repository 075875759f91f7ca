"""The sections of a recipe: which keys there are, and which values they take."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

Objective = Literal["ce", "kl", "hidden"]
Variant = Literal["stock", "converted", "healed", "control"]
_NOT_LORA = ("lm_head", "embed_tokens")


def _one_name(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


def _some_weight(value: dict[str, float]) -> dict[str, float]:
    if not value or any(not 0 <= weight < math.inf for weight in value.values()):
        raise ValueError("needs kl, ce or hidden, each with a finite weight of 0 or more")
    positive = {name: weight for name, weight in value.items() if weight > 0}
    if not positive:
        raise ValueError("needs at least one weight above 0")
    return positive


Weights = Annotated[
    dict[Objective, float], BeforeValidator(_one_name), AfterValidator(_some_weight)
]


class Section(BaseModel):
    """A mapping of a recipe: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # Keys that came later: written where they are used, so that other recipes are told apart, and
    # go on after a stop, as before.
    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_what_is_not_used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        unused = {key for key in self.later if getattr(self, key) == fields[key].default}
        return {key: value for key, value in content.items() if key not in unused}


class Source(Section):
    """One source of text: anything `hf_posenc.sources` reads, and its share of the tokens."""

    source: str
    weight: float = Field(default=1.0, gt=0)


class DataSection(Section):
    """Where the tokens come from; `split` "train" leaves each source's held-out part alone."""

    sources: tuple[Source, ...] = Field(min_length=1)
    row_tokens: int = Field(ge=8)
    split: Literal["train", "all"]

    @field_validator("sources", mode="before")
    @classmethod
    def _plain_strings(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            return [{"source": item} if isinstance(item, str) else item for item in value]
        return value


class LoraSection(Section):
    """The adapter; `targets` is a list of module names or "all-linear".

    full  train the targets as whole copies: `r`, `alpha` and `dropout` have no effect
    """

    later = ("full",)
    full: bool = False
    r: int = Field(ge=1)
    alpha: int = Field(ge=1)
    targets: Literal["all-linear"] | tuple[str, ...]
    dropout: float = Field(ge=0, lt=1)

    @field_validator("targets")
    @classmethod
    def _hidden_layers_only(cls, value: Any) -> Any:
        named = () if value == "all-linear" else value
        if value != "all-linear" and not named:
            raise ValueError('needs at least one module name, or "all-linear"')
        for name in named:
            if name.endswith(_NOT_LORA):
                raise ValueError(f"{name} shares its weights with the teacher; leave it out")
        return value


class GentleSection(Section):
    """How the plan comes in over the first `share` of the steps (see `heal/gentle.py`).

    order  of the layers with by "layers": "depth" (shallow first), "deepest", or the layers that
           the plan changes, most harmless first
    """

    by: Literal["frequencies", "layers"]
    share: float = Field(default=0.5, gt=0, le=1)
    order: Literal["depth", "deepest"] | tuple[int, ...] = "depth"

    @field_validator("order")
    @classmethod
    def _of_layers(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "depth" and info.data.get("by") == "frequencies":
            raise ValueError("has no effect by frequencies, which move in all layers at once")
        return value


class FirstSection(Section):
    """Another objective for the first `share` of the steps."""

    objective: Weights
    share: float = Field(default=0.3, gt=0, lt=1)


class HealSection(Section):
    """How the converted model is healed; `tokens: 0` means that it is not."""

    later = ("first", "gentle")
    objective: Weights
    first: FirstSection | None = None
    gentle: GentleSection | None = None
    tokens: int = Field(ge=0)
    rows: int = Field(ge=1)
    gradient_accumulation: int = Field(ge=1)
    lr: float = Field(gt=0)
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"]
    warmup: float = Field(ge=0)
    train_norms: bool
    bias_lr_multiplier: float = Field(gt=0)
    gradient_checkpointing: bool | Literal["reentrant"]
    hidden_layers: Literal["all"] | Annotated[tuple[int, ...], Field(min_length=1)]
    heldout_every: int = Field(ge=0)
    heldout_rows: int = Field(ge=0)
    save_steps: int = Field(ge=0)

    @field_validator("warmup")
    @classmethod
    def _share_or_steps(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("is a share of the steps below 1, or a whole number of steps")
        return value


class EvalSection(Section):
    """What is scored: a suite by name or a list of tasks, at context lengths in tokens."""

    tasks: str | tuple[str, ...]
    lengths: tuple[int, ...]
    limit: int | None = Field(ge=1)
    variants: tuple[Variant, ...] = Field(min_length=1)

    @field_validator("lengths")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(length < 1 for length in value):
            raise ValueError("lengths are token counts, 1 or more")
        return value
