"""patch_model, unpatch_model, unpatched, get_plan: what holds for every family and scheme."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FAMILIES, REPRESENTATIVE, SCHEMES, SchemeRow
from patching import assert_same, patch, snapshot
from processes import run_python
from tiny_models import build, layer_tables, logits, tiny_config, tiny_model, tokens

import hf_posenc
from hf_posenc import PosencError


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(family: str) -> Any:
    """One model per family that every test gives back as it was."""
    return tiny_model(family)


@pytest.fixture(scope="module")
def before(shared: Any) -> dict[str, Any]:
    """What the shared model was before any test."""
    return snapshot(shared)


@pytest.fixture
def base(shared: Any, before: dict[str, Any]) -> Iterator[Any]:
    yield shared
    if hf_posenc.get_plan(shared) is not None:
        hf_posenc.unpatch_model(shared)
    assert_same(snapshot(shared), before)


@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.id)
def test_patch_does_what_it_says_and_unpatch_gives_back_the_original(
    base: Any, before: dict[str, Any], row: SchemeRow
):
    assert patch(base, row) is base
    plan = hf_posenc.get_plan(base)
    assert plan is not None and plan.scheme_dict["name"] == row.scheme
    assert type(base).__name__ == f"Posenc{before['class'].__name__}"
    assert base.config.model_type == f"posenc_{before['config']['']['model_type']}"
    assert base.model.config is base.config

    changed = logits(base)
    assert torch.equal(changed, before["logits"]) == row.null
    moved = [n for n, v in base.state_dict().items() if not torch.equal(v, before["weights"][n])]
    assert bool(moved) == row.repairs
    with hf_posenc.unpatched(base):
        assert torch.equal(logits(base), before["logits"])
        assert hf_posenc.get_plan(base) == plan
        with hf_posenc.unpatched(base):
            assert torch.equal(logits(base), before["logits"])
        assert torch.equal(logits(base), before["logits"])
    assert torch.equal(logits(base), changed)

    assert hf_posenc.unpatch_model(base) is base
    assert hf_posenc.get_plan(base) is None  # and the fixture compares all the rest


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
def test_other_models_of_the_class_stay_as_they_are(family: str, row_id: str):
    config = tiny_config(family)
    earlier, patched = build(config), build(config)
    assert earlier.config is patched.config
    before, config_before = snapshot(earlier), config.to_dict()
    patch(patched, row_id)
    assert_same(snapshot(earlier), before)
    assert config.to_dict() == config_before
    later = build(config)
    assert torch.equal(logits(later), before["logits"])
    assert type(later) is type(earlier) is not type(patched)


def test_patched_twice_and_unpatched_twice_are_refused(base: Any):
    patch(base, "partial-raw")
    changed = logits(base)
    with pytest.raises(PosencError, match=r"already patched with partial\(.*unpatch_model"):
        patch(base, "nope")
    assert torch.equal(logits(base), changed)
    hf_posenc.unpatch_model(base)
    with pytest.raises(PosencError, match="not patched"):
        hf_posenc.unpatch_model(base)
    with hf_posenc.unpatched(base):  # the teacher of a model that has no plan is the model
        pass


def test_unpatching_and_saving_inside_unpatched_are_refused(base: Any, tmp_path: Path):
    patch(base, "partial-raw")
    with hf_posenc.unpatched(base):
        with pytest.raises(PosencError, match="unpatch_model inside an unpatched"):
            hf_posenc.unpatch_model(base)
        with pytest.raises(PosencError, match="save_pretrained inside an unpatched"):
            base.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_exception_inside_unpatched_leaves_the_plan_on(base: Any):
    patch(base, "partial-raw")
    changed = logits(base)
    with pytest.raises(KeyError), hf_posenc.unpatched(base):
        raise KeyError
    assert torch.equal(logits(base), changed)


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
def test_copies_are_models_of_their_own(base: Any, row_id: str):
    before = logits(base)
    patch(base, row_id)
    changed = logits(base)
    for copied in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert hf_posenc.get_plan(copied) == hf_posenc.get_plan(base)
        assert torch.equal(logits(copied), changed)
        with hf_posenc.unpatched(copied):
            assert torch.equal(logits(copied), before)
            assert torch.equal(logits(base), changed)  # the copy has a switch of its own
        hf_posenc.unpatch_model(copied)
        assert torch.equal(logits(copied), before)
        assert not any(m._forward_pre_hooks for m in copied.modules())
        assert torch.equal(logits(base), changed)


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_move_weights_and_never_frequencies(base: Any, row_id: str, dtype: torch.dtype):
    stock = copy.deepcopy(base).to(dtype)
    patched = patch(copy.deepcopy(base), row_id)
    fresh = patched.model.rotary_emb.inv_freq.clone()
    patched.to(dtype)
    rotary = patched.model.rotary_emb
    assert rotary.inv_freq.dtype == rotary.original_inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, fresh) and torch.equal(rotary.original_inv_freq, fresh)

    exact = layer_tables(patch(copy.deepcopy(base), row_id))
    for (cos, sin), (cos32, sin32) in zip(layer_tables(patched), exact, strict=True):
        assert cos.dtype == sin.dtype == dtype
        assert torch.equal(cos, cos32.to(dtype)) and torch.equal(sin, sin32.to(dtype))
    assert outputs_dtypes(patched) == outputs_dtypes(stock)


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
def test_autocast_gives_the_types_of_the_base(base: Any, row_id: str):
    with torch.autocast("cpu", torch.bfloat16):
        wanted, plain = outputs_dtypes(base), logits(base)
        patch(base, "rope")
        assert torch.equal(logits(base), plain)
        hf_posenc.unpatch_model(base)
        patch(base, row_id)
        assert outputs_dtypes(base) == wanted


@torch.no_grad()
def outputs_dtypes(model: Any) -> tuple[torch.dtype, ...]:
    result = model(input_ids=tokens(1, 9), use_cache=True)
    layer = result.cache.layers[1]
    assert all(bool(value.isfinite().all()) for value in (result.logits, layer.keys))
    return result.logits.dtype, layer.keys.dtype, layer.values.dtype


def test_a_rounded_base_is_named_and_its_frequencies_are_computed_anew():
    model = tiny_model("qwen3").to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    rounded = layer_tables(model)
    with pytest.warns(UserWarning, match="rounded to torch.bfloat16"):
        hf_posenc.patch_model(model, "rope")
    exact = layer_tables(hf_posenc.patch_model(tiny_model("qwen3"), "rope"))
    assert torch.equal(layer_tables(model)[0][0], exact[0][0].to(torch.bfloat16))
    assert not torch.equal(layer_tables(model)[0][0], rounded[0][0])


def test_pickles_open_in_a_fresh_process(tmp_path: Path):
    models, wanted = [], []
    for family in ("qwen3", "gemma2"):  # gemma2 is registered on first use only
        for row_id in ("nope_interleaved", "interleaved-repaired"):
            model = tiny_model(family)
            plain = logits(model)
            models.append(patch(model, row_id))
            wanted.append((plain, logits(model)))
    torch.save((models, wanted), tmp_path / "models.pt")
    code = """
import sys, torch
torch.set_num_threads(1)
from tiny_models import logits
models, wanted = torch.load(sys.argv[1], weights_only=False)
import hf_posenc
for model, (plain, changed) in zip(models, wanted, strict=True):
    assert torch.equal(logits(model), changed)
    hf_posenc.unpatch_model(model)
    assert torch.equal(logits(model), plain)
print("opened", len(models))
"""
    assert run_python(code, str(tmp_path / "models.pt")).strip() == "opened 4"
