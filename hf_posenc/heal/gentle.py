"""Gentle dropping: which tables the layers run while a plan comes in, step by step.

By "frequencies" every frequency that the plan changes moves linearly from the checkpoint's own
value to the plan's, so a pair that is to be dropped turns slower and slower. By "layers" the layers
take the plan one after another. Windows, scales, biases and feature orders are the plan's from the
first step on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_posenc.errors import PosencError
from hf_posenc.heal.sections import GentleSection
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors, PositionPlan


@dataclass(frozen=True)
class Transition:
    """The way from the checkpoint's own tables to a plan's.

    own, target    one layer each, L of them
    order          the layers whose tables differ, in the order in which they take the plan's
    by, share      as in `GentleSection`
    """

    own: tuple[LayerPlan, ...]
    target: tuple[LayerPlan, ...]
    order: tuple[int, ...]
    by: str
    share: float

    @classmethod
    def of(
        cls, plan: PositionPlan, own: tuple[LayerPlan, ...], gentle: GentleSection
    ) -> Transition:
        """The transition that a recipe asks for.

        Errors: `PosencError` when the plan changes no table, `order` does not name exactly the
        layers that it changes, or frequencies would have to move that dynamic NTK computes.
        """
        changed = [
            index
            for index, (mine, planned) in enumerate(zip(own, plan.layers, strict=True))
            if _tables(mine) != _tables(planned)
        ]
        if not changed:
            raise PosencError(
                f"heal.gentle: {plan.label} changes no frequency, so nothing can come in gently; "
                "leave heal.gentle out"
            )
        if gentle.by == "layers" and len(changed) == 1:
            raise PosencError(
                f"heal.gentle: {plan.label} changes layer {changed[0]} alone, which would take it "
                "at once; use by: frequencies, or leave heal.gentle out"
            )
        if gentle.by == "frequencies":
            _check_linear(own, plan, changed)
        return cls(own, plan.layers, _ordered(changed, gentle.order), gentle.by, gentle.share)

    def at(self, progress: float) -> tuple[LayerPlan, ...]:
        """What to run in the step that brings training to `progress` (above 0, at most 1).

        The target itself once `progress` has reached `share`.
        """
        t = progress / self.share
        if t >= 1:
            return self.target
        if self.by == "frequencies":
            pairs = zip(self.own, self.target, strict=True)
            return tuple(_between(mine, planned, t) for mine, planned in pairs)
        # Rounded first: 3 of 3 layers may come out as 3.0000000000000004.
        arrived = math.ceil(round(t * len(self.order), 9))
        waiting = self.order[arrived:]
        return tuple(
            _with_tables_of(self.own[index], planned) if index in waiting else planned
            for index, planned in enumerate(self.target)
        )


def _tables(layer: LayerPlan) -> tuple[object, ...]:
    return layer.inv_freq, layer.rope_scale, layer.stretch


def _with_tables_of(own: LayerPlan, planned: LayerPlan) -> LayerPlan:
    return replace(planned, inv_freq=own.inv_freq, rope_scale=own.rope_scale, stretch=own.stretch)


def _between(own: LayerPlan, planned: LayerPlan, t: float) -> LayerPlan:
    stretch = planned.stretch or own.stretch
    if isinstance(stretch, LongFactors):
        far = _mixed(_beyond(own), _beyond(planned), t)
        stretch = LongFactors(stretch.original_length, far)
    return replace(
        planned,
        inv_freq=_mixed(own.inv_freq, planned.inv_freq, t),
        rope_scale=_mixed((own.rope_scale,), (planned.rope_scale,), t)[0],
        stretch=stretch,
    )


def _beyond(layer: LayerPlan) -> tuple[float, ...]:
    """The frequencies of rows longer than the original length."""
    return layer.stretch.inv_freq if isinstance(layer.stretch, LongFactors) else layer.inv_freq


def _mixed(own: Sequence[float], planned: Sequence[float], t: float) -> tuple[float, ...]:
    return tuple(a if a == b else a * (1 - t) + b * t for a, b in zip(own, planned, strict=True))


def _check_linear(own: tuple[LayerPlan, ...], plan: PositionPlan, changed: Sequence[int]) -> None:
    for index in changed:
        for layer in (own[index], plan.layers[index]):
            if isinstance(layer.stretch, DynamicNTK):
                raise PosencError(
                    f"heal.gentle: layer {index} has dynamic NTK, which computes its frequencies "
                    "from theta, so they cannot move one by one; use by: layers"
                )


def _ordered(changed: Sequence[int], order: str | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(order, str):
        return tuple(changed if order == "depth" else reversed(changed))
    if sorted(order) != list(changed):
        raise PosencError(
            f"heal.gentle.order names layers {list(order)}, the plan changes layers "
            f"{list(changed)}; name exactly those, each once"
        )
    return order
