"""The rotary module of a converted model, and the hook that hands each layer its table.

Conventions: see the head of `hf_posenc/plan.py`. Angles are computed in float32 and cast last; a
pair that is not rotated gets cos 1, sin 0 at full table width, so that the family's own
`apply_rotary_pos_emb` (and any kernel put in its place) stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors
from hf_posenc.runtime.families import TableLayout

Table = tuple[torch.Tensor, torch.Tensor]
_BUFFERS = ("inv_freq", "original_inv_freq", "long_inv_freq")


class PlanSwitch:
    """Whether the plan is on; one object shared by a model's rotary module and hooks."""

    def __init__(self) -> None:
        self.active = True


class PosencRotaryEmbedding(nn.Module):
    """Computes every distinct (cos, sin) of a plan once per forward call.

    planned, base   the distinct layers of the plan and of the model's own encoding
    Returns a tuple with one (cos, sin) pair per distinct layer, each [B or 1, T, 2F] (in the
    family's own layout) and in the dtype of `x`: the plan's while the switch is on, else the base's.

    The class name and the attributes `rope_type`, `config`, `original_inv_freq` and
    `compute_default_rope_parameters` are what transformers looks for when it restores
    non-persistent buffers after building a model on the meta device.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor
    long_inv_freq: torch.Tensor

    def __init__(
        self,
        config: Any,
        planned: tuple[LayerPlan, ...],
        base: tuple[LayerPlan, ...],
        layout: TableLayout,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.rope_type = "default"
        self.kinds = planned + base
        self.num_planned = len(planned)
        self.layout = layout
        self.switch = PlanSwitch()
        self._fill(device)

    def compute_default_rope_parameters(
        self, config: Any = None, **_: Any
    ) -> tuple[torch.Tensor, float]:
        """All frequencies, [K, F] float32, and transformers' unused scaling factor."""
        return torch.tensor([kind.inv_freq for kind in self.kinds], dtype=torch.float32), 1.0

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[Table, ...]:
        first, last = (0, self.num_planned) if self.switch.active else (self.num_planned, None)
        return tuple(
            self._table(index, x, position_ids)
            for index in range(len(self.kinds))[first:last]
        )

    def _table(self, index: int, x: torch.Tensor, position_ids: torch.Tensor) -> Table:
        kind = self.kinds[index]
        inv_freq = self._stretched(index, position_ids).to(device=x.device, dtype=torch.float32)
        angles = position_ids[..., None].float() * inv_freq
        if self.layout == "half_split":
            angles = torch.cat((angles, angles), dim=-1)
        elif self.layout == "interleaved":
            angles = torch.repeat_interleave(angles, 2, dim=-1)
        cos, sin = angles.cos() * kind.rope_scale, angles.sin() * kind.rope_scale
        return cos.to(x.dtype), sin.to(x.dtype)

    def _stretched(self, index: int, position_ids: torch.Tensor) -> torch.Tensor:
        # Depends on this call's positions alone: unlike stock dynamic NTK, which keeps the
        # longest row seen so far, an earlier call never changes a later one.
        stretch, inv_freq = self.kinds[index].stretch, self.inv_freq[index]
        if stretch is None:
            return inv_freq
        length = torch.max(position_ids) + 1
        if isinstance(stretch, LongFactors):
            return torch.where(
                length > stretch.original_length, self.long_inv_freq[index], inv_freq
            )
        return torch.where(
            length > stretch.original_length, _dynamic_ntk(stretch, inv_freq, length), inv_freq
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PosencRotaryEmbedding:
        # .to(bfloat16), .half() and device maps must move the frequencies, never round them.
        super()._apply(fn, recurse)
        rounded = self.inv_freq.dtype != torch.float32
        if rounded and self.inv_freq.device.type != "meta":
            self._fill(self.inv_freq.device)
        return self

    def _fill(self, device: torch.device | None) -> None:
        table, _ = self.compute_default_rope_parameters()
        long = [
            kind.stretch.inv_freq if isinstance(kind.stretch, LongFactors) else kind.inv_freq
            for kind in self.kinds
        ]
        values = (table, table.clone(), torch.tensor(long, dtype=torch.float32))
        for name, value in zip(_BUFFERS, values, strict=True):
            setattr(self, name, nn.Buffer(value.to(device), persistent=False))

    def extra_repr(self) -> str:
        return f"tables={self.num_planned}, frequencies={len(self.kinds[0].inv_freq)}"


class PickTable:
    """Forward pre-hook of one attention module: keeps the (cos, sin) of its own layer."""

    def __init__(self, switch: PlanSwitch, planned: int, base: int) -> None:
        self.switch, self.planned, self.base = switch, planned, base

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = self.planned if self.switch.active else self.base
        return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][index]}


def _dynamic_ntk(stretch: DynamicNTK, inv_freq: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    # Step for step as transformers' dynamic NTK, so that tables come out bit for bit.
    dim = 2 * inv_freq.shape[-1]
    original = stretch.original_length
    length = torch.maximum(length, torch.full_like(length, original))
    growth = (stretch.factor * length / original) - (stretch.factor - 1)
    theta = stretch.theta * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=inv_freq.device).float() / dim
    return torch.where(inv_freq == 0, 0.0, 1.0 / theta**exponents)
