"""About how long a run takes and how much disk it needs, from two timings on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.calibration.measure import ABLATION_TOKENS
from hf_posenc.evaluation.suites import PlannedTask
from hf_posenc.evaluation.tasks import PROBES
from hf_posenc.heal.config import Recipe
from hf_posenc.runtime.families import attentions_of, decoder_of

_TIMED_TOKENS = 1024
# Attention grows with the square of the length: seconds per token, relative to 2048 tokens.
_FLAT_LENGTH, _GROWTH = 2048, 0.45
# The adapter, and two checkpoints of it with the two moments of AdamW.
_ADAPTER_COPIES = 1 + 2 * 3


@dataclass(frozen=True)
class Speed:
    """Seconds per token of this model on this machine."""

    forward: float
    training: float


def measure_speed(model: Any, row_tokens: int) -> Speed:
    """Time one forward, and one forward with a backward down to the first attention.

    No weight is changed; gradients are dropped again.
    """
    length = min(_TIMED_TOKENS, row_tokens)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, length))
    ids = ids.to(next(model.parameters()).device)
    kept = {name: p.requires_grad for name, p in model.named_parameters()}
    was_training = model.training
    model.eval()
    model.requires_grad_(False)
    attentions_of(decoder_of(model))[0].requires_grad_(True)
    try:
        with torch.no_grad():
            model(input_ids=ids[:, : min(64, length)], use_cache=False)
            forward = _seconds(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        training = _seconds(step)
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(kept[name])
        model.train(was_training)
    return Speed(forward / length, training / length)


def heal_seconds(recipe: Recipe, speed: Speed) -> float:
    """Time of one healing run; a teacher adds a forward."""
    first = recipe.heal.first
    share = 0.0 if first is None else first.share
    taught = (1 - share) * _has_teacher(recipe.heal.objective)
    taught += 0.0 if first is None else share * _has_teacher(first.objective)
    return recipe.steps * recipe.tokens_per_step * (speed.training + taught * speed.forward)


def calibrate_seconds(tokens: int, layers: int, speed: Speed) -> float:
    """Time of a calibration: gradients once, and a forward per layer on some of the tokens."""
    return tokens * speed.training + min(ABLATION_TOKENS, tokens) * (layers + 1) * speed.forward


def eval_seconds(tasks: Iterable[PlannedTask], speed: Speed) -> float:
    """Time of scoring one variant; probes that share a haystack share its forward."""
    total = 0.0
    for task in tasks:
        rows = task.count / PROBES if task.kind == "niah_essay" else task.count
        total += rows * task.length * max(1.0, (task.length / _FLAT_LENGTH) ** _GROWTH)
    return total * speed.forward


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights on disk."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def heal_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Bytes of an adapter with the checkpoints kept while it trains, in float32."""
    targets = recipe.lora.targets
    trained = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        wanted = "lm_head" not in name if targets == "all-linear" else name.endswith(tuple(targets))
        if wanted:
            wide, high = module.in_features, module.out_features
            trained += wide * high if recipe.lora.full else recipe.lora.r * (wide + high)
    return 4 * trained * _ADAPTER_COPIES


def duration_text(seconds: float) -> str:
    """Roughly how long: `40 s`, `12 min`, `3.5 h`, `4 days`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def bytes_text(count: float) -> str:
    """A size on disk in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _has_teacher(objective: Mapping[Any, float]) -> bool:
    return bool({"kl", "hidden"} & objective.keys())


def _seconds(work: Callable[[], object]) -> float:
    _synchronise()
    began = time.perf_counter()
    work()
    _synchronise()
    return time.perf_counter() - began


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
