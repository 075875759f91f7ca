"""Writing a shard that differs from its source only in the order of some rows."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from hf_posenc.checkpoint.permute import Order, permute_heads
from hf_posenc.checkpoint.safe_reader import Shard, StoredTensor
from hf_posenc.errors import PosencError

_PIECE = 16 * 2**20  # bytes in memory at a time
_STEP = 64 * 2**20  # bytes per call to the kernel, so that progress moves and Ctrl-C works
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}

Advance = Callable[[int], None]


def write_shard(shard: Shard, target: Path, orders: Mapping[str, Order], advance: Advance) -> None:
    """Copy `shard` to `target`, the features of each head re-ordered in the tensors of `orders`.

    Header and layout stay: same names, dtypes and offsets. `target` is on disk on return, and
    never exists half-written. `advance` is called with numbers of bytes as they are written.
    """
    part = target.with_name(f"{target.name}.part")
    with shard.path.open("rb", buffering=0) as source, part.open("wb", buffering=0) as output:
        reached = 0
        for tensor in shard.tensors:
            if tensor.name not in orders:
                continue
            copy_bytes(source, output, reached, tensor.start - reached, advance)
            _write_reordered(source, output, tensor, orders[tensor.name], advance)
            reached = tensor.end
        copy_bytes(source, output, reached, shard.size - reached, advance)
        os.fsync(output.fileno())
    part.replace(target)


def copy_bytes(
    source: BinaryIO, output: BinaryIO, start: int, length: int, advance: Advance
) -> None:
    """Append `length` bytes of `source` from `start` on to `output`, inside the kernel if it can.

    Errors: `PosencError` when the source ends before.
    """
    kernel = hasattr(os, "copy_file_range")
    while length:
        done = 0
        if kernel:
            try:
                done = os.copy_file_range(
                    source.fileno(), output.fileno(), min(length, _STEP), offset_src=start
                )
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
            kernel = done > 0
        if not done:
            done = min(length, _PIECE)
            _write_all(output, _read(source, start, done))
        start, length = start + done, length - done
        advance(done)


def _write_reordered(
    source: BinaryIO, output: BinaryIO, tensor: StoredTensor, order: Order, advance: Advance
) -> None:
    row = tensor.nbytes // tensor.shape[0]
    head = row * len(order)
    step = head * max(1, _PIECE // head)
    unit = _widest(row)
    for start in range(tensor.start, tensor.end, step):
        length = min(step, tensor.end - start)
        rows = torch.frombuffer(_read(source, start, length), dtype=unit)
        moved = permute_heads(rows.view(length // row, row // unit.itemsize), order)
        _write_all(output, moved.view(torch.uint8).numpy())
        advance(length)


def _widest(row: int) -> torch.dtype:
    # Bytes are moved, not numbers; wide units are several times faster.
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return next(dtype for size, dtype in sizes.items() if row % size == 0)


def _read(source: BinaryIO, start: int, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    source.seek(start)
    while view:
        done = source.readinto(view)  # type: ignore[attr-defined]
        if not done:
            raise PosencError(f"{source.name}: became shorter while it was read")
        view = view[done:]
    return data


def _write_all(output: BinaryIO, data: object) -> None:
    view = memoryview(data).cast("B")  # type: ignore[arg-type]
    while view:
        view = view[output.write(view) :]
