"""Layer schedules: which decoder layers an option such as `layers="every:4"` means.

Layers are 0-based. A schedule is text or a sequence of layer numbers:

    "all"            every layer
    "every:4"        layers 3, 7, 11, ...; with offset=0 layers 0, 4, 8, ...
    "0-3,8"          layers 0, 1, 2, 3 and 8
    [0, 1, 2, 3, 8]  the same
    "auto:7"         the 7 layers whose rotation is missed least, by a calibration of the model;
                     "auto:7:sensitivity" by that statistic of it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.errors import PosencError, did_you_mean

Schedule = str | Sequence[int]

_SPELLINGS = "'all', 'every:4', '0-3,8', 'auto:7' or a list of 0-based layer numbers"
_RANGE = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?")
_EVERY = re.compile(r"every:\s*([0-9]{1,9})")
_AUTO = re.compile(r"auto:\s*([0-9]{1,9})(?::\s*(\w+))?")


@dataclass(frozen=True)
class Auto:
    """The `count` layers whose rotation is missed least, by a statistic or the best measured."""

    count: int
    by: str | None = None


def check_schedule(schedule: Schedule) -> str | tuple[int, ...]:
    """The schedule in its hashable form: stripped text, or a tuple of layer numbers.

    Raises PosencError for what no model could satisfy; layers beyond a model's last one are
    found by `select_layers`.
    """
    if isinstance(schedule, str):
        text = schedule.strip()
        if text.startswith("auto"):
            _auto(text)
        elif text.startswith("every"):
            _period(text)
        elif text != "all":
            _ranges(text)
        return text
    given: object = schedule
    if not isinstance(given, Sequence):
        hint = f"; for one layer write [{given}]" if isinstance(given, int) else ""
        raise PosencError(f"layers={given!r} is no schedule; use {_SPELLINGS}{hint}")
    numbers = tuple(schedule)
    for value in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PosencError(
                f"layers={list(numbers)!r}: {value!r} is no layer number; use whole numbers from 0"
            )
    if not numbers:
        raise PosencError(f"layers=[] selects no layer; use {_SPELLINGS}")
    return numbers


def auto_layers(schedule: Schedule | None) -> Auto | None:
    """What "auto:N" or "auto:N:statistic" asks of a calibration; None for every other schedule."""
    is_auto = isinstance(schedule, str) and schedule.strip().startswith("auto")
    return _auto(str(schedule).strip()) if is_auto else None


def uncalibrated(what: str) -> PosencError:
    """The error for an option that only a calibration can turn into layers or pairs."""
    return PosencError(
        f"{what} needs a calibration of the model; make one with `hf-posenc calibrate MODEL "
        "calibration.json` and give it as --calibration calibration.json (calibration= in Python)"
    )


def select_layers(
    schedule: Schedule, num_layers: int, *, offset: int | None = None
) -> tuple[bool, ...]:
    """One bool per decoder layer: True where the schedule selects it.

    schedule  "all", "every:N", ranges such as "0-3,8", or a sequence of 0-based layer numbers;
              "auto:N" must have been replaced by numbers (`Scheme.resolve`)
    offset    only with "every:N": selects the layers with i % N == offset;
              None means the last of each N, (i + 1) % N == 0
    Raises PosencError for anything unreadable, out of range, or selecting no layer.
    """
    checked = check_schedule(schedule)
    if auto_layers(checked) is not None:
        raise uncalibrated(f"layers={schedule!r}")
    if isinstance(checked, str) and checked.startswith("every"):
        return _every(_period(checked), num_layers, offset)
    if offset is not None:
        raise PosencError(f"offset={offset!r} goes with layers='every:N' only, not {schedule!r}")
    if checked == "all":
        return (True,) * num_layers
    spans = _ranges(checked) if isinstance(checked, str) else [range(n, n + 1) for n in checked]
    last = max(span[-1] for span in spans)
    if last >= num_layers:
        raise PosencError(
            f"layer {last} in layers={schedule!r} is out of range; "
            f"the model has layers 0 to {num_layers - 1}"
        )
    return tuple(any(index in span for span in spans) for index in range(num_layers))


def check_offset(every: int, offset: int) -> None:
    """PosencError unless `offset` is a whole number with 0 <= offset < every."""
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < every:
        raise PosencError(
            f"offset={offset!r} is out of range; use 0 to {every - 1} with every={every}"
        )


def _period(text: str) -> int:
    match = _EVERY.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise PosencError(f"layers={text!r} must be 'every:N' with a whole number N of at least 1")
    return int(match[1])


def _auto(text: str) -> Auto:
    from hf_posenc.calibration.record import STATISTICS  # which imports what plans are built on

    match = _AUTO.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise PosencError(
            f"layers={text!r} must be 'auto:N' or 'auto:N:statistic' with a whole number N of at "
            "least 1"
        )
    if match[2] is not None and match[2] not in STATISTICS:
        raise PosencError(
            f"layers={text!r}: unknown statistic {match[2]!r}; {did_you_mean(match[2], STATISTICS)}"
        )
    return Auto(int(match[1]), match[2])


def _every(every: int, num_layers: int, offset: int | None) -> tuple[bool, ...]:
    if offset is None:
        offset = every - 1
    check_offset(every, offset)
    if offset >= num_layers:
        raise PosencError(
            f"every={every} selects no layer: its first would be layer {offset}, "
            f"and the model has layers 0 to {num_layers - 1}"
        )
    return tuple(index % every == offset for index in range(num_layers))


def _ranges(text: str) -> list[range]:
    spans = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise PosencError(f"layers={text!r}: cannot read {part.strip()!r}; use {_SPELLINGS}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise PosencError(f"layers={text!r}: {part.strip()!r} runs backwards")
        spans.append(range(first, last + 1))
    return spans
