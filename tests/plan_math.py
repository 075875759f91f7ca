"""A plan applied to vectors: what the runtime does to q and k, without a model."""

from __future__ import annotations

import math

import torch

from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan
from hf_posenc.runtime.rotary import PosencRotaryEmbedding


def spec_of(head_dim: int, layers: int = 1, theta: float = 1e4, **rope) -> ModelSpec:
    """The spec of a small stock Llama with one head of that width."""
    return ModelSpec.from_config(llama_config(head_dim, layers, theta, **rope))


def llama_config(head_dim: int, layers: int = 1, theta: float = 1e4, **rope):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=head_dim,
        head_dim=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=layers,
        max_position_embeddings=rope.pop("max_position_embeddings", 4096),
        rope_parameters={"rope_type": "default", "rope_theta": theta, **rope},
    )


def in_memory(layer: LayerPlan, x: torch.Tensor) -> torch.Tensor:
    """Features [..., D] in the base's order, re-ordered as the plan holds them in memory."""
    return x if layer.permutation is None else x[..., list(layer.permutation)]


def apply_layer(layer: LayerPlan, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [T, D] (base order) at integer positions [T]; the result is in memory order."""
    x = in_memory(layer, x.double())
    half = len(layer.inv_freq)
    angles = positions.double()[:, None] * torch.tensor(layer.inv_freq, dtype=torch.float64)
    cos, sin = angles.cos() * layer.rope_scale, angles.sin() * layer.rope_scale
    first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def plan_table(layer: LayerPlan, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [..., T, 2F] in float32, as the runtime's own module makes them."""
    rotary = PosencRotaryEmbedding(None, (layer,), (layer,), "half_split")
    return rotary(torch.zeros(1), positions)[0]


def plan_scores(
    layer: LayerPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
) -> torch.Tensor:
    """Scores [T, S] before the mask, q . k / sqrt(D), of [T, D] and [S, D] in base order."""
    return (
        apply_layer(layer, q, q_positions)
        @ apply_layer(layer, k, k_positions).T
        / math.sqrt(q.shape[-1])
    )
