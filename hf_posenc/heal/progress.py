"""What a person sees while a model heals, and the held-out losses taken on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from transformers import TrainerCallback


class Progress(TrainerCallback):
    """A bar with tokens/s and time left, an estimate after the first step, and a live log.jsonl.

    Where the output is no terminal, a line every tenth of the way instead of the bar.

    seconds   time spent in training steps so far, over resumed sessions too
    """

    def __init__(self, *, label: str, tokens_per_step: int, live_log: Path) -> None:
        self.label = label
        self.tokens_per_step = tokens_per_step
        self.live_log = live_log
        self.seconds = 0.0
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._step_began = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        history = training_log(state.log_history)
        self.seconds = history[-1]["seconds"] if history else 0.0
        self.live_log.write_text("".join(json.dumps(entry) + "\n" for entry in history))
        self._first_step = state.global_step
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.add_task(
                self.label, total=state.max_steps, completed=state.global_step, note=""
            )
            self._bar.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        taken = time.perf_counter() - self._step_began
        self.seconds += taken
        left = state.max_steps - state.global_step
        if state.global_step == self._first_step + 1 and left:
            self._say(
                f"{state.max_steps} steps of {self.tokens_per_step:,} tokens; {left} to go at "
                f"{taken:.3g} s each, about {_duration(left * taken)}"
            )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        if "loss" not in entry:
            return
        with self.live_log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        note = f"loss {entry['loss']:.4g}, {entry['tokens'] / self.seconds:,.0f} tokens/s"
        step = state.global_step
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, note=note)
        elif step % max(1, state.max_steps // 10) == 0:
            left = (state.max_steps - step) * self.seconds / step
            self._say(f"step {step} of {state.max_steps}, {note}, {_duration(left)} left")

    def close(self) -> None:
        """Stop the bar; harmless when there is none."""
        if self._bar is not None:
            self._bar.stop()

    def _say(self, line: str) -> None:
        self._console.print(f"{self.label}: {line}", markup=False)


class HeldOut(TrainerCallback):
    """Measure the held-out loss before the first step, every `every` steps and after the last."""

    def __init__(self, measure: Callable[[], None], *, every: int) -> None:
        self.measure = measure
        self.every = every

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.measure()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = self.every and state.global_step % self.every == 0
        if due or state.global_step == state.max_steps:
            self.measure()


def training_log(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training steps among a Trainer's log entries."""
    return [entry for entry in history if "loss" in entry]


def heldout_log(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The held-out measurements among a Trainer's log entries, in heal.json's form."""
    return [
        {
            "step": entry["step"],
            "tokens": entry["tokens"],
            "loss": entry["heldout_loss"],
            "n_tokens": entry["heldout_n_tokens"],
        }
        for entry in history
        if "heldout_loss" in entry
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
