"""Saving a model that was loaded before it was patched or unpatched: transformers remembers how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from patching import patch
from safetensors.torch import load_file
from tiny_models import logits, tiny_model
from transformers import AutoModelForCausalLM

import hf_posenc

_FAMILIES = ["llama", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("family", _FAMILIES)
def test_loaded_then_patched_then_saved(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "stock")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), "interleaved")
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("row", ["interleaved", "partial-raw"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_converted_loaded_unpatched_saved(family: str, row: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "stock")
    model = patch(tiny_model(family), row)
    model.save_pretrained(tmp_path / "converted")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    hf_posenc.unpatch_model(loaded).save_pretrained(tmp_path / "back")
    before = load_file(tmp_path / "stock" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
