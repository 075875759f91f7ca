"""An output folder that grows beside its final place and survives a kill."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich import filesize

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, write_json

MANIFEST = ".posenc_partial.json"
_LOCK = ".posenc_lock"
_OURS = (_LOCK, f".{MANIFEST}.")  # the second: a manifest that was being written


def check_target(target: Path, source: Path) -> None:
    """Refuse an output that exists, or lies inside its source, or around it.

    Errors: `PosencError`.
    """
    if target.is_symlink():
        raise PosencError(f"{target}: is a link; give the folder itself as output")
    place, origin = target.resolve(), source.resolve()
    if place == origin or place in origin.parents or origin in place.parents:
        relation = "is" if place == origin else "contains" if place in origin.parents else "is in"
        raise PosencError(f"{target}: {relation} the source {source}; choose another output")
    if target.exists() and not target.is_dir():
        raise PosencError(f"{target}: exists and is not a folder; choose another output")
    if target.is_dir() and any(target.iterdir()):
        raise PosencError(f"{target}: exists and is not empty; remove it or choose another output")


def check_space(target: Path, size: int) -> None:
    """Refuse to start what cannot be finished: `size` bytes must fit beside `target`.

    What an earlier, killed run has written already counts as done. Errors: `PosencError`.
    """
    place = next(folder for folder in target.absolute().parents if folder.is_dir())
    written = sum(path.stat().st_size for path in _partial(target).rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free
    if size - written > free:
        raise PosencError(
            f"{target}: needs {filesize.decimal(size - written)}, but {place} has "
            f"{filesize.decimal(free)} free; make room or choose another disk"
        )


@contextmanager
def partial_folder(target: Path, identity: Mapping[str, Any], *, resume: bool) -> Iterator[Path]:
    """Yield `.TARGET.partial` beside `target`, which becomes `target` when the block succeeds.

    identity  plain JSON values that say what is being written; a folder that an earlier, killed
              run left is continued only if it was started for the same
    A block that raises an error leaves nothing behind; one that is killed or interrupted leaves
    the folder for the next run.
    Errors: `PosencError` when another process is writing there, or the folder is not ours.
    """
    partial = _partial(target)
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise PosencError(f"{partial}: is in the way; remove it")
    partial.mkdir(parents=True, exist_ok=True)
    foreign = any(not path.name.startswith(_OURS) for path in partial.iterdir())
    if foreign and not (partial / MANIFEST).is_file():
        raise PosencError(f"{partial}: was not left by a conversion; remove it")
    lock = FileLock(partial / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise PosencError(f"{partial}: another conversion is writing there") from None
    try:
        with _removed_on_error(partial):
            same = resume and _manifest(partial) == dict(identity)
            _empty(partial, keep=".safetensors" if same else MANIFEST)
            write_json(partial / MANIFEST, dict(identity))
            yield partial
            _flush(partial)
        # A kill between these lines leaves a complete folder and two small hidden files in it.
        partial.replace(target)
        (target / MANIFEST).unlink()
        (target / _LOCK).unlink(missing_ok=True)
    finally:
        lock.release()


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _manifest(partial: Path) -> Any:
    try:
        return read_json(partial / MANIFEST)
    except PosencError:
        return None


def _empty(partial: Path, *, keep: str) -> None:
    # The manifest goes last, by being replaced: leftovers never stand beside one they do not match.
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (_LOCK, MANIFEST) and not path.name.endswith(keep):
            path.unlink()


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
