"""A tiny model with its tokenizer on disk, texts, and a recipe that runs on them in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_model
from tiny_tokenizer import VOCAB_SIZE, tiny_text, tiny_tokenizer

LENGTH = 320


def save_model(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A tiny checkpoint with soft attention, so that healing has something to do."""
    values = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "scale": 3.0, **overrides}
    tiny_model(family, **values).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_texts(folder: Path, *, files: int = 5, sentences: int = 700) -> Path:
    """A folder of text files; the first and every fifth after it count as held out."""
    folder.mkdir(parents=True)
    for index in range(files):
        (folder / f"{index}.txt").write_text(tiny_text(sentences, seed=index))
    return folder


def save_recipe(path: Path, model: Path, texts: Path, **changes: str) -> Path:
    """A recipe of three healing steps and two kinds of task; `changes` replace its lines."""
    lines = {
        "model": f"{model}",
        "dtype": "float32",
        "scheme": "{name: nope_interleaved, every: 2}",
        "data": f"{{sources: ['{texts}'], row_tokens: 64}}",
        "lora": "{r: 2, alpha: 4}",
        "heal": "{tokens: 384, rows: 2, heldout_rows: 2, save_steps: 0}",
        "eval": f"{{tasks: [ppl_bins, niah_essay], lengths: [{LENGTH}], limit: 8}}",
        **changes,
    }
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return path
