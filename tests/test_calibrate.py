"""What `calibrate` measures, against the definitions computed another way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from tiny_runs import save_texts
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor
from torch.nn import functional

from hf_posenc import ModelSpec, PosencError, patch_model, unpatch_model
from hf_posenc.calibration import Calibration, calibrate, calibration_rows, plan_search
from hf_posenc.calibration.gradients import Gates
from hf_posenc.calibration.probe import Seen, probing

# Families by what differs between them: plain, q/k norm, sliding window, neighbours as pairs.
FAMILIES = ("llama", "qwen3", "mistral", "cohere", "glm")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return lively(request.param)


def lively(family: str) -> Any:
    """A tiny model whose attention is far from uniform."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.25, generator=generator)
            elif "norm" not in name:
                weight.normal_(0, 0.1, generator=generator)
    return model.float().eval()


def tokens(model: Any, rows: int = 3, length: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def logits(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows, use_cache=False).logits


def gated(model: Any, rows: Tensor, gate: float, layer: int | None = None) -> Tensor:
    """Logits with the gates of one layer, or of all, at `gate`."""
    spec = ModelSpec.from_model(model)
    gates = Gates(spec.num_layers, len(rows), spec.num_frequencies, torch.device("cpu"))
    with torch.no_grad():
        gates.values[slice(None) if layer is None else layer] = gate
    with probing(model, gates.attend):
        return logits(model, rows)


def test_open_gates_are_the_model_and_shut_gates_are_nope(model: Any) -> None:
    rows = tokens(model)
    stock = logits(model, rows)
    torch.testing.assert_close(gated(model, rows, 1.0), stock, atol=2e-5, rtol=1e-5)
    shut = gated(model, rows, 0.0)
    patch_model(model, "nope")
    nope = logits(model, rows)
    unpatch_model(model)
    torch.testing.assert_close(shut, nope, atol=2e-5, rtol=1e-5)
    assert (stock - nope).abs().max() > 1e-2, "dropping rotation must show for this test to mean it"


def test_the_model_is_left_as_it_was(model: Any) -> None:
    rows = tokens(model)
    before, implementation = logits(model, rows), model.config._attn_implementation
    model.train()
    first = calibrate(model, rows)
    assert model.training
    model.eval()
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, rows), before)
    again = calibrate(model, rows)
    assert (again.layers, again.pairs, again.heads) == (first.layers, first.pairs, first.heads)


def test_sensitivity_is_the_kl_to_second_order() -> None:
    model = lively("llama")
    rows = tokens(model, rows=64, length=12)
    measured = calibrate(model, rows, statistics=["sensitivity"]).layers["sensitivity"]
    goal = logits(model, rows).double().log_softmax(-1)
    step = 0.05
    for layer, value in enumerate(measured):
        moved = gated(model, rows, 1 - step, layer).double().log_softmax(-1)
        kl = (goal.exp() * (goal - moved)).sum(-1).mean().item()
        # 64 rows drawn once: the estimate has a relative standard error of about sqrt(2 / 64).
        assert value == pytest.approx(kl / step**2, rel=0.5)


def test_sensitivity_of_pairs_is_that_of_one_gate() -> None:
    model = lively("llama")
    spec = ModelSpec.from_model(model)
    rows = tokens(model, rows=64, length=12)
    measured = calibrate(model, rows, statistics=["sensitivity"]).pairs["sensitivity"]
    goal = logits(model, rows).double().log_softmax(-1)
    step, layer = 0.1, 1
    for pair in range(spec.num_frequencies):
        gates = Gates(spec.num_layers, len(rows), spec.num_frequencies, torch.device("cpu"))
        with torch.no_grad():
            gates.values[layer, :, pair] = 1 - step
        with probing(model, gates.attend):
            moved = logits(model, rows).double().log_softmax(-1)
        kl = (goal.exp() * (goal - moved)).sum(-1).mean().item()
        if kl > 1e-9:
            assert measured[layer][pair] == pytest.approx(kl / step**2, rel=0.6)


def test_norm_is_the_product_of_mean_norms() -> None:
    model = lively("llama")
    rows = tokens(model)
    found = calibrate(model, rows, statistics=["norm"])
    attention = model.model.layers[0].self_attn
    width, kept = attention.head_dim, {}
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: kept.update(kwargs), with_kwargs=True
    )
    logits(model, rows)
    hook.remove()
    with torch.no_grad():
        states = kept["hidden_states"].double()
        query = functional.linear(states, attention.q_proj.weight.double()).unflatten(
            -1, (-1, width)
        )
        key = functional.linear(states, attention.k_proj.weight.double()).unflatten(-1, (-1, width))
    groups = query.shape[2] // key.shape[2]
    for head in range(query.shape[2]):
        for pair in range(width // 2):
            ends = [pair, pair + width // 2]
            q = query[:, :, head, ends].norm(dim=-1).mean()
            k = key[:, :, head // groups, ends].norm(dim=-1).mean()
            assert found.heads["norm"][0][head][pair] == pytest.approx((q * k).item(), rel=1e-5)
    mean = sum(row[2] for row in found.heads["norm"][0]) / query.shape[2]
    assert found.pairs["norm"][0][2] == pytest.approx(mean)


def test_score_is_the_variance_of_the_change_under_attention() -> None:
    model = lively("llama")
    rows = tokens(model, rows=2, length=16)  # every query of so short a row is looked at
    found = calibrate(model, rows, statistics=["score"])
    seen: list[Seen] = []

    def attend(now: Seen) -> Tensor:
        seen.append(now)
        return functional.scaled_dot_product_attention(
            now.query, now.key, now.value, is_causal=True, scale=now.scaling, enable_gqa=True
        )

    with probing(model, attend):
        logits(model, rows)
    for layer, now in enumerate(seen):
        per_pair = [0.0] * now.features.count
        whole, two_pairs, count = 0.0, 0.0, 0
        heads, groups = now.query.shape[1], now.key.shape[1]
        for batch in range(2):
            for head in range(heads):
                group = head * groups // heads
                for place in range(16):
                    keys = now.key[batch, group, : place + 1].double()
                    query = now.query[batch, head, place].double()
                    weight = (keys @ query * now.scaling).softmax(0)
                    still = now.still_key[batch, group, : place + 1].double()
                    change = still * now.still_query[batch, head, place].double() - keys * query
                    one, two = now.features.split(change)
                    change = (one + two) * now.scaling
                    for pair in range(now.features.count):
                        per_pair[pair] += _half_variance(weight, change[:, pair])
                    whole += _half_variance(weight, change.sum(-1))
                    two_pairs += _half_variance(weight, change[:, [1, 4]].sum(-1))
                    count += 1
        for pair, value in enumerate(per_pair):
            wanted = value / count
            assert found.pairs["score"][layer][pair] == pytest.approx(wanted, rel=1e-3, abs=1e-7)
        assert found.layers["score"][layer] == pytest.approx(whole / count, rel=1e-3)
        joint = torch.tensor(found.joint["score"][layer])[[1, 4]][:, [1, 4]].sum().item()
        assert joint == pytest.approx(two_pairs / count, rel=1e-3)


def _half_variance(weight: Tensor, change: Tensor) -> float:
    mean = (weight * change).sum()
    return ((weight * (change - mean).square()).sum() / 2).item()


def test_ablation_is_the_kl_of_the_patched_model(model: Any) -> None:
    rows = tokens(model)
    found = calibrate(model, rows, statistics=["ablation"]).layers["ablation"]
    goal = logits(model, rows).double().log_softmax(-1)
    for layer, value in enumerate(found):
        patch_model(model, "nope", layers=[layer])
        other = logits(model, rows).double().log_softmax(-1)
        unpatch_model(model)
        kl = (goal.exp() * (goal - other)).sum(-1).mean().item()
        assert value == pytest.approx(kl, rel=1e-3, abs=1e-6)


def test_a_layer_that_is_not_rotated_cannot_lose_anything() -> None:
    model = tiny_model("smollm3")
    found = calibrate(model, tokens(model))
    rotated = [layer.rotated for layer in ModelSpec.from_model(model).layers]
    assert not all(rotated)
    for statistic in ("score", "sensitivity", "ablation"):
        for layer, turns in enumerate(rotated):
            if not turns:
                assert abs(found.layers[statistic][layer]) < 1e-9


def test_search_takes_the_cheapest_each_time() -> None:
    model = lively("llama")
    rows = tokens(model)
    layers = ModelSpec.from_model(model).num_layers
    found = plan_search(model, rows, drop=2, shortlist=layers)
    alone = calibrate(model, rows, statistics=["ablation"]).layers["ablation"]
    first = found.steps[0]
    assert first.dropped == min(range(layers), key=lambda layer: alone[layer])
    assert first.damage == pytest.approx(alone[first.dropped], rel=1e-5)
    chosen = sorted(step.dropped for step in found.steps)
    assert found.scheme.describe() == {"name": "nope_interleaved", "layers": chosen}
    second = {}
    goal = logits(model, rows).double().log_softmax(-1)
    for layer in set(range(layers)) - {first.dropped}:
        patch_model(model, "nope", layers=[first.dropped, layer])
        other = logits(model, rows).double().log_softmax(-1)
        unpatch_model(model)
        second[layer] = (goal.exp() * (goal - other)).sum(-1).mean().item()
    assert found.steps[1].dropped == min(second, key=lambda layer: second[layer])
    assert found.steps[1].damage == pytest.approx(min(second.values()), rel=1e-3)


def test_search_over_pairs_gives_explicit_pairs() -> None:
    model = lively("llama")
    spec = ModelSpec.from_model(model)
    found = plan_search(model, tokens(model), drop=3, unit="pairs", shortlist=2)
    plan = found.scheme.build(spec)
    gone = sorted(step.dropped for step in found.steps)
    for planned, own in zip(plan.layers, spec.layers, strict=True):
        wanted = [0.0 if pair in gone else value for pair, value in enumerate(own.inv_freq)]
        assert list(planned.inv_freq) == wanted
    assert all(math.isfinite(step.damage) for step in found.steps)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: calibrate(m, []), "no rows to calibrate on"),
        (lambda m: calibrate(m, torch.zeros(0, 8, dtype=torch.long)), "no rows to calibrate on"),
        (
            lambda m: calibrate(m, [torch.zeros(8).long(), torch.zeros(9).long()]),
            r"of lengths \[8, 9\]",
        ),
        (lambda m: calibrate(m, torch.zeros(2, 1).long()), "1 token long"),
        (lambda m: calibrate(m, tokens(m), statistics=["norms"]), "did you mean 'norm'"),
        (lambda m: calibrate(m, tokens(m), statistics=[]), "no statistics given"),
        (lambda m: calibrate(m, tokens(m), seed=-1), "seed=-1 must be"),
        (lambda m: calibrate(m, [torch.full((8,), 999)]), "token 999"),
        (lambda m: calibrate(m, [torch.zeros(8)]), "are token ids"),
        (lambda m: calibrate(m, [["a", "b"]]), "no rows to calibrate on"),
        (lambda m: plan_search(m, tokens(m), drop=0), "drop=0 is out of range"),
        (lambda m: plan_search(m, tokens(m), drop=99), "drop=99 is out of range"),
        (lambda m: plan_search(m, tokens(m), drop=1, unit="heads"), "unit='heads' is unknown"),
    ],
)
def test_bad_input_is_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(PosencError, match=message) as error:
        call(tiny_model("llama"))
    assert "\n" not in str(error.value)


def test_a_converted_model_is_refused() -> None:
    model = patch_model(tiny_model("llama"), "nope", layers=[1])
    for call in (lambda: calibrate(model, tokens(model)), lambda: plan_search(model, [], drop=1)):
        with pytest.raises(PosencError, match="converted already"):
            call()


def test_a_file_reads_back_equal_and_a_damaged_one_is_refused(tmp_path: Any) -> None:
    model = tiny_model("llama")
    made = calibrate(model, tokens(model))
    path = made.save(tmp_path / "calibration.json")
    read = Calibration.load(path)
    assert read.base == made.base and read.tokens == made.tokens
    assert read.to_json() == made.to_json()
    path.write_text(path.read_text().replace('"calibration"', '"plan"'))
    with pytest.raises(PosencError, match=r"calibration\.json"):
        Calibration.load(path)


def test_lists_and_modes_and_no_grad_are_fine() -> None:
    model = lively("llama")
    rows = tokens(model)
    wanted = calibrate(model, rows)
    model.train()
    model.model.layers[1].eval()
    with torch.no_grad():
        found = calibrate(model, rows.tolist())
    assert (found.layers, found.pairs) == (wanted.layers, wanted.pairs)
    assert model.training and not model.model.layers[1].training


def test_an_adapter_is_refused() -> None:
    model = get_peft_model(lively("llama"), LoraConfig(r=2, target_modules=["v_proj"]))
    for call in (lambda: calibrate(model, [[1, 2]]), lambda: plan_search(model, [[1, 2]], drop=1)):
        with pytest.raises(PosencError, match="adapter"):
            call()


def test_search_over_pairs_reaches_beyond_the_original_length() -> None:
    """LongRoPE has a second table for long rows; a dropped pair turns in neither."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    model = tiny_model(
        "phi3", scale=20.0, rope_parameters=rope, original_max_position_embeddings=32
    )
    rows = tokens(model, rows=1, length=60)
    found = plan_search(model, rows, drop=2, unit="pairs", shortlist=2)
    goal = logits(model, rows).double().log_softmax(-1)
    patch_model(model, found.scheme)
    other = logits(model, rows).double().log_softmax(-1)
    kl = (goal.exp() * (goal - other)).sum(-1).mean().item()
    assert kl > 0
    assert found.steps[-1].damage == pytest.approx(kl, rel=3e-2)


def test_search_leaves_out_layers_that_do_not_turn() -> None:
    model = tiny_model("smollm3")
    rows = tokens(model)
    turning = [i for i, layer in enumerate(ModelSpec.from_model(model).layers) if layer.rotated]
    found = plan_search(model, rows, drop=len(turning))
    assert sorted(step.dropped for step in found.steps) == turning
    with pytest.raises(PosencError, match=f"use 1 to {len(turning)} layers"):
        plan_search(model, rows, drop=len(turning) + 1)


def test_calibration_rows_are_whole_rows_of_each_source(tmp_path: Path) -> None:
    texts = save_texts(tmp_path / "texts")
    rows = calibration_rows(tiny_tokenizer(), tokens=200, row_tokens=64, sources=str(texts))
    assert rows.shape == (3, 64) and rows.dtype == torch.int64
    again = calibration_rows(tiny_tokenizer(), tokens=192, row_tokens=64, sources=[str(texts)])
    assert torch.equal(rows, again)
    heldout = tiny_tokenizer()((texts / "0.txt").read_text())["input_ids"]
    assert rows[0].tolist() != heldout[:64], "the first file is held out"
    for sources, message in (([], "no text"), ("  ", "is empty"), (str(tmp_path / "x"), "x")):
        with pytest.raises(PosencError, match=message):
            calibration_rows(tiny_tokenizer(), tokens=128, row_tokens=64, sources=sources)
    with pytest.raises(PosencError, match="at least one row"):
        calibration_rows(tiny_tokenizer(), tokens=10, row_tokens=64, sources=str(texts))
