"""Suites, and what a user's task names mean before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.tasks import DEFAULT_COUNTS, KINDS

# The lengths that have files under eval/tasks; other lengths run through `lengths`.
LENGTHS = (1024, 2048, 4096, 8192)

# Documents per (kind, length). niah_essay asks 8 probes per haystack.
# quick: two to three CPU-minutes for a 135M model; dev: about ten.
SUITES: dict[str, dict[str, dict[int, int]]] = {
    "quick": {
        "ppl_bins": {2048: 6},
        "niah_single": {1024: 4, 2048: 4},
        "niah_essay": {1024: 16, 2048: 16},
        "copytext": {1024: 4, 2048: 3},
    },
    "dev": {
        "ppl_bins": {8192: 3},
        "niah_single": {1024: 16, 2048: 16, 4096: 8, 8192: 4},
        "niah_essay": {1024: 32, 2048: 32, 4096: 24, 8192: 16},
        "copytext": {1024: 8, 2048: 8, 4096: 4, 8192: 3},
    },
    "full": {kind: dict.fromkeys(LENGTHS, count) for kind, count in DEFAULT_COUNTS.items()},
}


@dataclass(frozen=True, order=True)
class PlannedTask:
    """One of our tasks: a kind of document at a length, `count` documents of it at most."""

    kind: str
    length: int
    count: int

    @property
    def name(self) -> str:
        """The name of the task in lm-eval."""
        return f"{self.kind}_{self.length}"


def plan_tasks(
    tasks: str | Sequence[str], lengths: Iterable[int] | None, limit: int | None
) -> tuple[list[PlannedTask], list[str]]:
    """Our tasks that `tasks` names, and the names left over, which are lm-eval's.

    `tasks` is a name, names with commas between them, or a list: a suite (`quick`, `dev`,
    `full`), a kind (`niah_essay`), a kind at a length (`niah_essay_2048`), all kinds at a length
    (`posenc_2048`), or anything lm-eval knows. `lengths` narrows suites and sets the lengths of
    kinds; `limit` replaces the number of documents per task.
    """
    names = tasks.split(",") if isinstance(tasks, str) else list(tasks)
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise PosencError(f"no tasks given; try one of {', '.join([*SUITES, *KINDS])}")
    if limit is not None and limit < 1:
        raise PosencError(f"limit {limit}: give 1 or more documents per task")
    wanted = None if lengths is None else sorted(set(lengths))
    if wanted is not None and (not wanted or wanted[0] < 1):
        raise PosencError(f"lengths {wanted}: give token counts of 1 or more")
    planned: dict[str, PlannedTask] = {}
    others: list[str] = []
    for name in names:
        found = _expand(name, wanted)
        if found is None:
            others.append(name)
        for kind, length, count in found or ():
            task = PlannedTask(kind, length, limit or count)
            planned.setdefault(task.name, task)
    return list(planned.values()), list(dict.fromkeys(others))


def _expand(name: str, lengths: list[int] | None) -> list[tuple[str, int, int]] | None:
    if name in SUITES:
        everything = [(k, at, n) for k, counts in SUITES[name].items() for at, n in counts.items()]
        chosen = [entry for entry in everything if lengths is None or entry[1] in lengths]
        if absent := sorted(set(lengths or ()) - {entry[1] for entry in everything}):
            raise PosencError(
                f"suite {name!r} has nothing at length {absent[0]}; its lengths are "
                f"{sorted({entry[1] for entry in everything})}, or name the kinds of task"
            )
        return chosen
    if name in KINDS:
        return [(name, length, DEFAULT_COUNTS[name]) for length in lengths or LENGTHS]
    if match := re.fullmatch(r"(\w+)_(\d+)", name):
        kind, length = match[1], int(match[2])
        if kind in KINDS:
            return [(kind, length, DEFAULT_COUNTS[kind])]
        if kind == "posenc":
            return [(kind, length, count) for kind, count in DEFAULT_COUNTS.items()]
    return None
