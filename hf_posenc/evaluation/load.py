"""Loading lm-eval tasks, so that what cannot run is said before a model is loaded."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from hf_posenc import resources
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.statistics import bin_metric, position_bins
from hf_posenc.evaluation.suites import SUITES, PlannedTask
from hf_posenc.evaluation.tasks import KINDS


def own_tasks(
    planned: Sequence[PlannedTask], metadata: Mapping[str, Any]
) -> tuple[TaskManager, list[Any]]:
    """Our tasks with their documents built, and the manager they come from."""
    counts = {task.name: task.count for task in planned}
    folder = resources.tasks_dir()
    manager = TaskManager(
        include_path=str(folder),
        include_defaults=False,
        metadata={**metadata, "counts": counts},
    )
    # Lengths without a file of their own are made from the kind's base file.
    specs = [t.name if t.name in manager.all_tasks else _inline(t, folder) for t in planned]
    with quiet("lm_eval"):
        tasks = list(manager.load(specs)["tasks"].values())
    for task in tasks:
        # lm-eval copies the configuration into its results; the tokenizer has no place there.
        task.config.metadata.pop("tokenizer")
    return manager, tasks


def check_foreign(names: Sequence[str]) -> None:
    """Refuse a name that lm-eval does not know either, naming the closest one."""
    for name in names:
        manager, _ = _lm_eval_manager()
        if name not in manager.task_index and not Path(name).is_file():
            ours = [*SUITES, *KINDS]
            close = difflib.get_close_matches(name, [*ours, *manager.all_tasks], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`lm-eval ls tasks` lists more"
            raise PosencError(f"unknown task {name!r}; ours are {', '.join(ours)}; {hint}")


def foreign_tasks(
    names: Sequence[str], tokenizer: Any, lengths: Sequence[int] | None
) -> tuple[TaskManager, list[Any]]:
    """lm-eval's own tasks with their data; `PosencError` when data cannot be had.

    Tasks that size their own prompts (RULER) are given the tokenizer's path and `lengths`.
    """
    manager, metadata = _lm_eval_manager()
    metadata.clear()
    metadata["tokenizer"] = getattr(tokenizer, "name_or_path", None)
    if lengths:
        metadata["max_seq_lengths"] = list(lengths)
    tasks: dict[str, Any] = {}
    for name in names:
        try:
            tasks |= manager.load([name])["tasks"]
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise PosencError(
                f"task {name!r} cannot be loaded ({type(error).__name__}: {reason}); it may "
                "need a download or a package: fetch its data first, or leave it out"
            ) from error
    return manager, list(tasks.values())


@functools.cache
def _lm_eval_manager() -> tuple[TaskManager, dict[str, Any]]:
    """lm-eval's index of its thousands of task files (seconds to read), and its metadata.

    The manager keeps the dictionary itself and reads it whenever it loads a task.
    """
    metadata: dict[str, Any] = {"tokenizer": None}
    return TaskManager(metadata=metadata), metadata


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Keep a logger to errors for the time of a block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _inline(task: PlannedTask, folder: Path) -> dict[str, Any]:
    config = dict(load_yaml(folder / f"_{task.kind}"))
    if task.kind == "ppl_bins":
        names = ["nll", *(bin_metric(bounds) for bounds in position_bins(task.length))]
        config["metric_list"] = [
            {"metric": name, "aggregation": "mean", "higher_is_better": False} for name in names
        ]
    kwargs = {"kind": task.kind, "length": task.length}
    return {**config, "task": task.name, "dataset_kwargs": kwargs}
