"""A model folder as a source of weights: which files belong to it, checked before any is copied."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.safe_reader import Shard, StoredTensor, read_shard
from hf_posenc.errors import PosencError
from hf_posenc.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What a reader needs besides weights and config. Pickles, code, other weights stay behind.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    *("LICEN[CS]E*", "COPYING*", "NOTICE*", "USE_POLICY*"),
)
_NEVER = ("*.py", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.pkl", "*.gguf", "*.npz")


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """The checked parts of a checkpoint.

    shards          in order of their names
    index_metadata  of the index file, None for a single file without one
    companions      real path of every file that goes along, by its name relative to the folder
    left_out        names of files that do not
    """

    path: Path
    shards: tuple[Shard, ...]
    index_metadata: dict[str, Any] | None
    companions: dict[str, Path]
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    def tensors(self) -> Iterator[tuple[Shard, StoredTensor]]:
        """Every tensor with its shard."""
        for shard in self.shards:
            for tensor in shard.tensors:
                yield shard, tensor


def read_source(folder: Path, *, keep_code: bool = False) -> SourceFolder:
    """Find and check the files of a checkpoint; only headers of weights are read.

    keep_code  also take the folder's Python files along
    Symbolic links are followed when they end inside `folder`, or, when `folder` is a snapshot of
    the hub cache (models--*/snapshots/REVISION), in that model's own blobs.
    Errors: `PosencError` for everything that is missing, damaged, ambiguous or points elsewhere.
    """
    folder = folder.resolve()
    metadata: dict[str, Any] | None = None
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        if (folder / SINGLE).exists():
            raise PosencError(
                f"{folder}: holds both {SINGLE} and {INDEX}, and engines differ in which they "
                "read; remove the one that is not the model"
            )
        weight_map, metadata = _read_index(folder)
        names = sorted(set(weight_map.values()))
    else:
        weight_map, names = {}, [SINGLE]
        _check_single(folder)
    shards = tuple(read_shard(real_file(folder, name), name) for name in names)
    _check_names(shards, weight_map)
    written_anew = {"config.json", "README.md", INDEX, *names}
    companions, left_out = _companions(folder, written_anew, keep_code)
    return SourceFolder(folder, shards, metadata, companions, left_out)


def real_file(folder: Path, name: str) -> Path:
    """The regular file `name` of a resolved `folder`, links followed as `read_source` says.

    Errors: `PosencError` when there is none, or it lies elsewhere.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        what = "a broken link" if path.is_symlink() else "missing"
        raise PosencError(f"{path}: {what}; fetch the checkpoint again") from None
    except RuntimeError:
        raise PosencError(f"{path}: a link that leads back to itself") from None
    if not any(real.is_relative_to(root) for root in _allowed_roots(folder)):
        raise PosencError(
            f"{path}: a link that leaves the folder (to {real}); put the file itself there"
        )
    if not stat.S_ISREG(mode):
        raise PosencError(f"{path}: not a regular file")
    return real


def hub_snapshot(folder: Path) -> tuple[str, str] | None:
    """Hub id and revision when a resolved folder is a snapshot of the hub cache."""
    model = folder.parent.parent
    inside = folder.parent.name == "snapshots" and model.name.startswith("models--")
    if not inside or not (model / "blobs").is_dir():
        return None
    return model.name.removeprefix("models--").replace("--", "/"), folder.name


def _allowed_roots(folder: Path) -> tuple[Path, ...]:
    if hub_snapshot(folder) is None:
        return (folder,)
    return (folder, folder.parent.parent / "blobs")


def _read_index(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    path = folder / INDEX
    index = read_json(real_file(folder, INDEX))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    metadata = (index.get("metadata") or {}) if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise PosencError(f"{path}: has no weight_map; the index is damaged")
    for tensor, shard in weight_map.items():
        plain = isinstance(shard, str) and shard == Path(shard).name and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise PosencError(
                f"{path}: {tensor!r} points to {shard!r}, which is not a safetensors file of this "
                "folder"
            )
    return weight_map, metadata


def _check_single(folder: Path) -> None:
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return
    pickles = [*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if (folder / "adapter_config.json").is_file():
        reason = "this is an adapter; convert its base model"
    elif pickles:
        reason = "its weights are pickles; save the model as safetensors first"
    else:
        reason = "is it a model folder, completely downloaded?"
    raise PosencError(f"{folder}: has neither {SINGLE} nor {INDEX}; {reason}")


def _check_names(shards: tuple[Shard, ...], weight_map: dict[str, str]) -> None:
    owner: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in owner:
                raise PosencError(
                    f"{shard.path}: tensor {tensor.name!r} is also in {owner[tensor.name]}; "
                    "which one counts is unclear"
                )
            owner[tensor.name] = shard.name
    for name, shard_name in weight_map.items():
        if owner.get(name) != shard_name:
            raise PosencError(
                f"{INDEX}: says that {name!r} is in {shard_name}, but it is "
                f"{'in ' + owner[name] if name in owner else 'nowhere'}; fetch the checkpoint again"
            )


def _companions(
    folder: Path, written_anew: set[str], keep_code: bool
) -> tuple[dict[str, Path], tuple[str, ...]]:
    taken: dict[str, Path] = {}
    left_out: list[str] = []
    nested = folder / "additional_chat_templates"
    names = [path.name for path in folder.iterdir() if path.name != nested.name]
    if nested.is_dir():
        names += [f"{nested.name}/{path.name}" for path in nested.iterdir()]
    for name in sorted(names):
        wanted = any(fnmatch(name, pattern) for pattern in COMPANIONS)
        wanted = wanted and not any(fnmatch(name, pattern) for pattern in _NEVER)
        if wanted or (keep_code and name.endswith(".py")):
            taken[name] = real_file(folder, name)
        elif name not in written_anew and not name.startswith("."):
            left_out.append(name)
    return taken, tuple(left_out)
