"""What a scheme is: named, checked options that turn a `ModelSpec` into a `PositionPlan`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import Embedding
from hf_posenc.plan import LayerPlan, Pairing, PositionPlan, canonical_json, scheme_label
from hf_posenc.schedule import (
    Schedule,
    auto_layers,
    check_schedule,
    select_layers,
    uncalibrated,
)

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration


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

    @property
    def needs_calibration(self) -> bool:
        """Whether some layers or pairs are left to a calibration."""
        return auto_layers(self.layers) is not None

    def resolve(
        self, spec: ModelSpec, calibration: Calibration, among: Sequence[int] | None = None
    ) -> Self:
        """The same scheme with the layers and pairs that `calibration` chooses written out.

        among  layers to choose from; None: all. Layers that the checkpoint does not rotate have
               nothing to lose and are never chosen by "auto:N".
        Raises PosencError for more layers or pairs than there are, or a statistic that was not
        measured.
        """
        wanted = auto_layers(self.layers)
        if wanted is None:
            return self
        return dataclasses.replace(
            self,
            layers=calibration.harmless_layers(
                wanted.count, wanted.by, layers=rotated_layers(spec, among)
            ),
        )

    def build(self, spec: ModelSpec, calibration: Calibration | None = None) -> PositionPlan:
        """The plan for the model `spec` describes; the same inputs give an equal plan.

        calibration  of that model, for a scheme that leaves layers or pairs to it
        Raises PosencError where the scheme is not defined for that model, and for a calibration
        that is missing or of another model.
        """
        if calibration is not None:
            calibration.check(spec)
        explicit = self
        if self.needs_calibration:
            if calibration is None:
                raise uncalibrated(f"scheme {scheme_label(self.describe())}")
            explicit = self.resolve(spec, calibration)
        selected = explicit.selected(spec.num_layers)
        pairing = explicit.pairing(selected)
        return PositionPlan(
            layers=tuple(
                explicit.plan_layer(spec, index) if chosen else spec.layers[index]
                for index, chosen in enumerate(selected)
            ),
            base=spec.fingerprint,
            pairing=pairing,
            embedding=explicit.embedding(spec),
            scheme=canonical_json(self.describe()),
            chosen=None if explicit is self else canonical_json(explicit.describe()),
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


def rotated_layers(spec: ModelSpec, among: Sequence[int] | None = None) -> list[int]:
    """Those of the layers `among` (None: all) that the checkpoint rotates."""
    inside = range(spec.num_layers) if among is None else among
    return [index for index in inside if spec.layers[index].rotated]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.describe() if hasattr(value, "describe") else value
