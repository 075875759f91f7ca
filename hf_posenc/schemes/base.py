"""What a scheme is: named, checked options that turn a `ModelSpec` into a `PositionPlan`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import Embedding
from hf_posenc.plan import LayerPlan, Pairing, PositionPlan, canonical_json
from hf_posenc.schedule import Schedule, check_schedule, select_layers


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A positional encoding with its options; a pure function from model facts to a plan.

    Subclasses are frozen dataclasses whose fields are the options; they check them in
    `__post_init__` (PosencError) and implement `plan_layer`.

    name    registry name, public
    source  the paper or code that defines the scheme
    layers  which layers change (`schedule.select_layers`); the others stay as they are
    """

    name: ClassVar[str]
    source: ClassVar[str]

    layers: Schedule | None = "all"

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", check_schedule(self.layers))

    @abstractmethod
    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        """The plan of decoder layer `index` (0-based), called for selected layers only."""

    def selected(self, num_layers: int) -> tuple[bool, ...]:
        """Which of the layers this scheme plans."""
        return select_layers("all" if self.layers is None else self.layers, num_layers)

    def pairing(self, selected: tuple[bool, ...]) -> Pairing:
        """How feature pairs lie in the stored weights when the `selected` layers change."""
        return "half_split"

    def embedding(self, spec: ModelSpec) -> Embedding | None:
        """What is added to the token embeddings."""
        return None

    def build(self, spec: ModelSpec) -> PositionPlan:
        """The plan for the model `spec` describes; the same inputs give an equal plan.

        Raises PosencError where the scheme is not defined for that model.
        """
        selected = self.selected(spec.num_layers)
        pairing = self.pairing(selected)
        return PositionPlan(
            layers=tuple(
                self.plan_layer(spec, index) if chosen else spec.layers[index]
                for index, chosen in enumerate(selected)
            ),
            base=spec.fingerprint,
            pairing=pairing,
            embedding=self.embedding(spec),
            scheme=canonical_json(self.describe()),
        )

    def describe(self) -> dict[str, Any]:
        """`{"name": ..., **options}` in plain JSON values; `as_scheme` gives an equal scheme back.

        Options left at None or "all", where that is their default, are left out.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        unset = {
            field.name
            for field in dataclasses.fields(self)
            if field.default in (None, "all") and given[field.name] == field.default
        }
        return {"name": self.name} | {k: _plain(v) for k, v in given.items() if k not in unset}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.describe() if hasattr(value, "describe") else value
