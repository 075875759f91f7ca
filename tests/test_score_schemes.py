"""Windows, logit scales, biases and absolute vectors on live models: what holds for each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from matrix import atol
from patching import assert_same, snapshot
from score_cases import BY_ID, CASES, ScoreCase, fill_new_parameters
from tiny_models import difference, tiny_model, tokens
from tiny_models import logits as logits_at
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import hf_posenc
from hf_posenc import PosencError
from hf_posenc.runtime import scores

LEARNED = [
    case for case in CASES if "bias" in case.id or case.id in ("per_head", "learned_absolute")
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def shared(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, attn="sdpa")


@pytest.fixture
def base(shared: Any) -> Iterator[Any]:
    """One model per family that every test gives back as it was."""
    before = snapshot(shared)
    yield shared
    if hf_posenc.get_plan(shared) is not None:
        hf_posenc.unpatch_model(shared)
    assert_same(snapshot(shared), before)


def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of rows of 20 tokens at positions 0, 1, 2, ...: learned tables have an end."""
    return logits_at(model, tokens(2, 20) if ids is None else ids, positions=None)


def convert(model: Any, case: ScoreCase) -> Any:
    hf_posenc.patch_model(model, case.scheme, **case.options)
    return model


def filled(model: Any, case: ScoreCase) -> Any:
    fill_new_parameters(convert(model, case))
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_changes_something_and_comes_off(base: Any, case: ScoreCase) -> None:
    before = logits(base)
    convert(base, case)
    assert torch.equal(logits(base), before) == case.fresh_null
    fill_new_parameters(base)
    changed = logits(base)
    assert difference(changed, before) > 1e-3
    with hf_posenc.unpatched(base):
        assert torch.equal(logits(base), before)
    assert torch.equal(logits(base), changed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@torch.no_grad()
def test_prefill_in_chunks_and_single_steps_equal_one_forward(base: Any, case: ScoreCase) -> None:
    filled(base, case)
    ids = tokens(2, 20)
    whole = base(ids, use_cache=False).logits
    for cache in (
        DynamicCache(config=base.config),
        DynamicCache(),
        StaticCache(config=base.config, max_cache_len=24),
    ):
        pieces, start = [], 0
        for width in [3] * 4 + [1] * 8:
            part = ids[:, start : start + width]
            pieces.append(base(part, cache=cache, use_cache=True).logits)
            start += width
        assert difference(torch.cat(pieces, 1), whole) < atol("cached")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@torch.no_grad()
def test_padding_packing_and_the_future(base: Any, case: ScoreCase) -> None:
    filled(base, case)
    ids = tokens(2, 20)
    whole = base(ids, use_cache=False).logits
    later = ids.clone()
    later[:, -1] = (later[:, -1] + 1) % 100 + 3
    assert torch.equal(base(later, use_cache=False).logits[:, :-1], whole[:, :-1])

    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "pad_token_id": 0, "min_new_tokens": 5}
    batch = base.generate(ids, attention_mask=mask, **options)
    alone = base.generate(ids[:1, 7:], attention_mask=mask[:1, 7:], **options)
    for ours, theirs in zip(batch.logits, alone.logits, strict=True):
        assert difference(ours[:1], theirs) < atol("batched")

    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    packed = base(ids[:1], position_ids=positions, use_cache=False).logits[:, 8:]
    assert difference(packed, base(ids[:1, 8:], use_cache=False).logits) < atol("batched")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_pieces_of_the_score_matrix_equal_the_whole(
    base: Any, case: ScoreCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(base, case)
    whole = logits(base)
    trained = copy.deepcopy(base).train()
    trained(tokens(2, 20), labels=tokens(2, 20), use_cache=False).loss.backward()
    monkeypatch.setattr(scores, "BLOCK", 7)
    assert difference(logits(base), whole) < atol("batched")
    pieces = copy.deepcopy(base).train()
    pieces(tokens(2, 20), labels=tokens(2, 20), use_cache=False).loss.backward()
    for (name, one), other in zip(trained.named_parameters(), pieces.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert difference(one.grad, other.grad) < 1e-4, name
        if "posenc_" in name:
            assert one.grad is not None and one.grad.abs().max() > 0, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_implementations_agree_and_unable_ones_are_refused(base: Any, case: ScoreCase) -> None:
    filled(base, case)
    whole = logits(base)
    close = atol("alibi_kernel" if case.id == "alibi" else "kernel")
    touched = any(layer.scores_changed for layer in hf_posenc.get_plan(base).layers)
    assert base.config._attn_implementation == ("posenc_sdpa" if touched else "sdpa")
    try:
        base.set_attn_implementation("eager")
        assert difference(logits(base), whole) < close
        if touched:  # set behind our back: nothing is dropped in silence
            base.config._attn_implementation = "sdpa"
            with pytest.raises(PosencError, match="cannot run this plan"):
                logits(base)
    finally:
        base.set_attn_implementation("sdpa")
    assert torch.equal(logits(base), whole)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_save_and_load(base: Any, case: ScoreCase, tmp_path: Path) -> None:
    saved = copy.deepcopy(base)
    names = fill_new_parameters(convert(saved, case))
    whole = logits(saved)
    saved.save_pretrained(tmp_path / "checkpoint")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", attn_implementation="sdpa"
    ).eval()
    assert hf_posenc.get_plan(loaded) == hf_posenc.get_plan(saved)
    assert [n for n, _ in loaded.named_parameters() if "posenc_" in n] == names
    assert torch.equal(logits(loaded), whole)


@pytest.mark.parametrize("case", LEARNED, ids=lambda case: case.id)
def test_learned_parts_are_trained_and_saved_with_an_adapter(
    case: ScoreCase, tmp_path: Path
) -> None:
    from hf_posenc.heal.adapter import attach_adapter
    from hf_posenc.heal.config import LoraSection

    model = convert(tiny_model("llama", attn="sdpa"), case)
    model.save_pretrained(tmp_path / "base")
    lora = LoraSection(r=2, alpha=4, targets=("q_proj",), dropout=0.0)
    healing = attach_adapter(model, lora, train_norms=False)
    trained = [n for n, p in healing.named_parameters() if "posenc_" in n and p.requires_grad]
    assert trained
    optimizer = torch.optim.SGD([p for p in healing.parameters() if p.requires_grad], lr=1.0)
    ids = tokens(2, 20)
    before = logits(healing)
    for _ in range(2):
        healing(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(healing.get_parameter(n).grad is not None for n in trained)
        optimizer.step()
        optimizer.zero_grad()
    after = logits(healing)
    assert not torch.equal(after, before)
    hf_posenc.save_adapter(healing, tmp_path / "adapter", base=tmp_path / "base")
    loaded = hf_posenc.load_model(tmp_path / "adapter").eval()
    assert isinstance(loaded, peft.PeftModel)
    assert torch.equal(logits(loaded), after)
    merged = healing.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="sdpa"
    ).eval()
    assert difference(logits(again), after) < atol("merge")


@torch.no_grad()
def test_a_windowed_layer_caches_its_window_and_no_more(base: Any) -> None:
    convert(base, BY_ID["rnope_swa"])
    cache = DynamicCache(config=base.config)
    ids = tokens(1, 40)
    base(ids, cache=cache, use_cache=True)
    kept = [layer.keys.shape[2] for layer in cache.layers]
    assert kept == [5 if layer.window else 40 for layer in hf_posenc.get_plan(base).layers]


def test_short_rows_are_bitwise_unchanged_where_the_form_allows(base: Any) -> None:
    before = logits(base)
    for options in (
        {"window": 64},
        {"logit_scale": {"kind": "inkling", "floor": 64}},
        {"logit_scale": {"kind": "drope", "floor": 64}},
        {"logit_scale": {"kind": "llama4", "floor": 64}},
    ):
        hf_posenc.patch_model(base, "rope", **options)
        assert torch.equal(logits(base), before), options
        hf_posenc.unpatch_model(base)


def test_a_position_beyond_the_learned_table_is_refused(base: Any) -> None:
    hf_posenc.patch_model(base, "learned_absolute", max_positions=8)
    logits(base, tokens(1, 8))
    with pytest.raises(PosencError, match=r"position 8 is beyond the table of 8"):
        logits(base, tokens(1, 9))


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("rope", {"window": 0}, "window=0 must be a whole number"),
        ("rope", {"window": True}, "window=True"),
        ("dual", {"window": -1}, "window=-1"),
        ("gemma4", {"window": 0}, "window=0"),
        ("irope", {"chunk": 0}, "chunk=0"),
        ("irope", {"scale_alpha": float("nan")}, "finite number"),
        ("swan", {"offset": 4}, "offset=4"),
        ("drope", {"scale_c": float("inf")}, "scale_c"),
        ("t5_bias", {"buckets": 7}, "must be even"),
        ("t5_bias", {"buckets": 0}, "at least 2"),
        ("t5_bias", {"max_distance": 16}, "at least 17"),
        ("query_bias", {"extent": 0}, "extent 0"),
        ("query_bias", {"rank": 0}, "rank 0"),
        ("learned_absolute", {"max_positions": 0}, "max_positions=0"),
        ("learned_absolute", {"init": "ones"}, "init='ones'"),
        ("nope", {"logit_scale": float("nan")}, "finite number"),
        ("nope", {"logit_scale": {"kind": "llama5", "floor": 1}}, "did you mean 'llama4'"),
        ("nope", {"logit_scale": {"kind": "log"}}, "needs 'floor'"),
        ("nope", {"logit_scale": {"kind": "log", "flor": 2}}, "did you mean 'floor'"),
        ("sinusoidal", {"scale": True}, "no option 'scale'"),
    ],
)
def test_bad_options_are_one_clear_line(scheme: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PosencError, match=message) as caught:
        hf_posenc.make_scheme(scheme, **options)
    assert "\n" not in str(caught.value)


def test_two_shared_tables_of_different_shape_are_refused(base: Any) -> None:
    groups = [
        {"layers": [0], "scheme": {"name": "t5_bias", "buckets": 8, "max_distance": 16}},
        {"layers": [1], "scheme": {"name": "t5_bias", "buckets": 4, "max_distance": 16}},
    ]
    with pytest.raises(PosencError, match="2 different T5 tables"):
        hf_posenc.patch_model(base, "compose", groups=groups)


def test_slopes_for_no_heads_and_for_other_heads_are_refused(base: Any) -> None:
    from dataclasses import replace

    from hf_posenc.parts import ALiBi, alibi_slopes

    with pytest.raises(PosencError, match="number of heads 0"):
        alibi_slopes(0)
    spec = hf_posenc.ModelSpec.from_model(base)
    layers = tuple(replace(layer, bias=ALiBi((0.5, 0.25))) for layer in spec.layers)
    with pytest.raises(PosencError, match=r"2 ALiBi slopes for \d query heads"):
        hf_posenc.patch_model(base, hf_posenc.PositionPlan(layers, spec.fingerprint))
