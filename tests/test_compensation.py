"""Gains folded into queries: a runtime of its own must agree, and scores must come closer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_calibrate import lively, logits, tokens
from transformers import AutoModelForCausalLM
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_posenc import (
    ModelSpec,
    PosencError,
    get_plan,
    load_model,
    make_scheme,
    patch_model,
    unpatch_model,
    unpatched,
)
from hf_posenc.calibration import compensation
from hf_posenc.calibration.compensation import compensate, fold_gains, query_gains
from hf_posenc.checkpoint.native import export_native
from hf_posenc.runtime.gains import norm_offset

# One weight for all heads, and one per head.
NORMED = ("qwen3", "olmo2")


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


@pytest.mark.parametrize("family", NORMED)
def test_folding_into_a_norm_is_multiplying_queries(family: str) -> None:
    """q_norm with a gain gives the queries times the gain, one per feature, shared or per head."""
    model: Any = lively(family)
    attention = model.model.layers[1].self_attn
    spec = ModelSpec.from_model(model)
    states = torch.randn(5, model.config.hidden_size)

    def queries() -> torch.Tensor:
        projected = attention.q_proj(states)
        if attention.q_norm.weight.numel() == spec.head_dim:
            projected = projected.unflatten(-1, (spec.num_heads, spec.head_dim))
        with torch.no_grad():
            return attention.q_norm(projected).reshape(5, spec.num_heads, spec.head_dim)

    before = queries()
    gain = torch.randn(attention.q_norm.weight.numel() // spec.head_dim, spec.head_dim)
    fold_gains(model, {1: gain})
    torch.testing.assert_close(queries(), before * gain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "scheme", [{"name": "nope", "layers": [0, 2]}, {"name": "p_rope", "p": 0.5}], ids=str
)
@pytest.mark.parametrize("family", ["llama", *NORMED])
def test_compensated_scores_are_closer(family: str, scheme: dict[str, Any]) -> None:
    model: Any = lively(family)
    rows = tokens(model, rows=8, length=32)
    plan = make_scheme(**scheme).build(ModelSpec.from_model(model))
    stock = logits(model, rows)
    gains = query_gains(model, rows, plan)
    lossy = [i for i, layer in enumerate(plan.layers) if not all(layer.inv_freq)]
    assert sorted(gains) == lossy
    for layer, gain in gains.items():
        kept = torch.tensor(plan.layers[layer].inv_freq) != 0
        kept = kept if gain.is_complex() else kept.repeat(2)
        assert torch.equal(gain[:, kept], torch.ones_like(gain[:, kept]))
        assert not torch.equal(gain, torch.ones_like(gain))
    assert torch.equal(logits(model, rows), stock), "finding gains changes nothing"
    plain: Any = lively(family)
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


def biased_norm() -> Any:
    """Queries that go through a norm with a bias, which a gain would have to scale as well."""
    model: Any = lively("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(layer.self_attn.head_dim)
    return model


def hidden_norm() -> Any:
    """A family that norms queries under a name nobody here knows."""
    model: Any = lively("llama")
    for layer in model.model.layers:
        layer.self_attn.query_layernorm = torch.nn.RMSNorm(layer.self_attn.head_dim)
    return model


def compensated(family: str, scheme: dict[str, Any]) -> Any:
    model: Any = patch_model(lively(family), scheme)
    return compensate(model, tokens(model, rows=8, length=32))


SOME = {"name": "nope_interleaved", "every": 2}


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", *NORMED])
def test_the_base_is_still_there_bit_for_bit(family: str) -> None:
    stock: Any = lively(family)
    rows = tokens(stock)
    wanted = logits(stock, rows)
    model = compensated(family, SOME)
    converted = logits(model, rows)
    plain = patch_model(lively(family), SOME)
    assert not torch.equal(converted, logits(plain, rows)), "the gains must do something"
    with unpatched(model):
        assert torch.equal(logits(model, rows), wanted)
    assert torch.equal(logits(model, rows), converted)
    twin = copy.deepcopy(model)
    unpatch_model(model)
    assert torch.equal(logits(model, rows), wanted)
    _check_equal_weights(model, lively(family))
    assert torch.equal(logits(twin, rows), converted)


@pytest.mark.parametrize("family", ["qwen2", *NORMED])
def test_a_checkpoint_carries_gains_and_base(family: str, tmp_path: Path) -> None:
    """Weights are equal bit for bit; where they lie in memory moves a product by its last bits."""
    model = compensated(family, SOME)
    rows = tokens(model)
    model.save_pretrained(tmp_path / "converted")
    loaded = load_model(tmp_path / "converted")
    assert get_plan(loaded) == get_plan(model)
    _check_equal_weights(loaded, model)
    torch.testing.assert_close(logits(loaded, rows), logits(model, rows), atol=1e-4, rtol=0)
    unpatch_model(loaded)
    _check_equal_weights(loaded, lively(family))


def _check_equal_weights(model: Any, other: Any) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_an_adapter_learns_on_the_gains_and_its_teacher_has_none() -> None:
    model = compensated("llama", SOME)
    rows = tokens(model)
    with unpatched(model):
        stock = logits(model, rows)
    converted = logits(model, rows)
    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    healing: Any = get_peft_model(model, lora)
    assert torch.equal(logits(healing, rows), converted)
    with unpatched(healing), healing.disable_adapter():
        assert torch.equal(logits(healing, rows), stock)
    healing(input_ids=rows, labels=rows).loss.backward()
    trained = [name for name, weight in healing.named_parameters() if weight.grad is not None]
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("scheme", [SOME, {"name": "p_rope", "p": 0.5}], ids=str)
def test_an_export_has_the_gains_in_its_weights(scheme: dict[str, Any], tmp_path: Path) -> None:
    model = compensated("llama", scheme)
    rows = tokens(model)
    export_native(model, tmp_path / "native")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert not hasattr(stock.config, "posenc")
    torch.testing.assert_close(logits(stock.eval(), rows), logits(model, rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lively("llama"), "not patched"),
        (lambda: patch_model(lively("llama"), "rope"), "drops no pair"),
        (lambda: patch_model(lively("llama"), "partial", pairs="raw"), "re-orders features"),
        (lambda: patch_model(biased_norm(), "nope", layers=[1]), "not a weight times"),
        (lambda: patch_model(lively("phi3"), "nope", layers=[1]), "has no q_proj"),
        (lambda: patch_model(hidden_norm(), "nope", layers=[1]), "does not know whether"),
        (lambda: compensated("llama", SOME), "compensated already"),
        (lambda: patch_model(lively("llama"), "rnope_swa", window=8), "more than which pairs"),
        (lambda: patch_model(lively("llama"), "dual", every=2, p_global=0.5), "more than which"),
        (lambda: patch_model(lively("gemma2"), "nope", layers=[0]), "cannot be probed"),
    ],
)
def test_bad_input_is_one_clear_line(make: Any, message: str) -> None:
    model = make()
    before = logits(model, tokens(model))
    with pytest.raises(PosencError, match=message) as error:
        compensate(model, tokens(model))
    assert "\n" not in str(error.value)
    assert torch.equal(logits(model, tokens(model)), before)


def test_gains_that_do_not_help_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = patch_model(lively("llama"), SOME)
    rows = tokens(model)
    before = logits(model, rows)
    bad = torch.full((4, 8), -9.0, dtype=torch.complex64)
    monkeypatch.setattr(compensation, "query_gains", lambda *_, **__: {1: bad, 3: bad})
    with pytest.raises(PosencError, match="left without"):
        compensate(model, rows)
    assert torch.equal(logits(model, rows), before)
    plan = get_plan(model)
    assert plan is not None and not plan.gained


def test_a_plan_cannot_bring_gains_to_another_model() -> None:
    plan = get_plan(compensated("llama", SOME))
    assert plan is not None and plan.gained
    fresh: Any = patch_model(lively("llama"), plan)
    found = get_plan(fresh)
    assert found is not None and not found.gained
    compensate(fresh, tokens(fresh, rows=8, length=32))


def test_modes_and_gradients_are_as_before() -> None:
    model: Any = patch_model(lively("llama"), SOME)
    model.train()
    model.model.layers[1].eval()
    model.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        compensate(model, tokens(model, rows=8, length=32))
    kept = [m.training for n, m in model.named_modules() if "stock_query" not in n]
    assert kept == modes
    found = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert found == trainable


def test_a_dead_head_is_no_obstacle() -> None:
    model: Any = lively("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:16] = 0
    patch_model(model, SOME)
    compensate(model, tokens(model, rows=8, length=32))
    assert torch.isfinite(model.model.layers[1].self_attn.q_proj.weight).all()


def test_the_offset_of_a_norm_is_measured() -> None:
    """Gemma's norms multiply by one more than their weight."""
    assert norm_offset(GemmaRMSNorm(8)) == 1
    assert norm_offset(Qwen3RMSNorm(8)) == 0
    assert norm_offset(CohereLayerNorm((2, 4))) == 0
