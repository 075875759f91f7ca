"""Attention of converted models against the papers' formulas in float64, head by head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from matrix import FAMILIES, atol
from patching import patch
from tiny_models import THETA, difference, tiny_model, tokens

import hf_posenc
from hf_posenc import ModelSpec

POSITIONS = (0, 1, 2, 5, 17, 40, 41, 90, 151, 300)


def expected_rotation(row_id: str, head_dim: int) -> list[reference.Rotate]:
    """What the papers say each of the four layers does to a head."""
    rope = reference.rope(THETA)
    same: dict[str, reference.Rotate] = {
        "rope": rope,
        "interleaved": rope,
        "interleaved-repaired": reference.interleaved(THETA),
        "partial-raw": reference.partial(THETA, head_dim // 2),
        "p_rope": reference.p_rope(THETA, 0.5),
        "nope": reference.nope,
    }
    if row_id in same:
        return [same[row_id]] * 4
    local, far = reference.rope(1e4), reference.p_rope(1e6, 0.5)
    return {
        "nope_interleaved": [rope, reference.nope, rope, reference.nope],
        "interleaved-some": [reference.interleaved(THETA), rope] * 2,
        "dual": [local, far, local, far],
        "compose": [
            *(reference.p_rope(THETA, 0.5), reference.p_rope(THETA, 0.5)),
            *(reference.partial(THETA, head_dim // 2), reference.nope),
        ],
    }[row_id]


ROW_IDS = (
    *("rope", "interleaved", "interleaved-repaired", "interleaved-some", "partial-raw", "p_rope"),
    *("nope", "nope_interleaved", "dual", "compose"),
)


@torch.no_grad()
def attention_and_inputs(model: Any, positions: tuple[int, ...]) -> tuple[Any, list[torch.Tensor]]:
    """Attention probabilities [1, H, T, T] and the attention's input [1, T, hidden], per layer."""
    inputs: list[torch.Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inputs.append(kwargs["hidden_states"])

    handles = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
        for layer in model.model.layers
    ]
    ids = tokens(1, len(positions))
    result = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=torch.tensor([positions]),
        use_cache=False,
        output_attentions=True,
    )
    for handle in handles:
        handle.remove()
    return result.attentions, inputs


@torch.no_grad()
def heads(attention: Any, name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """q or k of a stock attention module before rotation, [heads, T, D] in float64."""
    split = getattr(attention, f"{name}_proj")(x).view(x.shape[1], -1, head_dim)
    norm: Callable[..., torch.Tensor] | None = getattr(attention, f"{name}_norm", None)
    return (split if norm is None else norm(split)).transpose(0, 1).double()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row_id", ROW_IDS)
def test_attention_follows_the_formula(family: str, row_id: str):
    base = tiny_model(family)
    spec = ModelSpec.from_model(base)
    patched = patch(copy.deepcopy(base), row_id)
    attentions, inputs = attention_and_inputs(patched, POSITIONS)
    rotations = expected_rotation(row_id, spec.head_dim)
    causal = torch.ones(len(POSITIONS), len(POSITIONS)).tril().bool()
    group = spec.num_heads // spec.num_kv_heads
    for index, rotate in enumerate(rotations):
        if not spec.layers[index].rotated:
            rotate = reference.nope  # SmolLM3's own unrotated layers stay so
        stock = base.model.layers[index].self_attn
        q = heads(stock, "q", inputs[index], spec.head_dim)
        k = heads(stock, "k", inputs[index], spec.head_dim)
        for head in (0, spec.num_heads - 1):
            scores = torch.tensor(
                reference.scores(
                    rotate, q[head].tolist(), k[head // group].tolist(), POSITIONS, POSITIONS
                )
            )
            wanted = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            assert difference(attentions[index][0, head], wanted) <= atol("reference")


@pytest.mark.parametrize("family", FAMILIES)
def test_nope_layers_are_the_identity_and_never_zeros(family: str):
    from tiny_models import layer_tables

    patched = hf_posenc.patch_model(tiny_model(family), "nope")
    for cos, sin in layer_tables(patched):
        assert torch.equal(cos, torch.ones_like(cos)) and torch.equal(sin, torch.zeros_like(sin))


@pytest.mark.parametrize("row_id", ["p_rope", "partial-raw", "interleaved-repaired", "dual"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_scores_depend_on_distances_only(row_id: str, attn: str):
    model = patch(tiny_model("qwen3", attn=attn), row_id)
    ids = tokens(1, len(POSITIONS))

    def at(shift: int, order: slice = slice(None)) -> torch.Tensor:
        positions = torch.tensor([[p + shift for p in POSITIONS[order]]])
        with torch.no_grad():
            return model(
                ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits

    assert difference(at(57), at(0)) <= atol("shift")
    assert difference(at(0, slice(None, None, -1)), at(0)) > 1e-2  # other distances do matter
