"""The header of a safetensors file, read without trusting it and without mapping the file.

Layout (github.com/huggingface/safetensors): 8 bytes little-endian header length, that many bytes
of JSON, then the data of all tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError

_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: its bytes are [start, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One checked safetensors file: its tensors in file order cover everything after the header.

    `fingerprint` is (size, mtime in ns, SHA-256 of the header): it changes when the file does.
    """

    path: Path
    name: str
    tensors: tuple[StoredTensor, ...]
    fingerprint: tuple[int, int, str]

    @property
    def size(self) -> int:
        return self.fingerprint[0]


def read_shard(path: Path, name: str) -> Shard:
    """Read and check the header of `path`, which is called `name` in its checkpoint.

    Errors: `PosencError` naming the file for anything the format does not allow: a wrong length,
    damaged JSON, a repeated name, tensors that overlap, leave gaps or do not fill their bytes.
    """
    with path.open("rb") as file:
        status = path.stat()
        header = _header(file, status.st_size, path)
    entries = _parse(header, path)
    offset = 8 + len(header)
    tensors = sorted(
        (_tensor(key, value, offset, path) for key, value in entries.items()),
        key=lambda tensor: (tensor.start, tensor.end),
    )
    _check_cover(tensors, offset, status.st_size, path)
    digest = hashlib.sha256(header).hexdigest()
    return Shard(path, name, tuple(tensors), (status.st_size, status.st_mtime_ns, digest))


def _header(file: Any, size: int, path: Path) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise PosencError(
            f"{path}: truncated or not a safetensors file (header of {length} bytes in a file of "
            f"{size}); fetch it again"
        )
    header: bytes = file.read(length)
    return header


def _parse(header: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise PosencError(f"{path}: its header names {twice!r} twice; the file is damaged")
        return result

    try:
        value = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PosencError(f"{path}: damaged safetensors header ({error})") from None
    if not isinstance(value, dict):
        raise PosencError(f"{path}: damaged safetensors header (not a JSON object)")
    value.pop("__metadata__", None)
    return value


def _tensor(name: str, value: Any, offset: int, path: Path) -> StoredTensor:
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        bits = _BITS[dtype]
    except (KeyError, TypeError, ValueError):
        whole, dtype, shape, start, end, bits = False, "", (), 0, 0, 0
    if not whole:
        raise PosencError(f"{path}: damaged entry for tensor {name!r} in its header")
    if 8 * (end - start) != math.prod(shape) * bits:
        raise PosencError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} cannot fill {end - start} bytes; "
            "the header is damaged"
        )
    return StoredTensor(name, dtype, tuple(shape), offset + start, offset + end)


def _check_cover(tensors: list[StoredTensor], offset: int, size: int, path: Path) -> None:
    reached, previous = offset, "the header"
    for tensor in tensors:
        if tensor.start != reached:
            what = "overlaps" if tensor.start < reached else "leaves a gap after"
            raise PosencError(f"{path}: tensor {tensor.name!r} {what} {previous}; it is damaged")
        reached, previous = tensor.end, repr(tensor.name)
    if reached != size:
        what = "truncated" if reached > size else "longer than its header says"
        raise PosencError(
            f"{path}: {what} ({size} bytes, its tensors end at {reached}); fetch it again"
        )
