"""A byte-level BPE tokenizer as GGUF metadata, for the splitting rules llama.cpp knows by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hf_posenc.checkpoint.native.report import Unexportable

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# How llama.cpp names the rules that split text before merging.
_REGEXES = {
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}


@dataclass(frozen=True)
class GgufVocab:
    """What goes under `tokenizer.ggml.*`."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special: dict[str, int]
    add_bos: bool
    chat_template: str | None


def read_vocab(tokenizer: Any, vocab_size: int) -> GgufVocab:
    """The vocabulary padded to `vocab_size` rows of the embedding.

    Errors: `Unexportable` for a tokenizer that is not byte-level BPE with a known splitting rule.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise Unexportable("GGUF: only fast (tokenizers library) tokenizers are written")
    data = json.loads(backend.to_str())
    model = data["model"]
    pre = _splitting_rule(data)
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise Unexportable(f"GGUF: a {model['type']} tokenizer is not byte-level BPE; not written")
    if bool(model.get("ignore_merges")) != (pre == "llama-bpe"):
        raise Unexportable(f"GGUF: ignore_merges of this tokenizer is not that of {pre!r}")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[_inside(index, vocab_size)], types[index] = token, _NORMAL
    for added in data["added_tokens"]:
        index = _inside(added["id"], vocab_size)
        tokens[index] = added["content"]
        types[index] = _CONTROL if added["special"] else _USER_DEFINED
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {
        name: value
        for name, attribute in names.items()
        if (value := getattr(tokenizer, f"{attribute}_token_id", None)) is not None
    }
    first = tokenizer("a")["input_ids"][:1]
    return GgufVocab(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        special=special,
        add_bos="bos" in special and first == [special["bos"]],
        chat_template=tokenizer.chat_template
        if isinstance(getattr(tokenizer, "chat_template", None), str)
        else None,
    )


def _splitting_rule(data: dict[str, Any]) -> str:
    rule = data.get("pre_tokenizer") or {}
    steps = rule.get("pretokenizers", [rule])
    normalizer = (data.get("normalizer") or {}).get("type")
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space", True):
        if last.get("use_regex", True) and normalizer is None:
            if kinds == ["ByteLevel"]:
                return "gpt-2"
            if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
                return "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
            found = _REGEXES.get(steps[0]["pattern"].get("Regex", ""))
            whole = steps[0]["behavior"] == "Isolated" and not steps[0].get("invert")
            if found and whole and normalizer in ((None, "NFC") if found == "qwen2" else (None,)):
                return found
    known = ", ".join(["gpt-2", "smollm", *_REGEXES.values()])
    raise Unexportable(
        f"GGUF: the way this tokenizer splits text ({', '.join(map(str, kinds))}) is none of those "
        f"this export knows llama.cpp's name for ({known})"
    )


def _inside(index: int, vocab_size: int) -> int:
    if index >= vocab_size:
        raise Unexportable(f"GGUF: token id {index} has no row in the embedding ({vocab_size})")
    return index
