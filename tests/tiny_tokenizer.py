"""A small byte-level BPE tokenizer and a text to cut documents from, both made in memory."""

from __future__ import annotations

import functools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_posenc.evaluation.documents import NEEDLE, REPEATED, TEMPLATE
from hf_posenc.evaluation.words import ADJECTIVES, NOUNS

VOCAB_SIZE = 1024


def tiny_text(sentences: int = 4000, seed: int = 0) -> str:
    """Deterministic sentences of English words in paragraphs."""
    rng = random.Random(seed)
    lines = [
        f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} saw a {rng.choice(NOUNS)}."
        + ("\n\n" if index % 7 == 6 else " ")
        for index in range(sentences)
    ]
    return "".join(lines)


@functools.lru_cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    # Digits apart, as SmolLM2: the space before a number is a token of its own.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [tiny_text(500, seed=1), NEEDLE, REPEATED, TEMPLATE, " ".join(ADJECTIVES + NOUNS)]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of at most `VOCAB_SIZE` tokens; with `bos` it opens each text with one."""
    tokenizer = Tokenizer.from_str(_trained())
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>" if bos else None
    )
