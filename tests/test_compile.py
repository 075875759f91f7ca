"""torch.compile on converted models: one graph, few compilations, the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from matrix import REPRESENTATIVE, atol
from patching import patch
from tiny_models import HARD_POSITIONS, difference, logits, tiny_model, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

import hf_posenc


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


@torch.no_grad()
def at_hard_positions(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.tensor([HARD_POSITIONS[-ids.shape[1] :]]).expand(len(ids), -1)
    return forward(
        input_ids=ids,
        position_ids=positions,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
    ).logits


CASES = [
    ("qwen3", "compose", "eager"),
    *(
        pytest.param(family, row_id, backend, marks=pytest.mark.slow)
        for family in ("llama", "qwen3")
        for row_id in (*REPRESENTATIVE, "rope-dynamic", "compose")
        for backend in ("eager", "aot_eager")
    ),
]


@pytest.mark.parametrize(("family", "row_id", "backend"), CASES)
def test_compiles_to_one_graph(family: str, row_id: str, backend: str):
    model = patch(tiny_model(family, attn="sdpa"), row_id)
    ids = tokens(2, len(HARD_POSITIONS))
    wanted = at_hard_positions(model, ids)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    assert torch.equal(at_hard_positions(compiled, ids), wanted)
    assert counter.frame_count == 1
    for length in (9, 13, 17):  # the second length compiles for any length
        short = ids[:, :length]
        assert difference(
            at_hard_positions(compiled, short), at_hard_positions(model, short)
        ) <= atol("kernel")
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "row_id", ["partial-raw", pytest.param("nope_interleaved", marks=pytest.mark.slow)]
)
def test_unpatched_under_compile_is_the_base(row_id: str):
    model = tiny_model("qwen3", attn="sdpa", num_hidden_layers=2)
    ids = tokens(2, len(HARD_POSITIONS))
    plain = at_hard_positions(model, ids)
    patch(model, row_id)
    changed = at_hard_positions(model, ids)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    for _ in range(3):  # both sides stay compiled: no third graph
        assert torch.equal(at_hard_positions(compiled, ids), changed)
        with hf_posenc.unpatched(model):
            assert torch.equal(at_hard_positions(compiled, ids), plain)
    assert counter.frame_count == 2


def test_decoding_with_a_static_cache_compiles_once():
    model = patch(tiny_model("llama", attn="sdpa", num_hidden_layers=2), "nope_interleaved")
    ids = tokens(1, 12)
    full = logits(model, ids, None)
    cache = StaticCache(config=model.config, max_cache_len=16)
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad():
        parts = [model(ids[:, :6], cache=cache, use_cache=True).logits]
        step = torch.compile(model.forward, fullgraph=True, backend=counter)
        for index in range(6, 12):
            token = ids[:, index : index + 1]
            parts.append(step(input_ids=token, cache=cache, use_cache=True).logits)
    assert difference(torch.cat(parts, dim=1), full) <= atol("cached")
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 12])
def test_compilations_do_not_grow_with_the_layers(layers: int):
    model = hf_posenc.patch_model(
        tiny_model("llama", attn="sdpa", num_hidden_layers=layers), "dual", every=2
    )
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    ids = tokens(2, 16)
    with torch.no_grad():
        got = compiled(input_ids=ids, use_cache=False).logits
    assert torch.equal(got, logits(model, ids, None))
    assert counter.frame_count == 1


def test_training_step_compiled_has_the_gradients_of_eager():
    model = tiny_model("qwen3", attn="sdpa", num_hidden_layers=2)
    model = patch(model, "nope_interleaved").train()
    ids = tokens(2, 16)
    model(ids, labels=ids, use_cache=False).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, grad in wanted.items():
        parameter = model.get_parameter(name)
        assert parameter.grad is not None
        assert difference(parameter.grad, grad) <= atol("gradients")


@pytest.mark.slow
@pytest.mark.parametrize("row_id", [*REPRESENTATIVE, "compose"])
def test_inductor_and_flex(row_id: str):
    """Code generation takes a minute; flex_attention is compiled by transformers itself."""
    model = patch(tiny_model("qwen3", attn="sdpa"), row_id)
    ids = tokens(2, 33)
    wanted = logits(model, ids, None)
    compiled = torch.compile(model.forward, fullgraph=True)
    with torch.no_grad():
        assert difference(compiled(input_ids=ids, use_cache=False).logits, wanted) <= atol("kernel")
    model.set_attn_implementation("flex_attention")
    assert difference(logits(model, ids, None), wanted) <= atol("kernel")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    flex = logits(model, ids, None, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    padded = logits(model, ids, None, attention_mask=mask)
    seen = mask.bool()
    assert difference(flex[seen], padded[seen]) <= atol("kernel")
