"""Attention implementations, caches, padding, packing and checkpointing on converted models."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from matrix import BY_ID, FAMILIES, REPRESENTATIVE, SCHEMES, atol
from patching import patch
from tiny_models import VOCAB, difference, logits, tiny_model, tokens
from transformers import DynamicCache, StaticCache

import hf_posenc
from hf_posenc import PosencError

# Cached keys of a table that depends on the row's length were rotated at an earlier length.
BY_POSITION = [row.id for row in SCHEMES if not row.by_length]
PROMPTS = [tokens(1, length, seed=length) for length in (3, 9, 17)]


@pytest.fixture(scope="module", params=FAMILIES)
def shared(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, attn="sdpa")


@pytest.fixture(params=BY_ID)
def patched(shared: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield patch(shared, request.param)
    hf_posenc.unpatch_model(shared)


@pytest.fixture(params=BY_POSITION)
def by_position(shared: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield patch(shared, request.param)
    hf_posenc.unpatch_model(shared)


@pytest.fixture(
    params=[
        row_id
        if row_id in (*REPRESENTATIVE, "compose", "rope-dynamic")
        else pytest.param(row_id, marks=pytest.mark.slow)
        for row_id in BY_ID
    ]
)
def checkpointed(shared: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield patch(shared, request.param)
    hf_posenc.unpatch_model(shared)


@pytest.fixture(params=["nope_interleaved", "partial-raw", "interleaved-repaired", "dual"])
def generating(shared: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield patch(shared, request.param)
    hf_posenc.unpatch_model(shared)


def test_eager_and_sdpa_agree(patched: Any):
    sdpa = logits(patched)
    patched.set_attn_implementation("eager")
    eager = logits(patched)
    patched.set_attn_implementation("sdpa")
    assert difference(eager, sdpa) <= atol("kernel")


@torch.no_grad()
def in_steps(model: Any, ids: torch.Tensor, cache: Any, chunk: int = 3) -> torch.Tensor:
    """Logits of a row fed in chunks, then its last four tokens one by one."""
    cuts = [*range(0, ids.shape[1] - 4, chunk), *range(ids.shape[1] - 4, ids.shape[1] + 1)]
    parts = []
    for start, end in itertools.pairwise(cuts):
        parts.append(model(ids[:, start:end], cache=cache, use_cache=True).logits)
    return torch.cat(parts, dim=1)


def test_chunks_and_single_steps_equal_the_full_forward(by_position: Any):
    ids = tokens(2, 21)
    full = logits(by_position, ids, None)
    dynamic = in_steps(by_position, ids, DynamicCache(config=by_position.config))
    assert difference(dynamic, full) <= atol("cached")
    static = StaticCache(config=by_position.config, max_cache_len=32)
    assert difference(in_steps(by_position, ids, static), full) <= atol("cached")


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [B, 8] and their logits [B, 8, V]."""
    result = model.generate(
        ids,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return result.sequences[:, ids.shape[1] :], torch.stack(result.logits, dim=1)


def test_left_padded_prompts_generate_what_they_do_alone(generating: Any):
    width = max(prompt.shape[1] for prompt in PROMPTS)
    batch = torch.zeros(len(PROMPTS), width, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(PROMPTS):
        batch[row, width - prompt.shape[1] :] = prompt
        mask[row, width - prompt.shape[1] :] = 1
    together, together_logits = greedy(generating, batch, attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        alone, alone_logits = greedy(generating, prompt, attention_mask=torch.ones_like(prompt))
        assert torch.equal(together[row], alone[0])
        assert difference(together_logits[row], alone_logits[0]) <= atol("batched")


def test_generation_feeds_the_cache_what_a_full_forward_sees(generating: Any):
    ids = tokens(1, 11)
    mask = torch.ones_like(ids)
    new, steps = greedy(generating, ids, attention_mask=mask)
    row = torch.cat((ids, new), dim=1)
    full = logits(generating, row, None)[:, ids.shape[1] - 1 : -1]
    assert difference(steps, full) <= atol("cached")
    fixed, fixed_steps = greedy(
        generating, ids, attention_mask=mask, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(fixed, new)
    assert difference(fixed_steps, steps) <= atol("cached")


def test_packed_documents_do_not_see_each_other(patched: Any):
    first, second = tokens(1, 8, seed=8), tokens(1, 13, seed=13)
    positions = torch.cat((torch.arange(8), torch.arange(13)))[None]
    packed = torch.cat((first, second), dim=1)
    with torch.no_grad():
        together = patched(packed, position_ids=positions, use_cache=False).logits
    alone = torch.cat((logits(patched, first, None), logits(patched, second, None)), dim=1)
    assert difference(together, alone) <= atol("batched")
    other = torch.cat((tokens(1, 8, seed=99), second), dim=1)
    with torch.no_grad():
        changed = patched(other, position_ids=positions, use_cache=False).logits
    assert torch.equal(changed[:, 8:], together[:, 8:])
    assert not torch.equal(changed[:, :8], together[:, :8])


def gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = tokens(2, 19)
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_leaves_gradients_as_they_are(checkpointed: Any):
    patched = checkpointed
    patched.train()
    try:
        wanted = gradients(patched)
        assert sum(bool(grad.any()) for grad in wanted.values()) > 20
        for reentrant in (False, True):
            patched.activation_checkpointing_enable({"use_reentrant": reentrant})
            got = gradients(patched)
            patched.disable_input_require_grads()
            patched.activation_checkpointing_disable()
            assert got.keys() == wanted.keys()
            for name, grad in wanted.items():
                assert difference(got[name], grad) <= atol("gradients"), name
    finally:
        patched.eval()
        patched.zero_grad()


@pytest.mark.parametrize("row_id", ["dual", "nope_interleaved", "partial-raw"])
def test_a_checkpointed_layer_is_never_recomputed_with_the_other_tables(shared: Any, row_id: str):
    model = patch(copy.deepcopy(shared), row_id).train()
    with hf_posenc.unpatched(model):
        wanted = gradients(model)
        model.activation_checkpointing_enable({"use_reentrant": False})
        inside = gradients(model)
    assert all(difference(inside[name], grad) <= atol("gradients") for name, grad in wanted.items())
    ids = tokens(2, 19)
    with hf_posenc.unpatched(model):
        loss = model(ids, labels=ids, use_cache=False).loss
    with pytest.raises(PosencError, match="backward"):
        loss.backward()


def test_cached_steps_at_far_positions():
    """A cached step at position 100 000 sees the table of that position."""
    model = hf_posenc.patch_model(tiny_model("llama", attn="sdpa"), "p_rope", p=0.5)
    ids = tokens(1, 6)
    positions = torch.tensor([[0, 1, 2, 99_998, 99_999, 100_000]])
    with torch.no_grad():
        full = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
        cache = DynamicCache(config=model.config)
        parts = [
            model(
                ids[:, i : i + 1],
                position_ids=positions[:, i : i + 1],
                attention_mask=torch.ones(1, i + 1, dtype=torch.long),
                cache=cache,
                use_cache=True,
            ).logits
            for i in range(6)
        ]
    assert full.shape[-1] == VOCAB
    assert difference(torch.cat(parts, dim=1), full) <= atol("cached")


@pytest.mark.parametrize("row_id", ["nope_interleaved", "partial-raw"])
def test_a_teacher_between_forward_and_backward(shared: Any, row_id: str):
    """Exact where no row moves; where rows move, autograd refuses rather than mixes them up."""
    model = patch(copy.deepcopy(shared), row_id).train()
    wanted = gradients(model)
    model.zero_grad()
    ids = tokens(2, 19)
    loss = model(ids, labels=ids, use_cache=False).loss
    with torch.no_grad(), hf_posenc.unpatched(model):
        model(ids, use_cache=False)
    if row_id == "partial-raw":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()
    for name, grad in wanted.items():
        assert difference(model.get_parameter(name).grad, grad) == 0.0
