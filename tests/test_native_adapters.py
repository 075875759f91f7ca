"""Exports from folders: tokenizer and licence come along, adapters are merged or stay beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_case import REORDERED, base_model, far_logits, load_stock, patched
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import difference
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoTokenizer, GenerationConfig

import hf_posenc
from hf_posenc.checkpoint.native import Unexportable, export_native
from hf_posenc.checkpoint.native.source import merged
from hf_posenc.errors import PosencError

# W + BA is rounded once instead of adding B(Ax) to Wx.
MERGED = 5e-6
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def healed(
    family: str,
    row: str,
    *,
    modules: tuple[str, ...] = _ATTENTION,
    save: list[str] | None = None,
    **options: Any,
) -> Any:
    """A patched model with a LoRA adapter that does something."""
    config = LoraConfig(r=4, target_modules=list(modules), modules_to_save=save, **options)
    model = get_peft_model(patched(family, row), config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise)
    return model


@pytest.mark.parametrize(
    ("family", "row", "target"),
    [
        ("llama", "nope_interleaved", "smollm3"),
        ("qwen2", "p_rope", "glm"),
        ("qwen3", "partial-raw", "glm4_moe"),
        ("llama", "interleaved-repaired", "phi3"),
    ],
)
def test_a_live_adapter_is_merged_and_the_model_left_alone(
    family: str, row: str, target: str, tmp_path: Path
) -> None:
    model = healed(family, row)
    before = far_logits(model)
    export_native(model, tmp_path / "out", target)
    stock = load_stock(tmp_path / "out", like=model.base_model.model)
    assert difference(before, far_logits(stock)) <= MERGED
    assert difference(before, far_logits(model.unload())) > 1e-3


def test_merging_rounds_once() -> None:
    model = healed("llama", "p_rope")
    with torch.no_grad():
        exact = model.base_model.model.model.layers[1].self_attn.q_proj
        wanted = exact.base_layer.weight.to(torch.bfloat16).double()
        wanted = (wanted + exact.get_delta_weight("default").double()).to(torch.bfloat16)
    for parameter in (p for n, p in model.named_parameters() if "lora_" not in n):
        parameter.data = parameter.data.to(torch.bfloat16)
    result = merged(model)
    assert torch.equal(result.model.layers[1].self_attn.q_proj.weight, wanted)
    assert {parameter.dtype for parameter in result.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("family", "row", "target"),
    [
        ("llama", "nope_interleaved", "smollm3"),
        ("llama", "p_rope", "glm4_moe"),
        ("mistral", "rope", "ernie4_5"),
        ("qwen2", "p_rope", "glm"),
        ("qwen3", "partial-raw", "glm4_moe"),
        ("qwen3_moe", "dual", "mellum"),
    ],
)
def test_an_adapter_stays_beside_its_exported_base(
    family: str, row: str, target: str, tmp_path: Path
) -> None:
    norms = ["q_norm", "k_norm"] if family == "qwen3" else None
    model = healed(family, row, save=norms)
    export_native(model, tmp_path / "out", target, merge=False)
    stock = load_stock(tmp_path / "out", like=model.base_model.model)
    plain = far_logits(stock)
    again = PeftModel.from_pretrained(stock, tmp_path / "out" / "adapter").eval()
    assert difference(far_logits(model), far_logits(again)) <= 2 * REORDERED
    assert difference(far_logits(again), plain) > 1e-3
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((tmp_path / "out").resolve())
    assert "posenc" not in json.dumps(config).replace(config["base_model_name_or_path"], "")


def test_dora_rows_move_with_their_magnitudes(tmp_path: Path) -> None:
    model = healed("llama", "p_rope", use_dora=True)
    export_native(model, tmp_path / "out", "glm4_moe", merge=False)
    stock = load_stock(tmp_path / "out", like=model.base_model.model)
    again = PeftModel.from_pretrained(stock, tmp_path / "out" / "adapter").eval()
    assert difference(far_logits(model), far_logits(again)) <= 2 * REORDERED


def test_adapters_on_fused_modules_are_refused_and_merging_is_named(tmp_path: Path) -> None:
    model = healed("llama", "p_rope", modules=("v_proj", "gate_proj"))
    with pytest.raises(Unexportable, match=r"works on v_proj, which Phi3Config fuses.*merge it"):
        export_native(model, tmp_path / "out", "phi3", merge=False)
    with pytest.raises(Unexportable, match=r"gate_proj.*merge it into the base"):
        export_native(model, tmp_path / "out", "glm", merge=False)
    assert list(tmp_path.iterdir()) == []
    assert export_native(model, tmp_path / "out", "phi3").target == "phi3"


def converted_folder(tmp_path: Path, row: str = "nope_interleaved") -> Path:
    folder = tmp_path / "converted"
    model = patched("llama", row, vocab_size=1024)
    model.generation_config = GenerationConfig(temperature=0.3, do_sample=True, eos_token_id=2)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE.txt").write_text("Apache-2.0")
    return folder


@pytest.mark.parametrize("target", ["smollm3", "granite_swa"])
def test_a_converted_folder_is_exported_with_what_lies_beside_the_weights(
    target: str, tmp_path: Path
) -> None:
    folder = converted_folder(tmp_path)
    out = tmp_path / "out"
    report = export_native(folder, out, target)
    assert not any("tokenizer" in note for note in report.notes)
    text = "The red fox saw 12 stones."
    wanted = AutoTokenizer.from_pretrained(folder)
    found = AutoTokenizer.from_pretrained(out)
    assert wanted(text)["input_ids"] == found(text)["input_ids"]
    assert found.chat_template == "{{ messages }}"
    assert GenerationConfig.from_pretrained(out).temperature == 0.3
    assert (out / "LICENSE.txt").read_text() == "Apache-2.0"
    record = json.loads((out / "posenc_export.json").read_text())
    assert record["target"] == target and record["plan"]["scheme"]["name"] == "nope_interleaved"
    assert not list(out.glob("*.py"))
    attn = "eager" if target == "granite_swa" else "sdpa"
    model = hf_posenc.load_model(folder, attn_implementation=attn)
    assert torch.equal(far_logits(model), far_logits(load_stock(out, like=model)))


def test_an_adapter_folder_is_merged_or_kept(tmp_path: Path) -> None:
    converted = converted_folder(tmp_path, "p_rope")
    base = hf_posenc.load_model(converted, attn_implementation="sdpa")
    model = get_peft_model(
        base, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"])
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    hf_posenc.save_adapter(model, tmp_path / "adapter", base=converted)
    wanted = far_logits(model)
    export_native(tmp_path / "adapter", tmp_path / "merged")
    stock = load_stock(tmp_path / "merged", like=base)
    assert difference(wanted, far_logits(stock)) <= MERGED
    export_native(tmp_path / "adapter", tmp_path / "kept", "glm4_moe", merge=False)
    kept = load_stock(tmp_path / "kept", like=base)
    kept = PeftModel.from_pretrained(kept, tmp_path / "kept" / "adapter").eval()
    assert difference(wanted, far_logits(kept)) <= 2 * REORDERED


def test_an_adapter_on_an_unconverted_base_is_not_exported(tmp_path: Path) -> None:
    model = get_peft_model(base_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(PosencError, match="not converted by hf_posenc"):
        export_native(model, tmp_path / "out")
