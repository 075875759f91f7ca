"""Offloading and dispatch through accelerate, before and after patching, and sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from matrix import REPRESENTATIVE
from patching import assert_same, patch, snapshot
from tiny_models import logits, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import PosencError

UNMOVED = ("nope_interleaved", "rope-longrope", "interleaved", "dual")
MOVED = ("partial-raw", "interleaved-repaired")


def to_cpu(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device="cpu")


def to_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device="cpu")


def spread(model: Any, folder: Path) -> Any:
    device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "cpu",
        "model.layers.3": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    return accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


PLACES = [to_cpu, to_disk, spread]


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("row_id", UNMOVED)
def test_offloaded_then_patched(row_id: str, place: Callable[..., Any], tmp_path: Path):
    wanted = logits(patch(tiny_model("qwen3"), row_id))
    plain = logits(tiny_model("qwen3"))
    model = patch(place(tiny_model("qwen3"), tmp_path), row_id)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert torch.equal(logits(model), wanted)
    with hf_posenc.unpatched(model):
        assert torch.equal(logits(model), plain)
    hf_posenc.unpatch_model(model)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("row_id", [*UNMOVED, *MOVED])
def test_patched_then_offloaded(row_id: str, place: Callable[..., Any], tmp_path: Path):
    plain = logits(tiny_model("qwen3"))
    model = patch(tiny_model("qwen3"), row_id)
    wanted = logits(model)
    place(model, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert torch.equal(logits(model), wanted)
    if row_id in UNMOVED:
        with hf_posenc.unpatched(model):
            assert torch.equal(logits(model), plain)
    remove_hook_from_submodules(model)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("row_id", MOVED)
def test_offloaded_rows_cannot_move(row_id: str, place: Callable[..., Any], tmp_path: Path):
    model = place(tiny_model("qwen3"), tmp_path)
    plain = logits(model)
    with pytest.raises(PosencError, match="offloaded"):
        patch(model, row_id)
    assert hf_posenc.get_plan(model) is None
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("row_id", MOVED)
def test_unpatched_is_refused_while_its_rows_are_offloaded(
    row_id: str, place: Callable[..., Any], tmp_path: Path
):
    model = patch(tiny_model("qwen3"), row_id)
    wanted = logits(model)
    place(model, tmp_path)
    with pytest.raises(PosencError, match="offloaded"), hf_posenc.unpatched(model):
        raise AssertionError("ran the base with the plan's rows")
    with pytest.raises(PosencError, match="offloaded"):
        hf_posenc.unpatch_model(model)
    assert hf_posenc.get_plan(model) is not None
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
def test_from_pretrained_with_device_maps(row_id: str, tmp_path: Path):
    patched = patch(tiny_model("qwen2"), row_id)
    wanted = logits(patched)
    patched.save_pretrained(tmp_path / "model")
    parts = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    halves = {"lm_head": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
    halves |= {f"model.{part}": "cpu" for part in parts}
    for device_map in ("auto", {"": "cpu"}, halves):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            device_map=device_map,
            offload_folder=str(tmp_path / "offload"),
            attn_implementation="eager",
        ).eval()
        assert torch.equal(logits(model), wanted), device_map


def without_rows(model: Any) -> None:
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.data = torch.empty(0)


def packed(model: Any) -> None:
    linear = model.model.layers[1].self_attn.k_proj
    linear.weight = nn.Parameter(linear.weight.mul(9).to(torch.int8), requires_grad=False)


def float8(model: Any) -> None:
    linear = model.model.layers[1].self_attn.k_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)


class Packed(nn.Parameter):
    """Stands for DTensor and torchao's tensors: a float dtype outside, something else inside."""


def subclass(model: Any) -> None:
    linear = model.model.layers[1].self_attn.k_proj
    linear.weight = Packed(linear.weight.detach(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_rows, r"layer 1 k_proj.*ZeRO-3"),
        (packed, r"layer 1 k_proj.*quantised \(torch.int8"),
        (float8, r"layer 1 k_proj.*quantised \(torch.float8"),
        (subclass, r"layer 1 k_proj.*Packed.*sharded or quantised"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("row_id", MOVED)
def test_weights_whose_rows_cannot_move_are_named(
    row_id: str, change: Callable[[Any], None], words: str
):
    model = tiny_model("llama")
    change(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PosencError, match=words):
        patch(model, row_id)
    assert hf_posenc.get_plan(model) is None
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    patch(model, "nope_interleaved")  # no row moves: nothing to refuse


def test_a_model_on_the_meta_device_is_patched_for_its_plan_only():
    with torch.device("meta"):
        model = tiny_model_on_meta()
    plan = hf_posenc.get_plan(patch(model, "nope_interleaved"))
    assert plan == hf_posenc.get_plan(patch(tiny_model("llama"), "nope_interleaved"))


def tiny_model_on_meta() -> Any:
    from tiny_models import tiny_config

    return AutoModelForCausalLM.from_config(tiny_config("llama"))


def test_fully_sharded_models_are_refused(tmp_path: Path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = tiny_model("llama")
        before = snapshot(model)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        patched = patch(tiny_model("llama"), "partial-raw")
        wanted = logits(patched)
        fully_shard(patched, mesh=mesh)  # patched first: fine
        assert torch.equal(logits(patched), wanted)
        with pytest.raises(PosencError, match="sharded"):
            hf_posenc.unpatch_model(patched)
        with pytest.raises(PosencError, match="sharded"), hf_posenc.unpatched(patched):
            pass
        unmoved = patch(tiny_model("llama"), "nope_interleaved")
        fully_shard(unmoved, mesh=mesh)
        with hf_posenc.unpatched(unmoved):
            assert torch.equal(logits(unmoved), before["logits"])
        assert_same(snapshot(model), before)
        fully_shard(model, mesh=mesh)
        with pytest.raises(PosencError, match="FSDPLlamaForCausalLM"):
            patch(model, "partial-raw")
    finally:
        torch.distributed.destroy_process_group()
