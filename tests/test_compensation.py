"""Gains folded into q_proj: a runtime of its own must agree, and scores must come closer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_calibrate import lively, logits, tokens

from hf_posenc import ModelSpec, PosencError, make_scheme, patch_model
from hf_posenc.calibrate.compensation import fold_gains, query_gains


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_folding_is_multiplying_queries(family: str) -> None:
    """q_proj rows with a gain give the queries times the gain, biases included."""
    model: Any = lively(family)
    attention = model.model.layers[1].self_attn
    states = torch.randn(5, model.config.hidden_size)
    with torch.no_grad():
        before = attention.q_proj(states).unflatten(-1, (-1, attention.head_dim))
    half = attention.head_dim // 2
    gain = torch.randn(before.shape[1], half, dtype=torch.complex64)
    fold_gains(model, {1: gain})
    with torch.no_grad():
        after = attention.q_proj(states).unflatten(-1, (-1, attention.head_dim))
    wanted = torch.complex(before[..., :half], before[..., half:]) * gain
    torch.testing.assert_close(after[..., :half], wanted.real, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after[..., half:], wanted.imag, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "scheme", [{"name": "nope", "layers": [0, 2]}, {"name": "p_rope", "p": 0.5}], ids=str
)
def test_compensated_scores_are_closer(scheme: dict[str, Any]) -> None:
    model: Any = lively("llama")
    rows = tokens(model, rows=8, length=32)
    plan = make_scheme(**scheme).build(ModelSpec.from_model(model))
    stock = logits(model, rows)
    gains = query_gains(model, rows, plan)
    lossy = [i for i, layer in enumerate(plan.layers) if not all(layer.inv_freq)]
    assert sorted(gains) == lossy
    for layer, gain in gains.items():
        kept = torch.tensor(plan.layers[layer].inv_freq) != 0
        assert torch.equal(gain[:, kept], torch.ones_like(gain[:, kept]))
    assert torch.equal(logits(model, rows), stock), "finding gains changes nothing"
    plain: Any = lively("llama")
    patch_model(plain, plan)
    fold_gains(model, gains)
    patch_model(model, plan)
    worse = (logits(plain, rows) - stock).square().mean()
    better = (logits(model, rows) - stock).square().mean()
    assert better < worse


def test_a_pair_that_hardly_turns_needs_no_gain() -> None:
    """Over few tokens the slowest pairs do not move, so their gain is 1."""
    model: Any = lively("llama")
    spec = ModelSpec.from_model(model)
    scheme = make_scheme("p_rope", select=list(range(spec.num_frequencies - 1)))
    plan = scheme.build(spec)
    gains = query_gains(model, tokens(model, rows=4, length=8), plan)
    for gain in gains.values():
        assert (gain[:, -1] - 1).abs().max() < 0.02


def test_a_norm_after_q_proj_is_refused() -> None:
    model: Any = lively("qwen3")
    before = logits(model, tokens(model))
    gain = torch.full((4, 12), 2.0, dtype=torch.complex64)
    with pytest.raises(PosencError, match="normed per head"):
        fold_gains(model, {0: gain})
    assert torch.equal(logits(model, tokens(model)), before)
