"""Log-probabilities of answer tokens, computed for the answer rows alone.

A row is a sequence of T token ids; its last n positions predict the n answer tokens. The head runs
on those n positions only, the softmax in float32, so nothing of size [T, vocabulary] is ever held.
Rows that begin alike share the key/value cache of what they have in common.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from hf_posenc.evaluation.answer import Answer
from hf_posenc.runtime import families
from hf_posenc.runtime.patch import get_plan

# Answer rows per forward: bounds the logits held at once (2048 x 150k words in bf16: 0.6 GB).
ROWS_PER_FORWARD = 2048
_SOFTMAX_ROWS = 256

_log = logging.getLogger(__name__)


class PrefixScorer:
    """Scores rows one after another and keeps the key/value cache of the last one.

    Call it with rows in lexicographic order of their ids to make the most of the cache. Reuse is
    dropped, with a warning, where a cropped cache would not give the same numbers.
    `prefill_chunk` bounds the tokens per forward.
    """

    def __init__(self, model: Any, *, reuse: bool = True, prefill_chunk: int | None = None) -> None:
        self.model = model
        self.whole_rows = why_whole_rows(model)
        self.no_reuse = self.whole_rows or why_no_reuse(model)
        if reuse and self.no_reuse:
            _log.warning("prefix reuse is off: %s", self.no_reuse)
        if prefill_chunk and self.whole_rows:
            _log.warning("prefill in chunks is off: %s", self.whole_rows)
        self.reuse = reuse and self.no_reuse is None
        self.prefill_chunk = prefill_chunk
        self.tokens_computed = 0
        self.tokens_reused = 0
        self._cache: DynamicCache | None = None
        self._held: Sequence[int] = ()

    def release(self) -> None:
        """Drop the cache."""
        self._cache, self._held = None, ()

    @torch.no_grad()
    def score(self, row: Sequence[int], targets: Sequence[Sequence[int]]) -> list[Answer]:
        """One answer for each of `targets`, all of which have the same number n of tokens."""
        n, total = len(targets[0]), len(row)
        kept = self._prepare(row, n)
        # Until the row is done, what the cache holds is in between.
        self._held = ()
        ids = torch.tensor([list(row)], device=self.model.device)
        wanted = torch.tensor([list(target) for target in targets], device=self.model.device).T
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start, stop, rows in self._pieces(kept, total, n):
            extra = {} if self._cache is None else {"cache": self._cache}
            output = self.model(
                input_ids=ids[:, start:stop],
                use_cache=self._cache is not None,
                logits_to_keep=max(rows, 1),
                **extra,
            )
            if rows:
                done = sum(len(part[0]) for part in parts)
                parts.append(_gather(output.logits[0], wanted[done : done + rows]))
        self.tokens_computed += total - kept
        self.tokens_reused += kept
        self._held = row if self.reuse else ()
        if not self.reuse:
            self._cache = None
        return _answers(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    @torch.no_grad()
    def score_batch(
        self, rows: Sequence[Sequence[int]], targets: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Answer]]:
        """The same for several rows in one forward, padded on the right, without a cache.

        Exact under causal attention, where no token sees the padding behind it; use it only if
        `whole_rows` is None.
        """
        longest = max(map(len, rows))
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(list(row))
        keep = max(longest - len(r) + len(t[0]) for r, t in zip(rows, targets, strict=True))
        logits = self.model(
            input_ids=ids.to(self.model.device), use_cache=False, logits_to_keep=keep
        ).logits
        self.tokens_computed += sum(map(len, rows))
        answers = []
        for row_logits, row, target in zip(logits, rows, targets, strict=True):
            stop = keep - (longest - len(row))
            wanted = torch.tensor([list(t) for t in target], device=logits.device).T
            answers.append(_answers(*_gather(row_logits[stop - len(wanted) : stop], wanted)))
        return answers

    def _prepare(self, row: Sequence[int], n: int) -> int:
        """Bring the cache to the longest usable prefix of `row`; how many tokens it holds then."""
        kept = min(common_prefix(self._held, row), len(row) - n) if self._cache else 0
        # Queries on a filled cache need an explicit mask, so a short prefix is not worth it.
        if kept * 2 < len(row):
            self.release()
            kept = 0
        elif self._cache is not None and len(self._held) > kept:
            self._cache.crop(kept - len(self._held))
        pieces = not self.whole_rows and (self.prefill_chunk or n > ROWS_PER_FORWARD)
        if self._cache is None and (self.reuse or pieces):
            self._cache = new_cache(self.model)
        return kept

    def _pieces(self, kept: int, total: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Positions [start, stop) of each forward and how many of its last ones are answer rows."""
        if self.whole_rows:
            yield 0, total, n
            return
        first, start = total - n, kept
        while start < total:
            stop = min(total, max(start, first) + ROWS_PER_FORWARD)
            if self.prefill_chunk:
                stop = min(stop, start + self.prefill_chunk)
            yield start, stop, max(0, stop - max(start, first))
            start = stop


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items `a` and `b` share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def why_whole_rows(model: Any) -> str | None:
    """Why a row must be computed in one forward, or None.

    Frequencies that depend on the length of the row make keys of a shorter row wrong for a longer
    one.
    """
    plan = get_plan(model)
    if plan is not None:
        stretched = any(layer.stretch is not None for layer in plan.layers)
    else:
        stretched = bool({"dynamic", "longrope"} & set(_rope_types(model.config)))
    return "the rotary frequencies depend on the row's length" if stretched else None


def new_cache(model: Any) -> DynamicCache:
    """An empty cache that can be cut back where the model allows it.

    Windows of a plan are masks over whatever is cached, so layers that the checkpoint itself left
    without a window may keep every key.
    """
    stock = DynamicCache(config=families.stock_config(model.config))
    return DynamicCache(config=model.config) if any(stock.is_sliding) else stock


def why_no_reuse(model: Any) -> str | None:
    """Why a cache cannot be cut back to a prefix exactly, or None."""
    cache = new_cache(model)
    if any(cache.is_sliding):
        return "sliding-window layers forget what a shorter prefix needs"
    if not cache.is_croppable:
        return "some layers keep a state that cannot be cut back"
    return None


def _rope_types(config: Any) -> Iterator[str]:
    nested = [getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}]
    while nested:
        for key, value in nested.pop().items():
            if isinstance(value, dict):
                nested.append(value)
            elif key == "rope_type":
                yield value


def _gather(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of, and greedy match with, `wanted` [rows, answers] in `logits` [rows, V]."""
    logprobs, greedy = [], []
    for part, want in zip(logits.split(_SOFTMAX_ROWS), wanted.split(_SOFTMAX_ROWS), strict=True):
        logprobs.append(part.float().log_softmax(-1).gather(-1, want).cpu())
        greedy.append((part.argmax(-1, keepdim=True) == want).cpu())
    return torch.cat(logprobs), torch.cat(greedy)


def _answers(logprobs: torch.Tensor, greedy: torch.Tensor) -> list[Answer]:
    return [
        Answer(values.tolist(), hits.tolist())
        for values, hits in zip(logprobs.T, greedy.T, strict=True)
    ]
