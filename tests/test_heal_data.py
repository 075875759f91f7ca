"""Packing, mixing, splits: rows from documents."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from heal_case import word_tokenizer, words, write_texts
from tiny_models import difference, tiny_model, tokens

from hf_posenc.errors import PosencError
from hf_posenc.heal import data
from hf_posenc.heal.data import IGNORED, PackedRows, collate, heldout_rows, make_row, pack
from hf_posenc.heal.objective import predicted
from hf_posenc.heal.sections import DataSection, Source
from hf_posenc.runtime.patch import patch_model
from hf_posenc.sources import Document


def _data(
    *sources: Path, row_tokens: int = 32, split: str = "train", **weights: float
) -> DataSection:
    return DataSection(
        sources=tuple(
            Source(source=str(path), weight=weights.get(path.name, 1.0)) for path in sources
        ),
        row_tokens=row_tokens,
        split=split,  # type: ignore[arg-type]
    )


def _take(rows: PackedRows, count: int) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(rows, count))


def _ids(rows: PackedRows) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in _take(rows, 30)]


def test_a_row_restarts_positions_and_predicts_nothing_across_a_border() -> None:
    row = make_row([[5, 6, 7], [8], [9, 10]])
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 0, 1]
    assert row["labels"].tolist() == [IGNORED, 6, 7, IGNORED, IGNORED, 10]
    mask, targets = predicted(row["labels"][None])
    assert mask.tolist() == [[True, True, False, False, True, False]]
    assert targets.tolist() == [6, 7, 10]


def test_pack_keeps_every_token_once_and_in_order() -> None:
    pieces = [list(range(10, 15)), list(range(20, 28)), list(range(30, 33)), [40], [50] * 9]
    rows = list(pack(pieces, 8))
    full = [row for row in rows if row["input_ids"].tolist() == list(range(20, 28))]
    assert len(full) == 1 and full[0]["position_ids"].tolist() == list(range(8))
    rest = [row["input_ids"].tolist() for row in rows if row is not full[0]]
    assert rest == [[10, 11, 12, 13, 14, 30, 31, 32], [40, *[50] * 7]]
    assert all(len(row["input_ids"]) == 8 for row in rows)


def test_every_piece_starts_with_what_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    for name in "ab":  # the first file of a folder is held out
        (folder / f"{name}.txt").write_text(words([10 + i % 90 for i in range(70)]))
    row, *_ = _take(PackedRows(_data(folder), word_tokenizer(bos=True), seed=0), 5)
    starts = row["position_ids"] == 0
    assert (row["input_ids"][starts] == 1).all()
    assert (row["input_ids"] == 1).sum() == starts.sum()
    assert (row["labels"][starts] == IGNORED).all()


def test_rows_depend_on_the_seed_alone(tmp_path: Path) -> None:
    section = _data(write_texts(tmp_path / "texts"))
    first, again, other = (
        [
            row["input_ids"].tolist()
            for row in _take(PackedRows(section, word_tokenizer(), seed=s), 40)
        ]
        for s in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_a_second_pass_has_the_same_tokens_in_another_order(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", lengths=(8,) + (16,) * 15)
    rows = _take(PackedRows(_data(folder, row_tokens=16), word_tokenizer(), seed=0), 24)
    passes = [[row["input_ids"].tolist() for row in part] for part in (rows[:12], rows[12:])]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])


def test_weights_are_shares_of_tokens(tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    write_texts(long, lengths=(200,) * 10)
    write_texts(short, lengths=(9,) * 50)
    for folder, token in ((long, 100), (short, 50)):
        for path in folder.iterdir():
            path.write_text(words([token] * len(path.read_text().split())))
    section = _data(long, short, short=3.0, long=1.0)
    seen = Counter(
        token
        for row in _take(PackedRows(section, word_tokenizer(), seed=0), 200)
        for token in row["input_ids"].tolist()
    )
    assert seen[50] / (seen[50] + seen[100]) == pytest.approx(0.75, abs=0.02)


def test_held_out_text_never_trains(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(10):
        (folder / f"{index:02d}.txt").write_text(words([10 + index] * 40))
    held = {token for row in heldout_rows(_data(folder), word_tokenizer(), count=99)
            for token in row["input_ids"].tolist()}  # fmt: skip
    trained = {token for row in _take(PackedRows(_data(folder), word_tokenizer(), seed=0), 60)
               for token in row["input_ids"].tolist()}  # fmt: skip
    assert held == {10, 15}
    assert trained == set(range(10, 20)) - held


def test_a_stream_is_never_held_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def endless(source: str, *, split: str) -> Iterator[Document]:
        nonlocal read
        for read in itertools.count(1):
            yield Document(str(read), words([3 + read % 100] * 40))

    monkeypatch.setattr(data, "iter_texts", endless)
    section = DataSection(sources=(Source(source="hub:owner/name"),), row_tokens=32, split="train")
    first, again, other = (
        [
            row["input_ids"].tolist()
            for row in _take(PackedRows(section, word_tokenizer(), seed=s), 9)
        ]
        for s in (0, 0, 1)
    )
    assert first == again != other
    assert read < data._SHUFFLE_BUFFER + 50


def test_a_stream_that_ends_starts_over_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(source: str, *, split: str) -> Iterator[Document]:
        return (Document(str(i), words([10 + i] * 16)) for i in range(20))

    monkeypatch.setattr(data, "iter_texts", short)
    section = DataSection(sources=(Source(source="hub:a/b"),), row_tokens=16, split="train")
    rows = _take(PackedRows(section, word_tokenizer(), seed=0), 40)
    order = [int(row["input_ids"][0]) for row in rows]
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(10, 30))
    assert order[:20] != order[20:]


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", lengths=(500, 20, 20))
    with pytest.raises(PosencError, match=r"train split has 40 tokens.*row of 64.*row_tokens"):
        next(iter(PackedRows(_data(folder, row_tokens=64), word_tokenizer(), seed=0)))


def test_nothing_is_held_out_of_everything(tmp_path: Path) -> None:
    section = _data(write_texts(tmp_path / "texts"), split="all")
    with pytest.raises(PosencError, match="heldout_rows"):
        heldout_rows(section, word_tokenizer(), count=1)
    assert heldout_rows(section, word_tokenizer(), count=0) == []


@pytest.mark.parametrize("scheme", [None, "nope_interleaved", "p_rope"])
@pytest.mark.parametrize(
    "attn", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_documents_in_a_row_do_not_see_each_other(
    family: str, attn: str, scheme: str | None
) -> None:
    model = tiny_model(family, attn=attn)
    if scheme is not None:
        patch_model(model, scheme)
    a, b, c = (tokens(1, length, seed=length)[0].tolist() for length in (8, 12, 20))
    batch = collate([make_row([a, b]), make_row([c])])
    with torch.no_grad():
        packed = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=None,
            use_cache=False,
        ).logits
        alone = [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in (a, b, c)
        ]
    assert difference(packed[0, :8], alone[0]) < 1e-4
    assert difference(packed[0, 8:], alone[1]) < 1e-4
    assert difference(packed[1], alone[2]) < 1e-4
    with torch.no_grad():
        seen = model(input_ids=batch["input_ids"][:1], use_cache=False).logits
    assert difference(seen[0, 8:], alone[1]) > 1e-2
