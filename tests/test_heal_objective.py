"""The loss of a step: teacher, heads, masks, checkpointing, accumulation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import difference, tiny_model, tokens
from torch import nn
from torch.nn import functional

from hf_posenc import losses
from hf_posenc.errors import PosencError
from hf_posenc.head import checked_head
from hf_posenc.heal.adapter import attach_adapter, parameter_groups, settle_adapter
from hf_posenc.heal.config import LoraSection
from hf_posenc.heal.data import Row, collate, make_row
from hf_posenc.heal.objective import Objective, as_teacher, predicted
from hf_posenc.runtime.patch import patch_model, unpatch_model

LORA = LoraSection(r=4, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"), dropout=0)
OBJECTIVES = [{"ce": 1.0}, {"kl": 1.0}, {"hidden": 1.0}, {"kl": 0.7, "ce": 0.2, "hidden": 0.1}]


def _batch(seed: int = 0, rows: int = 2) -> Row:
    made = []
    for row in range(rows):
        first = 9 + 5 * row
        ids = tokens(1, 24, seed=100 * seed + row)[0].tolist()
        made.append(make_row([ids[:first], ids[first:]]))
    return collate(made)


def _healing(family: str = "llama", scheme: str | None = "nope_interleaved", **options: Any) -> Any:
    """A patched tiny model with an adapter that already does something, q to o and norms."""
    model = tiny_model(family, **options)
    if scheme is not None:
        patch_model(model, scheme)
    torch.manual_seed(0)
    healing = attach_adapter(model, LORA, train_norms=True)
    with torch.no_grad():
        for parameter in healing.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return healing


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """The weights in another dtype, the rotary frequencies untouched, as after a load."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _naive(healing: Any, stock: Any, weights: dict[str, float], batch: Row) -> torch.Tensor:
    """The same loss from full logits, with a second model as the teacher."""
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    mask, targets = predicted(batch["labels"])
    student = healing(**inputs, use_cache=False, output_hidden_states=True)
    with torch.no_grad():
        teacher = stock(**inputs, use_cache=False, output_hidden_states=True)
    logits, goal = student.logits[mask], teacher.logits[mask]
    total = torch.zeros(())
    if "ce" in weights:
        total = total + weights["ce"] * functional.cross_entropy(logits, targets, reduction="sum")
    if "kl" in weights:
        p = goal.log_softmax(-1)
        total = total + weights["kl"] * (p.exp() * (p - logits.log_softmax(-1))).sum()
    if "hidden" in weights:
        # The last entry of hidden_states is after the final norm: take the layer's own output.
        outputs = _layer_outputs(healing.get_base_model(), inputs)
        with torch.no_grad():
            wanted = _layer_outputs(stock, inputs)
        for mine, theirs in zip(outputs, wanted, strict=True):
            error = (mine[mask] - theirs[mask]).square().mean(-1)
            part = (error / theirs[mask].var(-1, correction=0)).sum()
            total = total + weights["hidden"] * part / len(wanted)
    return total


def _layer_outputs(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
        for layer in model.model.layers
    ]
    model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("weights", OBJECTIVES, ids=lambda w: "+".join(w))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite", "cohere"])
def test_loss_and_gradients_equal_the_naive_ones(
    family: str, weights: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 16 * 128)  # several chunks
    options = {"final_logit_softcapping": 5.0} if family == "gemma2" else {}
    scale = 3.0
    healing = _healing(family, scale=scale, **options)
    stock = tiny_model(family, scale=scale, **options)
    objective = Objective(healing, weights)
    assert objective.head is not None
    batch = _batch()
    loss = objective(healing, batch)
    loss.backward()
    gradients = _gradients(healing)
    expected = _naive(healing, stock, weights, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    wanted = _gradients(healing)
    assert gradients.keys() == wanted.keys() and len(gradients) > 20
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert difference(gradients[name], gradient) <= 1e-5 * largest, name


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere", "qwen2"])
def test_heads_give_the_models_own_logits(family: str) -> None:
    options: dict[str, Any] = {"final_logit_softcapping": 5.0} if family == "gemma2" else {}
    if family == "cohere":
        options = {"logit_scale": 0.0625}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(family, **options).to(dtype).requires_grad_(False)
        head = checked_head(model)
        assert head is not None
        ids = tokens(2, 17)
        with torch.no_grad():
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
            assert torch.equal(head(states), model(input_ids=ids, use_cache=False).logits)


@pytest.fixture
def odd_model() -> Iterator[Any]:
    model = tiny_model("llama")
    shift = torch.linspace(0, 3, 128)

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits + shift
        return output

    handle = model.register_forward_hook(add)
    yield model
    handle.remove()


def test_an_unknown_head_falls_back_to_full_logits_and_says_so(
    odd_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    patch_model(odd_model, "nope_interleaved")
    healing = attach_adapter(odd_model, LORA, train_norms=False)
    with caplog.at_level(logging.WARNING, logger="hf_posenc"):
        objective = Objective(healing, {"kl": 1.0, "ce": 1.0})
    assert objective.head is None
    assert "full logits" in caplog.text
    batch = _batch()
    loss = objective(healing, batch)
    loss.backward()
    assert any(p.grad.abs().max() > 0 for n, p in healing.named_parameters() if "lora_B" in n)
    mask, targets = predicted(batch["labels"])
    with torch.no_grad():
        logits = healing(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits[mask]
        with as_teacher(healing):
            goal = healing(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits[mask]
    torch.testing.assert_close(loss.detach(), losses.kl(logits, goal) + losses.ce(logits, targets))


def test_a_trainable_head_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(PosencError, match="freeze"):
        checked_head(model)
    model.requires_grad_(False)
    assert checked_head(model) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_its_own_teacher(dtype: torch.dtype) -> None:
    stock = _cast(tiny_model("qwen3"), dtype)
    healing = attach_adapter(copy.deepcopy(stock), LORA, train_norms=True)
    objective = Objective(healing, {"kl": 1.0, "hidden": 1.0})
    assert objective(healing, _batch()).item() == 0.0
    patch_model(healing, "nope_interleaved")
    healing.train()
    assert objective(healing, _batch()).item() > 0.1
    inputs = {k: v for k, v in _batch().items() if k != "labels"}
    with as_teacher(healing):
        assert not healing.training
        assert torch.equal(
            healing(**inputs, use_cache=False).logits, stock(**inputs, use_cache=False).logits
        )
    assert healing.training
    assert all(p.requires_grad for n, p in healing.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("scheme", ["interleaved", "partial"])
def test_the_teacher_sees_through_a_permutation(scheme: str) -> None:
    """Schemes that reorder features move q/k rows and adapters; the teacher has neither."""
    stock = tiny_model("qwen2")
    options = {"preserve": False} if scheme == "interleaved" else {}
    healing = attach_adapter(
        patch_model(copy.deepcopy(stock), scheme, **options), LORA, train_norms=True
    )
    with torch.no_grad():
        for name, parameter in healing.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    before = {name: p.clone() for name, p in healing.named_parameters()}
    inputs = {k: v for k, v in _batch().items() if k != "labels"}
    with as_teacher(healing):
        taught = healing(**inputs, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(taught, stock(**inputs, use_cache=False).logits)
    loss = Objective(healing, {"kl": 1.0})(healing, _batch())
    loss.backward()
    assert all(torch.equal(before[name], p) for name, p in healing.named_parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("weights", [{"kl": 1.0}, {"ce": 1.0, "hidden": 1.0}], ids=str)
def test_gradient_checkpointing_changes_no_gradient(
    weights: dict[str, float], reentrant: bool
) -> None:
    healing = _healing("qwen3", scale=3.0).train()
    objective = Objective(healing, weights)
    objective(healing, _batch()).backward()
    expected = _gradients(healing)
    healing.activation_checkpointing_enable({"use_reentrant": reentrant})
    healing.enable_input_require_grads()
    objective(healing, _batch()).backward()
    gradients = _gradients(healing)
    lora = {name for name in expected if "lora_B" in name}
    assert len(lora) == 16 and all(expected[name].abs().max() > 0 for name in lora)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", OBJECTIVES, ids=lambda w: "+".join(w))
def test_a_step_does_not_depend_on_how_its_rows_are_split(weights: dict[str, float]) -> None:
    healing = _healing(scale=3.0)
    objective = Objective(healing, weights)
    rows = [
        {name: values[row] for name, values in _batch(seed).items()}
        for seed in range(4)
        for row in range(2)
    ]
    rows[0]["labels"] = torch.full_like(rows[0]["labels"], -100)  # uneven token counts
    rows[0]["labels"][5] = 7
    whole = objective(healing, collate(rows))
    whole.backward()
    expected = _gradients(healing)
    parts = [objective(healing, collate([row])) for row in rows]
    torch.stack(parts).sum().backward()
    gradients = _gradients(healing)
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-5, atol=1e-5)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert difference(gradients[name], gradient) <= 1e-5 * largest, name


def test_one_row_layout_for_flash_attention_is_the_same_loss() -> None:
    healing = _healing(scale=3.0, attn="sdpa")
    objective = Objective(healing, {"kl": 1.0, "ce": 1.0})
    expected = objective(healing, _batch())
    objective.one_row = True
    torch.testing.assert_close(objective(healing, _batch()), expected, rtol=1e-5, atol=1e-5)


def test_hidden_can_look_at_some_layers() -> None:
    healing = _healing()
    first, last, both = (
        Objective(healing, {"hidden": 1.0}, hidden_layers=layers)(healing, _batch()).item()
        for layers in ([0], [3], [0, 3])
    )
    assert first != last
    assert both == pytest.approx((first + last) / 2, rel=1e-5)
    with pytest.raises(PosencError, match="layers 0 to 3"):
        Objective(healing, {"hidden": 1.0}, hidden_layers=[4])


def test_held_out_loss_is_the_models_own() -> None:
    healing = _healing().train()
    batch = _batch()
    total, count = Objective(healing, {"kl": 1.0}).cross_entropy(batch)
    mask, targets = predicted(batch["labels"])
    with torch.no_grad():
        logits = healing(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits[mask]
    assert count == 2 * 24 - 4
    assert total == pytest.approx(losses.ce(logits, targets).item(), rel=1e-5)
    assert healing.training


class PosencTable(nn.Module):
    """A stand-in for a learned position module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 8))


def test_what_trains_and_how_fast() -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    model.model.layers[0].self_attn.bias_table = PosencTable()
    healing = attach_adapter(model, LORA, train_norms=True)
    trained = {name: p for name, p in healing.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in trained.values())
    assert sum("layernorm" in name for name in trained) == 8
    assert not any("q_norm" in name or "k_norm" in name for name in trained)
    usual, position = parameter_groups(healing, lr=1e-3, bias_lr_multiplier=10)
    assert (usual["lr"], position["lr"]) == (1e-3, 1e-2)
    assert [p.shape for p in position["params"]] == [(4, 8)]
    assert len(usual["params"]) + 1 == len(trained)
    plain = attach_adapter(tiny_model("qwen3"), LORA, train_norms=False)
    assert all("lora_" in n for n, p in plain.named_parameters() if p.requires_grad)
    assert len(parameter_groups(plain, lr=1e-3, bias_lr_multiplier=10)) == 1


def test_settling_rounds_norms_to_the_base() -> None:
    healing = attach_adapter(tiny_model("llama").to(torch.bfloat16), LORA, train_norms=True)
    norms = [p for n, p in healing.named_parameters() if "layernorm" in n and p.requires_grad]
    with torch.no_grad():
        norms[0].add_(1e-4)
    settle_adapter(healing)
    norms = [p for n, p in healing.named_parameters() if "layernorm" in n and p.requires_grad]
    assert len(norms) == 8 and all(p.dtype == torch.bfloat16 for p in norms)


def test_adapter_requests_are_checked() -> None:
    targets = LORA.model_copy(update={"targets": ("q_prj",)})
    with pytest.raises(PosencError, match="did you mean 'q_proj'"):
        attach_adapter(tiny_model("llama"), targets, train_norms=False)
    healing = attach_adapter(tiny_model("llama"), LORA, train_norms=False)
    with pytest.raises(PosencError, match="already carries an adapter"):
        attach_adapter(healing, LORA, train_norms=False)
    everything = LORA.model_copy(update={"targets": "all-linear"})
    wide = attach_adapter(tiny_model("llama"), everything, train_norms=False)
    adapted = {
        n.split(".lora_")[0].rpartition(".")[2] for n, _ in wide.named_parameters() if "lora_" in n
    }
    assert adapted == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_healing_leaves_the_base_as_it_was() -> None:
    stock = tiny_model("llama")
    model = patch_model(tiny_model("llama"), "nope_interleaved")
    healing = attach_adapter(model, LORA, train_norms=False)
    loss = Objective(healing, {"kl": 1.0})(healing, _batch())
    loss.backward()
    restored = unpatch_model(healing).unload()
    for name, weight in stock.state_dict().items():
        assert torch.equal(restored.state_dict()[name], weight), name
