"""Full fine-tuning of chosen modules: trained as whole copies, with all that adapters can do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_case import converted, tiny_recipe, word_tokenizer
from safetensors.torch import load_file
from tiny_models import logits, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.heal import HealRecord, Recipe, heal
from hf_posenc.heal.adapter import attach_adapter, settle_adapter, trainable_parameters
from hf_posenc.heal.data import collate, make_row
from hf_posenc.heal.objective import Objective, as_teacher
from hf_posenc.heal.sections import LoraSection
from hf_posenc.heal.trainer import HealTrainer

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
SCHEMES: dict[str, dict[str, Any]] = {
    "nope_interleaved": {"name": "nope_interleaved"},
    "stored interleaved": {"name": "interleaved"},
    "re-paired": {"name": "interleaved", "preserve": False},
    "partial raw": {"name": "partial", "pairs": "raw"},
}


def _full(targets: Any = QKVO) -> LoraSection:
    return LoraSection(r=4, alpha=8, targets=targets, dropout=0.5, full=True)


def _moved(healing: Any) -> Any:
    """The model after some training, as it were."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in healing.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return healing.eval()


def _heal(recipe: Recipe, out: Path, model: Any = None) -> HealRecord:
    model = converted(recipe, scale=6.0) if model is None else model
    return heal(recipe, out=out, model=model, tokenizer=word_tokenizer())


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_whole_copies_follow_the_plan(family: str, scheme: dict[str, Any]) -> None:
    stock = tiny_model(family)
    plain = logits(stock)
    model = hf_posenc.patch_model(copy.deepcopy(stock), scheme)
    fresh = logits(model)
    healing = attach_adapter(model, _full(), train_norms=True)
    assert torch.equal(logits(healing.eval()), fresh)
    changed = logits(_moved(healing))
    with as_teacher(healing):
        assert torch.equal(logits(healing), plain)
    assert torch.equal(logits(healing), changed) and not torch.equal(changed, fresh)
    with hf_posenc.unpatched(healing):  # the trained weights without the plan
        before = logits(healing)
    assert torch.equal(logits(hf_posenc.unpatch_model(healing)), before)
    hf_posenc.patch_model(healing, scheme)
    assert torch.equal(logits(healing), changed)
    with hf_posenc.unpatch_model(healing).disable_adapter():
        assert torch.equal(logits(healing), plain)


def test_the_targets_train_and_nothing_else() -> None:
    healing = attach_adapter(tiny_model("llama"), _full(), train_norms=False)
    trained = [name for name, p in healing.named_parameters() if p.requires_grad]
    assert len(trained) == 16 and all("self_attn" in name for name in trained)
    shapes = ((64, 64), (32, 64), (32, 64), (64, 64))
    assert trainable_parameters(healing) == 4 * sum(a * b for a, b in shapes)
    wide = attach_adapter(tiny_model("llama"), _full("all-linear"), train_norms=False)
    names = {name.split(".")[-4] for name, p in wide.named_parameters() if p.requires_grad}
    assert names == {*QKVO, "gate_proj", "up_proj", "down_proj"}
    first = attach_adapter(tiny_model("llama"), _full(("layers.1.mlp.up_proj",)), train_norms=False)
    assert trainable_parameters(first) == 96 * 64


def test_a_bfloat16_base_trains_fp32_copies_in_its_own_arithmetic() -> None:
    model = tiny_model("qwen2")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    healing = attach_adapter(model, _full(), train_norms=True)
    trained = [p for p in healing.parameters() if p.requires_grad]
    assert len(trained) == 16 + 12 + 9 and all(p.dtype == torch.float32 for p in trained)
    assert logits(_moved(healing)).dtype == torch.bfloat16
    linear = model.model.layers[0].self_attn.q_proj.modules_to_save.default
    inputs = torch.randn(3, 64).bfloat16()
    before = linear(inputs)
    assert before.dtype == torch.bfloat16
    healing(input_ids=tokens(1, 9), use_cache=False).logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained)
    settle_adapter(healing)
    assert type(linear) is nn.Linear and linear.weight.dtype == torch.bfloat16
    assert torch.equal(linear(inputs), before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_whole_copies_brings_the_model_back(checkpointing: bool) -> None:
    model = hf_posenc.patch_model(tiny_model("llama"), SCHEMES["re-paired"])
    healing = attach_adapter(model, _full(), train_norms=False).train()
    if checkpointing:
        healing.activation_checkpointing_enable({"use_reentrant": False})
        healing.enable_input_require_grads()
    objective, batch = Objective(healing, {"kl": 1.0}), collate([make_row([list(range(3, 40))])])
    optimizer = torch.optim.AdamW((p for p in healing.parameters() if p.requires_grad), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = objective(healing, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("scheme", ["nope_interleaved", "re-paired"])
def test_healed_saved_loaded_and_merged(tmp_path: Path, scheme: str) -> None:
    options = ("lora.full=true", "heal.lr=1.0e-3", "heal.gradient_checkpointing=true")
    recipe = tiny_recipe(tmp_path, *options)
    recipe = recipe.model_copy(update={"scheme": SCHEMES[scheme]})
    model = converted(recipe, scale=6.0)
    untouched = {name: weight.clone() for name, weight in model.state_dict().items()}
    record = _heal(recipe, tmp_path / "out", model)
    assert record.full
    assert record.heldout[-1]["loss"] != record.heldout[0]["loss"]
    saved = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 16 + 9 and not any("lora_" in name for name in saved)

    wanted = logits(model.eval())
    loaded = hf_posenc.load_model(tmp_path / "out" / "adapter")
    assert torch.equal(logits(loaded), wanted)
    with loaded.disable_adapter():
        for name, weight in loaded.get_base_model().state_dict().items():
            if "original_module." in name:
                assert torch.equal(weight, untouched[name.replace("original_module.", "")]), name
    merged = loaded.merge_and_unload()
    assert torch.equal(logits(merged), wanted)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert hf_posenc.get_plan(again) == hf_posenc.get_plan(loaded)
    assert torch.equal(logits(again), wanted)


def test_a_stopped_run_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, "lora.full=true", "heal.save_steps=2", "heal.heldout_rows=0")
    whole = _heal(recipe, tmp_path / "whole")
    usual = HealTrainer.compute_loss

    def compute_loss(self: HealTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return usual(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HealTrainer, "compute_loss", compute_loss)
        _heal(recipe, tmp_path / "out")
    resumed = _heal(recipe, tmp_path / "out")
    assert [e["loss"] for e in resumed.log] == [e["loss"] for e in whole.log]
    a, b = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "out")
    )
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_cannot_be_trained_as_a_whole_is_refused() -> None:
    with pytest.raises(PosencError, match="did you mean 'q_proj'"):
        attach_adapter(tiny_model("llama"), _full(("q_prj",)), train_norms=False)
    with pytest.raises(PosencError, match=r"layers\.0\.mlp is a LlamaMLP, not a plain linear"):
        attach_adapter(tiny_model("llama"), _full(("mlp",)), train_norms=False)
    model = tiny_model("llama")
    model.model.layers[2].self_attn.q_proj.weight = nn.Parameter(
        torch.zeros(64, 64, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(PosencError, match=r"layers\.2\.self_attn\.q_proj.*quantised"):
        attach_adapter(model, _full(), train_norms=False)


def test_learned_scales_per_head_heal_and_are_saved(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "scheme.logit_scale=per_head", "heal.tokens=512", scheme="nope")
    model = converted(recipe, scale=6.0)
    record = _heal(recipe, tmp_path / "out", model)
    assert record.trainable_parameters > 4 * 4
    saved = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    scales = {name: weight for name, weight in saved.items() if "posenc_head_scale" in name}
    assert len(scales) == 4
    assert all(scale.shape == (4,) and (scale != 1).all() for scale in scales.values())
    loaded = hf_posenc.load_model(tmp_path / "out" / "adapter")
    assert torch.equal(logits(loaded), logits(model.eval()))
