"""A calibration for someone who waits: a bar on stderr, and in the result what it was made on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from hf_posenc.calibration import measure
from hf_posenc.calibration.record import STATISTICS, Calibration
from hf_posenc.provenance import unplaced


def calibrate_watched(
    model: Any,
    rows: Tensor,
    *,
    sources: Sequence[str],
    label: str,
    statistics: Sequence[str] = STATISTICS,
    seed: int = 0,
) -> Calibration:
    """`calibrate` on rows [N, T] of the text `sources`, which the provenance names.

    label  what stands before the bar
    """
    with progress_bar(label) as progress:
        found = measure.calibrate(model, rows, statistics=statistics, seed=seed, progress=progress)
    made = {**found.provenance, "texts": [unplaced(source) for source in sources]}
    return dataclasses.replace(found, provenance=made)


@contextmanager
def progress_bar(label: str) -> Iterator[measure.Progress]:
    """A bar on stderr; gives what `calibrate` and `plan_search` take as `progress`."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=1.0, note="")

        def update(share: float, text: str) -> None:
            bar.update(task, completed=share, note=text)

        yield update
