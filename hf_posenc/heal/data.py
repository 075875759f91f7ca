"""Text to training rows: packed documents that cannot see each other.

Every row holds `row_tokens` tokens of one or more documents. `position_ids` restart at 0 with each
document, from which transformers derives a block-diagonal mask (only when no attention mask and no
cache are given), and the first token of each document is not a target. Documents longer than a
row are cut into pieces, each of which counts as a document and starts with the tokenizer's BOS.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from hf_posenc.errors import PosencError
from hf_posenc.heal.sections import DataSection, Source
from hf_posenc.sources import iter_texts

IGNORED = -100
_SHUFFLE_BUFFER = 512

Row = dict[str, torch.Tensor]
Split = Literal["train", "heldout", "all"]


@dataclass(frozen=True)
class SpecialTokens:
    """What the tokenizer puts around a text by itself: `before` (BOS) and `after` (EOS)."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """Read from how the tokenizer encodes an empty text."""
        ids = tokenizer("")["input_ids"]
        before = tuple(ids[:1]) if ids and ids[0] == tokenizer.bos_token_id else ()
        rest = ids[len(before) :]
        return cls(before, tuple(rest[-1:]) if rest and rest[-1] == tokenizer.eos_token_id else ())


def make_row(documents: Sequence[Sequence[int]]) -> Row:
    """One row of whole documents: `input_ids`, `position_ids`, `labels`, each int64 [T].

    labels are the row's own tokens, -100 at the first token of each document.
    """
    return {
        "input_ids": torch.tensor([token for document in documents for token in document]),
        "position_ids": torch.cat([torch.arange(len(document)) for document in documents]),
        "labels": torch.tensor(
            [token for document in documents for token in (IGNORED, *document[1:])]
        ),
    }


def pack(
    pieces: Iterable[Sequence[int]], row_tokens: int, before: Sequence[int] = ()
) -> Iterator[Row]:
    """Rows of exactly `row_tokens`, filled in order; a piece that does not fit goes on in the next.

    A piece that fills a row by itself gets one. What is left at the end is dropped.
    """
    row: list[list[int]] = []
    room = row_tokens
    for piece in pieces:
        if len(before) + len(piece) == row_tokens:
            yield make_row([[*before, *piece]])
            continue
        rest = list(piece)
        while rest:
            document = [*before, *rest][:room]
            rest = rest[len(document) - len(before) :]
            row.append(document)
            room -= len(document)
            if room == 0:
                yield make_row(row)
                row, room = [], row_tokens


class _SourceReader:
    """Pieces of one source, at most `piece_tokens` long, without the tokens put before a text."""

    def __init__(
        self, source: Source, split: Split, tokenizer: Any, row_tokens: int, seed: int
    ) -> None:
        self.source = source
        self.split = split
        self.tokenizer = tokenizer
        self.special = SpecialTokens.of(tokenizer)
        self.row_tokens = row_tokens
        self.seed = seed

    def pieces(self, epoch: int | None) -> Iterator[list[int]]:
        """One pass over the source, shuffled by seed and epoch; in its own order for None.

        Errors: `PosencError` at the end of a pass that gave less than one row.
        """
        if epoch is None:
            yield from self._in_order()
            return
        rng = random.Random(f"{self.seed}|{self.source.source}|{epoch}")
        buffer: list[list[int]] = []
        limit = _SHUFFLE_BUFFER if is_streamed(self.source.source) else None
        for piece in self._in_order():
            buffer.append(piece)
            if limit is not None and len(buffer) > limit:
                yield _pop_random(buffer, rng)
        while buffer:
            yield _pop_random(buffer, rng)

    def _in_order(self) -> Iterator[list[int]]:
        total = 0
        for document in iter_texts(self.source.source, split=self.split):
            ids = self.tokenizer(document.text, add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            ids = [*ids, *self.special.after] if ids else []
            total += len(ids)
            length = self.row_tokens - len(self.special.before)
            for start in range(0, len(ids), length):
                yield ids[start : start + length]
        if total < self.row_tokens:
            other = ", or set heal.heldout_rows to 0" if self.split == "heldout" else ""
            raise PosencError(
                f"{self.source.source}: its {self.split} split has {total} tokens, less than one "
                f"row of {self.row_tokens}; give more text or lower data.row_tokens{other}"
            )


def is_streamed(source: str) -> bool:
    """Whether a source is read piece by piece and never held in memory as a whole."""
    return source.startswith("hub:")


def _pop_random(buffer: list[list[int]], rng: random.Random) -> list[int]:
    index = rng.randrange(len(buffer))
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()


class _Mix:
    """Pieces of several sources; each next one comes from the source furthest behind its share."""

    def __init__(self, readers: Sequence[_SourceReader], *, repeat: bool) -> None:
        self.readers = readers
        self.repeat = repeat

    def __iter__(self) -> Iterator[list[int]]:
        streams = [self._stream(reader) for reader in self.readers]
        given = [0.0] * len(streams)
        left = set(range(len(streams)))
        while left:
            index = min(left, key=lambda i: (given[i], i))
            piece = next(streams[index], None)
            if piece is None:
                left.discard(index)
                continue
            given[index] += len(piece) / self.readers[index].source.weight
            yield piece

    def _stream(self, reader: _SourceReader) -> Iterator[list[int]]:
        if not self.repeat:
            yield from reader.pieces(None)
            return
        for epoch in itertools.count():
            yield from reader.pieces(epoch)


class PackedRows(IterableDataset):
    """An endless, deterministic sequence of training rows; every iteration starts over.

    The same data section, tokenizer and seed give the same rows, so a resumed run can skip what
    it has seen. Sources are weighted by tokens and repeated, in another order, when they end.
    """

    def __init__(self, data: DataSection, tokenizer: Any, *, seed: int) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.seed = seed

    def __iter__(self) -> Iterator[Row]:
        mix = _Mix(_readers(self.data, self.data.split, self.tokenizer, self.seed), repeat=True)
        return pack(mix, self.data.row_tokens, SpecialTokens.of(self.tokenizer).before)


def heldout_rows(data: DataSection, tokenizer: Any, *, count: int) -> list[Row]:
    """The first `count` rows of the sources' held-out parts, mixed as in training, never repeated.

    Errors: `PosencError` when the recipe trains on everything, or there is not one held-out row.
    """
    if count == 0:
        return []
    if data.split == "all":
        raise PosencError(
            "data.split is 'all', so no text is held out; use 'train' or set heal.heldout_rows to 0"
        )
    mix = _Mix(_readers(data, "heldout", tokenizer, seed=0), repeat=False)
    rows = pack(mix, data.row_tokens, SpecialTokens.of(tokenizer).before)
    return list(itertools.islice(rows, count))


def _readers(data: DataSection, split: Split, tokenizer: Any, seed: int) -> list[_SourceReader]:
    return [
        _SourceReader(source, split, tokenizer, data.row_tokens, seed) for source in data.sources
    ]


def collate(rows: Sequence[Row]) -> Row:
    """Rows to one batch, each entry [B, T]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
