"""Tiny random decoders whose weights leave a forgotten permutation or table nowhere to hide.

Freshly initialised models have zero q/k biases, all-one q/k norms and near-uniform attention:
everything passes on them. Here biases and norms are random and q/k rows are scaled up until
attention is sharp. Heads are grouped (4 query, 2 kv heads), and some families have a head_dim
that is not hidden_size / heads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

VOCAB = 128
MAX_POSITIONS = 256  # short, so that rows beyond the trained length are cheap
THETA = 5e5

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# The shape each family adds to _SHAPE; head_dim 16 is hidden_size / heads, 24 and 32 are not.
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {"head_dim": 32, **_MOE},
    "smollm3": {},
    # Not on the tested list: they go through the identity self-check.
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "phi3": {},
    "olmo2": {},
    "stablelm": {"partial_rotary_factor": 1.0},
    "cohere": {},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "ernie4_5": {"head_dim": 16, "use_bias": False},
    "glm4_moe": {"head_dim": 16, "first_k_dense_replace": 4, "use_qk_norm": False},
}
# Position ids that a table, cache or interpolation bug cannot survive; asked for in float32.
HARD_POSITIONS: tuple[int, ...] = (
    *(0, 1, 2, 7, 19, 63, 130),
    *(255, 256, 257, 1023, 4095, 8191, 8192),
    *(31_337, 65_535, 65_536, 90_001, 99_989, 99_990, 99_999, 100_000),
)


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The config of a tiny model; `rope_parameters` may be given without its theta."""
    values = {**_SHAPE, **FAMILY_SHAPES[family], **overrides}
    rope = {"rope_type": "default", "rope_theta": THETA, **values.pop("rope_parameters", {})}
    partial = values.pop("partial_rotary_factor", None)
    if partial is not None:
        rope["partial_rotary_factor"] = partial
    return AutoConfig.for_model(family, rope_parameters=rope, **values)


def tiny_model(
    family: str, *, attn: str = "eager", seed: int = 0, scale: float = 14.0, **overrides: Any
) -> Any:
    """A tiny causal LM in eval mode with hard weights; the same arguments give the same weights."""
    return build(tiny_config(family, **overrides), attn=attn, seed=seed, scale=scale)


def build(
    config: PreTrainedConfig, *, attn: str = "eager", seed: int = 0, scale: float = 14.0
) -> Any:
    """A model of `config` with hard weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn)
        harden(model, scale)
    return model.float().eval()


@torch.no_grad()
def harden(model: nn.Module, scale: float = 14.0) -> None:
    """Random biases and norms, and q/k rows large enough that attention is sharp."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.uniform_(0.5, 2.5)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
            parameter.mul_(scale)
        elif parameter.ndim >= 2:
            parameter.mul_(3.0)


def rebuilt(
    config: PreTrainedConfig, weights: Mapping[str, torch.Tensor], *, attn: str = "eager"
) -> Any:
    """A stock model of `config` holding exactly `weights`; missing or unknown names are errors."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn)
    model.load_state_dict(dict(weights), strict=True)
    return model.float().eval()


def with_rope(config: PreTrainedConfig, **rope_parameters: Any) -> PreTrainedConfig:
    """A copy of a config with other rope parameters, theta kept unless it is given."""
    changed = copy.deepcopy(config)
    theta = config.rope_parameters["rope_theta"]
    changed.rope_parameters = {"rope_theta": theta, **rope_parameters}
    return changed


def tokens(rows: int, length: int, *, seed: int = 1) -> torch.Tensor:
    """Random token ids [rows, length] without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


@torch.no_grad()
def logits(
    model: nn.Module,
    ids: torch.Tensor | None = None,
    positions: Sequence[int] | None = HARD_POSITIONS,
    **inputs: Any,
) -> torch.Tensor:
    """Logits of one forward call [B, T, V]; by default two rows at HARD_POSITIONS.

    An explicit mask goes with explicit positions: without one transformers reads a jump of the
    positions as the start of another packed document.
    """
    if ids is None:
        ids = tokens(2, len(HARD_POSITIONS) if positions is None else len(positions))
    if positions is not None:
        inputs.setdefault("position_ids", torch.tensor([list(positions)]).expand(len(ids), -1))
        inputs.setdefault("attention_mask", torch.ones_like(ids))
    result: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return result


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference."""
    return (a.double() - b.double()).abs().max().item()


@torch.no_grad()
def layer_tables(
    model: nn.Module, positions: Sequence[int] = HARD_POSITIONS
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (cos, sin) [1, T, D] that every attention module is really handed, in layer order."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(tuple(table[:1].clone() for table in kwargs["position_embeddings"]))

    decoder = next(m for m in model.modules() if hasattr(m, "rotary_emb") and hasattr(m, "layers"))
    handles = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
        for layer in decoder.layers
    ]
    try:
        logits(model, tokens(1, len(positions)), positions)
    finally:
        for handle in handles:
            handle.remove()
    return seen
