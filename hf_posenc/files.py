"""Writing to disk so that a reader never meets a half-written file or folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` under a temporary name beside `path`, then rename it into place."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Write `data` under a temporary name beside `path`, then rename it into place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write `value` as indented JSON; NaN and infinities are refused, since JSON has none."""
    return write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read a JSON file; a missing or corrupt one is a `PosencError` that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PosencError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise PosencError(f"{path}: is a folder, not a JSON file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PosencError(f"{path}: not valid JSON ({error}); restore or re-create it") from None


@contextmanager
def staged_directory(target: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` only if the block succeeds.

    Errors: `PosencError` when `target` exists and is not empty, unless `overwrite`.
    """
    target = Path(target)
    if target.exists() and not target.is_dir():
        raise PosencError(f"{target}: exists and is not a folder; choose another output")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise PosencError(f"{target}: exists and is not empty; remove it or choose another output")
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        stage.chmod(0o777 & ~_umask())
        yield stage
        if target.is_dir():
            shutil.rmtree(target)
        stage.replace(target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
