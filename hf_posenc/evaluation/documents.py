"""Evaluation documents, deterministic and sized in tokens of the model at hand.

A document depends on (seed, kind, length, index) and the text alone: not on how many others are
built, in which order, or what the process did before. Prompt and answer together have at most
`length` tokens, special tokens of the tokenizer included, and fall short by a few at most.

The needle templates are those of RULER (arXiv 2404.06654).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.texts import fit, split_words, windows
from hf_posenc.evaluation.words import key_word, magic_number

TEMPLATE = (
    "A special magic number is hidden within the following text. "
    "Make sure to memorize it. I will quiz you about the number afterwards.\n{haystack}\n"
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
REPEATED = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
# Depth strata in an order that spreads from the first documents on.
_STRATA = (0, 4, 2, 6, 1, 5, 3, 7)
_CHOICES = 4

Document = dict[str, Any]


@dataclass(frozen=True)
class Sizer:
    """Counts tokens the way lm-eval's models encode a prompt."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Token ids with the tokenizer's own special tokens."""
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def count(self, text: str) -> int:
        """Number of tokens of `text`."""
        return len(self.encode(text))

    def lead(self, prompt: str, answer: str) -> int:
        """How many tokens the answer opens with that are white space and nothing else."""
        continuation = self.encode(prompt + answer)[self.count(prompt) :]
        blank = 0
        for token in continuation[:-1]:
            if self.tokenizer.decode([token]).strip():
                break
            blank += 1
        return blank


def perplexity_documents(sizer: Sizer, text: str, length: int) -> Iterator[Document]:
    """Consecutive windows of `length` tokens; the first word is given, the rest is scored."""
    for index, window in enumerate(windows(split_words(text), sizer.count, length)):
        first = window.split(maxsplit=1)[0]
        yield {
            "prompt": first,
            "answer": window[len(first) :],
            "n_tokens": sizer.count(window),
            "haystack": index,
        }


def copy_documents(sizer: Sizer, text: str, length: int) -> Iterator[Document]:
    """A passage of the text, a blank line, and the same passage again, which is scored."""
    space = length - sizer.count("a\n\na")
    for index, passage in enumerate(windows(split_words(text), sizer.count, max(1, space // 2))):
        answer = "\n\n" + passage
        words = split_words(passage)
        while sizer.count(passage + answer) > length:
            words.pop()
            passage = "".join(words).rstrip()
            answer = "\n\n" + passage
        yield {
            "prompt": passage,
            "answer": answer,
            "n_tokens": sizer.count(passage + answer),
            "lead": sizer.lead(passage, answer),
            "haystack": index,
        }


def single_needle_documents(sizer: Sizer, length: int, seed: int) -> Iterator[Document]:
    """One needle in a short passage repeated over and over, one probe per haystack."""
    unit = split_words(REPEATED)

    def haystack(n: int) -> list[str]:
        lines, rest = divmod(n, len(unit))
        return [REPEATED] * lines + (["".join(unit[:rest]).rstrip()] if rest else [])

    for index in itertools.count():
        rng = random.Random(f"{seed}|niah_single|{length}|{index}")
        depth = (_STRATA[index % len(_STRATA)] + rng.random()) / len(_STRATA)
        yield from _needles(
            sizer, "niah_single", length, index, rng, haystack, depths=[depth], joiner="\n"
        )


def essay_needle_documents(
    sizer: Sizer, text: str, length: int, seed: int, *, probes: int = 8
) -> Iterator[Document]:
    """`probes` needles at stratified depths of running text, each asked for once.

    All probes of a haystack share the text up to the question, so that its key/value cache can
    be reused.
    """
    words = text.split()
    for index in itertools.count():
        rng = random.Random(f"{seed}|niah_essay|{length}|{index}")
        start = rng.randrange(len(words))
        run = [words[(start + offset) % len(words)] for offset in range(length)]
        depths = [(stratum + rng.random()) / probes for stratum in range(probes)]

        def haystack(n: int, run: list[str] = run) -> list[str]:
            return re.split(r"(?<=[.!?]) ", " ".join(run[:n])) if n else []

        yield from _needles(
            sizer, "niah_essay", length, index, rng, haystack, depths=depths, joiner=" "
        )


def take(documents: Iterator[Document], count: int | None, what: str) -> list[Document]:
    """The first `count` documents; a `PosencError` when the text does not yield a single one."""
    taken = list(itertools.islice(documents, count))
    if not taken:
        raise PosencError(
            f"{what}: the text is shorter than one document of this length; "
            "choose a shorter length or a longer text"
        )
    return taken


def _needles(
    sizer: Sizer,
    kind: str,
    length: int,
    index: int,
    rng: random.Random,
    haystack: Callable[[int], list[str]],
    *,
    depths: list[float],
    joiner: str,
) -> Iterator[Document]:
    """The probes of one haystack of n words, n as large as the longest probe allows."""
    keys, values = _distinct(key_word, rng, len(depths)), _distinct(magic_number, rng, len(depths))
    needles = [NEEDLE.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]

    def context(n: int) -> str:
        return joiner.join(_insert(haystack(n), needles, depths))

    ranked = sorted(keys, key=lambda key: sizer.count(" " + key), reverse=True)
    longest_value = max(values, key=lambda value: sizer.count(" " + value))

    def tokens(n: int, asked: list[str]) -> int:
        body = context(n)
        return max(sizer.count(_ask(body, key) + " " + longest_value) for key in asked)

    if tokens(0, keys) > length:
        raise PosencError(
            f"{kind}: length {length} is too short for {len(needles)} needle(s) and the question; "
            f"use {tokens(0, keys)} or more"
        )
    size = fit(lambda n: tokens(n, ranked[:1]), length, length)
    while size > 0 and tokens(size, keys) > length:
        size -= 1
    body = context(size)
    for probe, (key, value) in enumerate(zip(keys, values, strict=True)):
        others = [other for other in values if other != value]
        rng.shuffle(others)
        text = _ask(body, key)
        yield {
            "prompt": text,
            "answer": " " + value,
            "choices": [value, *others[: _CHOICES - 1]],
            "depth": body.index(needles[probe]) / max(1, len(body) - len(needles[probe])),
            "n_tokens": sizer.count(text + " " + value),
            "lead": sizer.lead(text, " " + value),
            "haystack": index,
        }


def _ask(haystack: str, key: str) -> str:
    return TEMPLATE.format(haystack=haystack, key=key)


def _insert(units: list[str], needles: list[str], depths: list[float]) -> list[str]:
    """`units` with each needle put in before the unit at its depth (0 start, 1 end)."""
    result: list[str] = []
    last = 0
    for depth, needle in sorted(zip(depths, needles, strict=True)):
        place = int(depth * (len(units) + 1))
        result += [*units[last:place], needle]
        last = place
    return result + units[last:]


def _distinct(draw: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    drawn: list[str] = []
    while len(drawn) < count:
        candidate = draw(rng)
        if candidate not in drawn:
            drawn.append(candidate)
    return drawn
