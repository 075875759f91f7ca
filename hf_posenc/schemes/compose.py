"""`compose`: another scheme for each group of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import Embedding
from hf_posenc.plan import LayerPlan, Pairing
from hf_posenc.schedule import Schedule, auto_layers, check_schedule, select_layers
from hf_posenc.schemes.base import Scheme, rotated_layers

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration

_KEYS = ("layers", "scheme")


@dataclass(frozen=True, kw_only=True)
class Group:
    """The layers of a group and the scheme that plans them."""

    layers: Schedule
    scheme: Scheme

    @classmethod
    def parse(cls, value: object) -> Group:
        """From a Group or {"layers": schedule, "scheme": name | description | Scheme}."""
        from hf_posenc.schemes import as_scheme  # the registry lists this file

        if isinstance(value, Group):
            return value
        if not isinstance(value, Mapping):
            raise PosencError(f"group {value!r} must be a mapping with 'layers' and 'scheme'")
        for key in value:
            if key not in _KEYS:
                raise PosencError(f"a group has no {key!r}; {did_you_mean(str(key), _KEYS)}")
        for key in _KEYS:
            if key not in value:
                raise PosencError(f"group {dict(value)!r} lacks {key!r}")
        return cls(layers=check_schedule(value["layers"]), scheme=as_scheme(value["scheme"]))

    def planned(self, num_layers: int) -> tuple[bool, ...]:
        """The layers of this group that its scheme plans; PosencError when there are none."""
        members = select_layers(self.layers, num_layers)
        both = _both(members, self.scheme.selected(num_layers))
        if not any(both):
            raise PosencError(
                f"scheme {self.scheme.name!r} plans none of the layers {self.layers!r} of its group"
            )
        return both

    @property
    def needs_calibration(self) -> bool:
        """Whether its layers, or layers or pairs of its scheme, are left to a calibration."""
        return auto_layers(self.layers) is not None or self.scheme.needs_calibration

    def resolve(
        self, spec: ModelSpec, calibration: Calibration, among: Sequence[int] | None
    ) -> Group:
        """The group with its choices written out; its scheme chooses among its layers."""
        layers = self.layers
        if (wanted := auto_layers(layers)) is not None:
            inside = rotated_layers(spec, among)
            layers = calibration.harmless_layers(wanted.count, wanted.by, layers=inside)
        members = _numbers(select_layers(layers, spec.num_layers), among)
        return Group(layers=layers, scheme=self.scheme.resolve(spec, calibration, members))

    def describe(self) -> dict[str, Any]:
        """The mapping that `parse` reads, in plain JSON values."""
        layers = self.layers if isinstance(self.layers, str) else list(self.layers)
        return {"layers": layers, "scheme": self.scheme.describe()}


@dataclass(frozen=True, kw_only=True)
class Compose(Scheme):
    """Schemes side by side: each plans the layers of its group, the rest stay as they are.

    groups  [{"layers": "0-3", "scheme": {"name": "p_rope", "p": 0.5}}, ...]; no layer may lie in
            two groups. A scheme sees the whole model (every=4 still means layers 3, 7, ...) and
            what it plans is used in the layers of its group.
    What a group leaves to a calibration is chosen among the layers of the group; layers "auto:N"
    among those that no other group holds, the first group first.
    How pairs are stored belongs to the whole checkpoint: `interleaved(preserve=True)` is refused
    unless its group holds every layer.
    Source: this project; mixed layers as in Gemma 4 and in SWAN-GPT, arXiv 2504.08719.
    """

    name: ClassVar[str] = "compose"
    source: ClassVar[str] = "another scheme per layer group, as Gemma 4 and SWAN-GPT mix them"

    groups: Sequence[Group]

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.groups
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PosencError(f"groups={given!r} must be a list of groups")
        if not given:
            raise PosencError("groups=[] composes nothing; give at least one group")
        object.__setattr__(self, "groups", tuple(Group.parse(group) for group in given))

    @property
    def needs_calibration(self) -> bool:
        return super().needs_calibration or any(group.needs_calibration for group in self.groups)

    def resolve(
        self, spec: ModelSpec, calibration: Calibration, among: Sequence[int] | None = None
    ) -> Self:
        if auto_layers(self.layers) is not None:
            groups = self._resolved(spec, calibration, among)
            held = [select_layers(group.layers, spec.num_layers) for group in groups]
            inside = _numbers(tuple(map(any, zip(*held, strict=True))), among)
            return super(Compose, replace(self, groups=groups)).resolve(spec, calibration, inside)
        inside = _numbers(super().selected(spec.num_layers), among)
        groups = self._resolved(spec, calibration, inside)
        return replace(self, groups=groups)

    def _resolved(
        self, spec: ModelSpec, calibration: Calibration, among: Sequence[int] | None
    ) -> list[Group]:
        """The groups in order; a layer that another one holds is not left to a calibration."""
        count = spec.num_layers
        fixed = [group for group in self.groups if auto_layers(group.layers) is None]
        taken = {i for g in fixed for i in _numbers(select_layers(g.layers, count), among)}
        groups = []
        for group in self.groups:
            inside = among
            if auto_layers(group.layers) is not None:
                free = range(count) if among is None else among
                inside = [i for i in free if i not in taken]
            groups.append(group.resolve(spec, calibration, inside))
            taken.update(_numbers(select_layers(groups[-1].layers, count), among))
        return groups

    def selected(self, num_layers: int) -> tuple[bool, ...]:
        owners = [owner is not None for owner in self._owners(num_layers)]
        chosen = _both(super().selected(num_layers), owners)
        if not any(chosen):
            raise PosencError(f"layers={self.layers!r} holds no layer that a group plans")
        return chosen

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        owner = self._owners(spec.num_layers)[index]
        assert owner is not None, "only selected layers are planned"
        return owner.scheme.plan_layer(spec, index)

    def pairing(self, selected: tuple[bool, ...]) -> Pairing:
        found = {
            group.scheme.pairing(_both(selected, group.planned(len(selected))))
            for group in self.groups
        }
        return "interleaved" if found == {"interleaved"} else "half_split"

    def embedding(self, spec: ModelSpec) -> Embedding | None:
        found = [group.scheme.embedding(spec) for group in self.groups]
        added = [part for part in found if part is not None]
        if len(added) > 1:
            raise PosencError(
                "two groups add vectors to the token embeddings, which happens once for the whole "
                "model; keep one of them"
            )
        return added[0] if added else None

    def _owners(self, num_layers: int) -> tuple[Group | None, ...]:
        members = [select_layers(group.layers, num_layers) for group in self.groups]
        for index in range(num_layers):
            holders = [n for n, inside in enumerate(members) if inside[index]]
            if len(holders) > 1:
                first, second = (self.groups[n].layers for n in holders[:2])
                raise PosencError(
                    f"layer {index} lies in two groups, layers={first!r} and layers={second!r}; "
                    "groups must not overlap"
                )
        planned = [group.planned(num_layers) for group in self.groups]
        return tuple(
            next((g for g, inside in zip(self.groups, planned, strict=True) if inside[index]), None)
            for index in range(num_layers)
        )


def _numbers(inside: Sequence[bool], among: Sequence[int] | None) -> list[int]:
    return [i for i, chosen in enumerate(inside) if chosen and (among is None or i in among)]


def _both(first: Sequence[bool], second: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(a and b for a, b in zip(first, second, strict=True))
