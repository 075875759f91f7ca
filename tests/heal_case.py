"""What the healing tests share: a word tokenizer, texts of random words, a tiny recipe."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from calibrations import falling
from tiny_models import VOCAB, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_posenc.heal import Recipe, load_recipe
from hf_posenc.model_spec import ModelSpec
from hf_posenc.runtime.patch import patch_model


def word_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per word `w3` ... `w127`, so that ids can be read off a text."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def words(ids: list[int]) -> str:
    """The text whose tokens are `ids`."""
    return " ".join(f"w{i}" for i in ids)


def write_texts(folder: Path, *, lengths: tuple[int, ...] = (40, 90, 25, 60, 130) * 4) -> Path:
    """A folder of text files of `lengths` tokens; each repeats a short pattern, to be learnable."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for index, length in enumerate(lengths):
        pattern = [rng.randrange(3, VOCAB) for _ in range(7)]
        (folder / f"{index:03d}.txt").write_text(words((pattern * length)[:length]))
    return folder


def tiny_recipe(tmp_path: Path, *overrides: str, scheme: str = "nope_interleaved") -> Recipe:
    """A recipe of a few small steps on local texts; `overrides` come last."""
    texts = write_texts(tmp_path / "texts")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
model: tiny
dtype: float32
scheme: {{name: {scheme}}}
data: {{sources: ["{texts}"], row_tokens: 32}}
lora: {{r: 4, alpha: 8}}
heal: {{tokens: 256, rows: 2, lr: 1.0e-2, warmup: 0, heldout_rows: 2, save_steps: 0}}
"""
    )
    return load_recipe(path, overrides)


def converted(recipe: Recipe, family: str = "llama", **options: Any) -> Any:
    """A tiny model of `family` under the recipe's scheme, calibrated by hand."""
    model = tiny_model(family, **{"attn": "sdpa", **options})
    return patch_model(model, recipe.scheme, calibration=falling(ModelSpec.from_model(model)))
