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

from hf_posenc.errors import PosencError
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors
from hf_posenc.runtime.families import TableLayout

Table = tuple[torch.Tensor, torch.Tensor]


class PlanSwitch:
    """Whether the plan is on; one object shared by a model's rotary module and hooks."""

    def __init__(self) -> None:
        self.active = True


class PosencRotaryEmbedding(nn.Module):
    """Computes every distinct (cos, sin) of a plan once per forward call.

    planned, base   the distinct layers of the plan and of the model's own encoding
    `retable` puts other planned layers in the place of these.
    Returns one (cos, sin) pair per distinct layer, each [B or 1, T, 2F] (in the family's own
    layout) and in the dtype of `x`: the plan's, then None for each of the base's, while the switch
    is on; else the other way round.

    The class name and the attributes `rope_type`, `config`, `original_inv_freq` and
    `compute_default_rope_parameters` are what transformers looks for when it restores
    non-persistent buffers after building a model on the meta device.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

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
        self.layout = layout
        self.switch = PlanSwitch()
        self._set(planned + base, len(planned), device)

    def retable(self, planned: tuple[LayerPlan, ...]) -> None:
        """Compute the tables of `planned` instead of the plan's; the base's stay."""
        base = self.kinds[self.num_planned :]
        self._set(planned + base, len(planned), self.inv_freq.device)

    def _set(
        self, kinds: tuple[LayerPlan, ...], num_planned: int, device: torch.device | None
    ) -> None:
        self.kinds = kinds
        self.num_planned = num_planned
        # Row of the buffers that holds a LongRoPE layer's second table, behind the K first ones.
        stretched = [
            i for i, kind in enumerate(self.kinds) if isinstance(kind.stretch, LongFactors)
        ]
        self.long_row = {index: len(self.kinds) + n for n, index in enumerate(stretched)}
        self._fill(device)

    def compute_default_rope_parameters(
        self, config: Any = None, **_: Any
    ) -> tuple[torch.Tensor, float]:
        """All frequencies, one row of F per table, float32; and transformers' unused factor."""
        long = [
            kind.stretch.inv_freq for kind in self.kinds if isinstance(kind.stretch, LongFactors)
        ]
        rows = [kind.inv_freq for kind in self.kinds] + long
        return torch.tensor(rows, dtype=torch.float32), 1.0

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[Table | None, ...]:
        active = self.switch.active
        return tuple(
            self._table(index, x, position_ids) if (index < self.num_planned) == active else None
            for index in range(len(self.kinds))
        )

    def _table(self, index: int, x: torch.Tensor, position_ids: torch.Tensor) -> Table:
        kind = self.kinds[index]
        if not kind.rotated and kind.stretch is None:
            return self._unrotated(kind, x, position_ids)
        inv_freq = self._stretched(index, position_ids).to(device=x.device, dtype=torch.float32)
        angles = position_ids[..., None].float() * inv_freq
        if self.layout == "half_split":
            angles = torch.cat((angles, angles), dim=-1)
        elif self.layout == "interleaved":
            angles = torch.repeat_interleave(angles, 2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if kind.rope_scale != 1.0:
            cos, sin = cos * kind.rope_scale, sin * kind.rope_scale
        return cos.to(x.dtype), sin.to(x.dtype)

    def _unrotated(self, kind: LayerPlan, x: torch.Tensor, position_ids: torch.Tensor) -> Table:
        width = len(kind.inv_freq) * (1 if self.layout == "half_width" else 2)
        shape = (*position_ids.shape, width)
        cos = torch.full(shape, kind.rope_scale, dtype=torch.float32, device=x.device)
        return cos.to(x.dtype), torch.zeros(shape, dtype=x.dtype, device=x.device)

    def _stretched(self, index: int, position_ids: torch.Tensor) -> torch.Tensor:
        # Depends on this call's positions alone: unlike stock dynamic NTK, which keeps the
        # longest row seen so far, an earlier call never changes a later one.
        stretch, inv_freq = self.kinds[index].stretch, self.inv_freq[index]
        if stretch is None:
            return inv_freq
        length = torch.max(position_ids) + 1
        if isinstance(stretch, LongFactors):
            long = self.inv_freq[self.long_row[index]]
            return torch.where(length > stretch.original_length, long, inv_freq)
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
        self.inv_freq = nn.Buffer(table.to(device), persistent=False)
        self.original_inv_freq = nn.Buffer(table.to(device, copy=True), persistent=False)

    def extra_repr(self) -> str:
        return f"tables={self.num_planned}, frequencies={len(self.kinds[0].inv_freq)}"


class PickTable:
    """Forward pre-hook of one attention module: keeps the (cos, sin) of its own layer.

    planned, base   where its two tables lie in what the rotary module returns
    Errors: `PosencError` when a checkpointed layer is computed again on the other side of an
    `unpatched` block than it first ran on: its gradients would be those of another model.
    """

    def __init__(self, switch: PlanSwitch, planned: int, base: int) -> None:
        self.switch, self.planned, self.base = switch, planned, base

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        table = kwargs["position_embeddings"][self.planned if self.switch.active else self.base]
        if table is None:
            raise PosencError(
                "the backward pass of a checkpointed forward must run on the same side of the "
                "unpatched(model) block as the forward did; call backward() inside the block"
            )
        return args, {**kwargs, "position_embeddings": table}


def _dynamic_ntk(stretch: DynamicNTK, inv_freq: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    # Step for step as transformers' dynamic NTK, so that tables come out bit for bit.
    dim = 2 * inv_freq.shape[-1]
    original = stretch.original_length
    length = torch.maximum(length, torch.full_like(length, original))
    growth = (stretch.factor * length / original) - (stretch.factor - 1)
    theta = stretch.theta * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=inv_freq.device).float() / dim
    return torch.where(inv_freq == 0, 0.0, 1.0 / theta**exponents)
