"""PEFT before and after patching, on schemes that move rows and on those that do not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from matrix import FAMILIES, atol
from patching import assert_same, patch, snapshot
from tiny_models import difference, logits, tiny_model, tokens
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import PosencError

ROWS = ("nope_interleaved", "interleaved", "interleaved-repaired", "partial-raw")
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(**options: Any) -> peft.LoraConfig:
    """LoRA with random (not zero) lora_B, so that a row left behind shows."""
    values: dict[str, Any] = {"r": 4, "target_modules": QKVO, "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**values, **options})


def adapted(model: Any, config: Any = None) -> Any:
    """The model with a random adapter."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        result = peft.get_peft_model(model, config or lora())
        with torch.no_grad():
            for name, parameter in result.named_parameters():
                if "lora_" in name and parameter.ndim == 1:  # biases of lora_B, DoRA's magnitudes
                    parameter.add_(0.3 * torch.rand_like(parameter))
    return result.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row_id", ROWS)
def test_an_attached_adapter_follows_the_plan(family: str, row_id: str):
    model = adapted(tiny_model(family))
    plain, before = logits(model), snapshot(model.get_base_model())
    merged = patch(copy.deepcopy(model).merge_and_unload(), row_id)
    assert hf_posenc.get_plan(patch_adapted(model, row_id)) == hf_posenc.get_plan(merged)
    changed = logits(model)
    assert difference(changed, logits(merged)) <= atol("merge")
    assert (difference(changed, plain) > 1e-2) == (row_id != "interleaved")
    with hf_posenc.unpatched(model):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), changed)
    hf_posenc.unpatch_model(model)
    assert_same(snapshot(model.get_base_model()), before)
    assert torch.equal(logits(model), plain)


def patch_adapted(model: Any, row_id: str) -> Any:
    """Patch through the PEFT model; every view of its config must show the plan."""
    from matrix import BY_ID

    row = BY_ID[row_id]
    assert hf_posenc.patch_model(model, row.scheme, **row.options) is model
    assert model.config.model_type == model.get_base_model().config.model_type
    assert model.config.model_type.startswith("posenc_")
    return model


@pytest.mark.parametrize("row_id", ROWS)
def test_the_teacher_is_the_base_without_plan_and_adapter(row_id: str):
    base = tiny_model("qwen3")
    plain = logits(base)
    earlier = patch_adapted(adapted(tiny_model("qwen3")), row_id)
    for model in (earlier, adapted(patch(base, row_id))):
        changed = logits(model)
        assert difference(changed, plain) > 1e-2
        with hf_posenc.unpatched(model), model.disable_adapter():
            assert torch.equal(logits(model), plain)
        with model.disable_adapter(), hf_posenc.unpatched(model):
            assert torch.equal(logits(model), plain)
        assert torch.equal(logits(model), changed)


@pytest.mark.parametrize("row_id", ROWS)
@pytest.mark.parametrize("order", ["patch first", "adapter first"])
def test_merge_save_load(row_id: str, order: str, tmp_path: Path):
    if order == "patch first":
        model = adapted(patch(tiny_model("qwen2"), row_id))
    else:
        model = patch_adapted(adapted(tiny_model("qwen2")), row_id)
    wanted = logits(model)
    merged = model.merge_and_unload()
    assert difference(logits(merged), wanted) <= atol("merge")
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert hf_posenc.get_plan(loaded) == hf_posenc.get_plan(merged)
    assert torch.equal(logits(loaded), logits(merged))


def test_tied_embeddings_with_an_adapted_head(tmp_path: Path):
    base = patch(tiny_model("llama", tie_word_embeddings=True), "nope_interleaved")
    model = adapted(base, lora(target_modules=["q_proj", "lm_head"], ensure_weight_tying=False))
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(
        patch(tiny_model("llama", tie_word_embeddings=True), "nope_interleaved"), tmp_path
    )
    assert torch.equal(logits(again.eval()), wanted)


@pytest.mark.parametrize("row_id", ROWS)
def test_every_adapter_weight_gets_a_gradient_with_and_without_checkpointing(row_id: str):
    found = []
    for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = adapted(patch(tiny_model("qwen3"), row_id)).train()
        if kwargs is not None:
            model.get_base_model().activation_checkpointing_enable(kwargs)
        ids = tokens(2, 19)
        with torch.no_grad(), hf_posenc.unpatched(model), model.disable_adapter():
            teacher = model(ids, use_cache=False).logits.log_softmax(-1)
        student = model(ids, use_cache=False).logits.log_softmax(-1)
        torch.nn.functional.kl_div(
            student, teacher, log_target=True, reduction="batchmean"
        ).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if "lora_" in n}
        assert grads and all(grad is not None and bool(grad.any()) for grad in grads.values())
        found.append(grads)
    for grads in found[1:]:
        for name, grad in grads.items():
            assert difference(grad, found[0][name]) <= atol("gradients")


VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "lora bias": {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]},
    "rslora": {"use_rslora": True},
    "trained biases": {"bias": "all"},
    "trained norms": {"modules_to_save": ["q_norm", "k_norm"]},
    "whole q_proj": {"target_modules": ["v_proj"], "modules_to_save": ["q_proj"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("row_id", ["interleaved-repaired", "partial-raw"])
def test_variants_of_lora_follow_the_plan(variant: str, row_id: str):
    family = "qwen2" if variant in ("trained biases", "lora bias") else "qwen3"
    model = adapted(tiny_model(family), lora(**VARIANTS[variant]))
    with torch.no_grad():  # what is trained beside the adapter has moved away from the original
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.3 * torch.rand_like(parameter))
    plain = logits(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with model.disable_adapter():
        bare = logits(model)
    merged = patch(copy.deepcopy(model).merge_and_unload(), row_id)
    patch_adapted(model, row_id)
    changed = logits(model)
    assert difference(changed, logits(merged)) <= atol("merge")
    assert difference(changed, plain) > 1e-2
    with hf_posenc.unpatched(model):
        assert torch.equal(logits(model), plain)
        with model.disable_adapter():
            assert torch.equal(logits(model), bare)
    hf_posenc.unpatch_model(model)
    assert torch.equal(logits(model), plain)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


OTHERS: dict[str, Any] = {
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=QKVO),
    "lokr": peft.LoKrConfig(r=4, target_modules=QKVO),
    "oft": peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], r=0),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters_are_refused_where_rows_move_and_run_where_they_do_not(kind: str):
    model = peft.get_peft_model(tiny_model("llama"), OTHERS[kind]).eval()
    before = snapshot(model.get_base_model())
    with pytest.raises(PosencError, match=r"layer 0 [qk]_proj.*merge the adapter first"):
        hf_posenc.patch_model(model, "interleaved", preserve=False)
    assert_same(snapshot(model.get_base_model()), before)
    hf_posenc.patch_model(model, "nope")
    assert difference(logits(model), before["logits"]) > 1e-2
    hf_posenc.unpatch_model(model)
    assert_same(snapshot(model.get_base_model()), before)


def test_a_merged_dora_adapter_is_refused_where_rows_move():
    model = adapted(tiny_model("llama"), lora(use_dora=True))
    model.merge_adapter()
    with pytest.raises(PosencError, match="merged DoRA"):
        hf_posenc.patch_model(model, "interleaved", preserve=False)
    model.unmerge_adapter()
    hf_posenc.patch_model(model, "interleaved", preserve=False)


def test_two_adapters_and_a_merged_one_follow_the_plan():
    model = adapted(tiny_model("qwen2"))
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model.add_adapter("other", lora(r=2))
    wanted = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        wanted[name] = logits(model)
    model.set_adapter("default")
    model.merge_adapter()
    patch_adapted(model, "interleaved-repaired")
    hf_posenc.unpatch_model(model)
    model.unmerge_adapter()
    for name in ("default", "other"):
        model.set_adapter(name)
        assert difference(logits(model), wanted[name]) <= atol("merge")


def test_peft_saves_an_adapter_of_a_model_that_was_loaded_and_patched(tmp_path: Path) -> None:
    """PEFT reads the config of the base through the class of the live model's config."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = hf_posenc.patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "nope")
    lora = peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
