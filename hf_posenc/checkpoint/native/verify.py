"""Proof of an export: the stock model, loaded from the written folder, against the plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_posenc.checkpoint.native.case import Case, Draft
from hf_posenc.checkpoint.native.report import Unexportable
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime.patch import base_of

FAR = 131072
_TOKENS = 48

# Largest allowed difference of a target that is not exact, relative to the largest logit.
# Features summed in another order give up to 1.1e-5 in float32 on tiny models with very sharp
# attention; a wrong row, pair or frequency shows above 1e-2.
RELATIVE = 5e-5
# Some rows amplify rounding: there the plan under another attention kernel is just as far off.
# The export may be this many times as far.
TIMES_NOISE = 4.0
# A frequency one unit off turns a far token by up to `Draft.angle`; logits follow within this.
PER_RADIAN = 200.0


@dataclass(frozen=True)
class Probe:
    """One forward call: token ids and positions, both [B, T]."""

    ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """The plan's own logits per probe, and how far rounding alone moves them."""

    logits: list[torch.Tensor]
    noise: list[float]


@dataclass(frozen=True)
class Comparison:
    """Largest absolute difference and largest logit over all probes."""

    difference: float
    largest: float


def probes(case: Case) -> list[Probe]:
    """Random tokens from position 0, from 131072, scattered up to 200k, and past a short window."""
    generator = torch.Generator().manual_seed(0)
    vocab = case.config.vocab_size

    def tokens(rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, vocab, (rows, length), generator=generator)

    scattered = torch.randint(0, 200_000, (_TOKENS,), generator=generator).sort().values
    near = torch.arange(_TOKENS).expand(2, -1)
    result = [
        Probe(tokens(2, _TOKENS), near),
        Probe(tokens(1, _TOKENS), FAR + near[:1]),
        Probe(tokens(1, _TOKENS), scattered[None]),
    ]
    widths = [width for width in case.windows if width is not None and width <= 1024]
    if widths:
        length = max(widths) + 16
        result.append(Probe(tokens(1, length), torch.arange(length)[None]))
    return result


@torch.no_grad()
def run(model: Any, calls: list[Probe]) -> list[torch.Tensor]:
    """Logits of every probe, float32 on the CPU; the model is left in the mode it was in."""
    training = model.training
    model.eval()
    device = model.get_input_embeddings().weight.device
    try:
        return [
            # The mask keeps jumps of the positions from being read as packed documents.
            model(
                input_ids=call.ids.to(device),
                position_ids=call.positions.to(device),
                attention_mask=torch.ones_like(call.ids, device=device),
                use_cache=False,
            )
            .logits.float()
            .cpu()
            for call in calls
        ]
    finally:
        model.train(training)


def reference(model: Any, draft: Draft, calls: list[Probe], *, owned: bool) -> Reference:
    """The plan's own logits: in the model's dtype for an exact target, else in float32."""
    if draft.exact:
        with _attention(model, draft.attention):
            return Reference(run(model, calls), [0.0] * len(calls))
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        model = (model if owned else copy.deepcopy(model)).float()
    logits = run(model, calls)
    other = "eager" if model.config._attn_implementation == "sdpa" else "sdpa"
    with _attention(model, other):
        again = run(model, calls)
    return Reference(logits, [_apart(a, b) for a, b in zip(logits, again, strict=True)])


def load_stock(folder: Path, draft: Draft, like: Any) -> Any:
    """The exported model through AutoModelForCausalLM, as a reader without hf_posenc gets it."""
    dtype = like.dtype if draft.exact else torch.float32
    attention = draft.attention or like.config._attn_implementation
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    model, info = loaded
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys") if info[key]}
    if wrong:
        raise Unexportable(f"the written checkpoint does not load whole: {wrong}")
    return model.to(like.get_input_embeddings().weight.device)


def check_tables(case: Case, config: Any) -> None:
    """The frequencies the written config stands for, read back, must be the plan's in every layer.

    Order aside (partial families put rotated pairs first), each may be one float32 unit off.
    """
    found = PositionPlan.from_config(config).layers
    windows = tuple(None if layer.window is None else layer.window.size for layer in found)
    if windows != case.windows:
        raise Unexportable(
            f"the written {config.model_type} config does not give the layers the plan's windows; "
            "nothing was written"
        )
    for index, (wanted, read) in enumerate(zip(case.layers, found, strict=True)):
        pairs = zip(_rotated(wanted), _rotated(read), strict=False)
        if (
            wanted.num_rotated != read.num_rotated
            or wanted.rope_scale != read.rope_scale
            or (wanted.stretch is None) != (read.stretch is None)
            or any(abs(a - b) > 1.2e-7 * a for a, b in pairs)
        ):
            raise Unexportable(
                f"layer {index}: the written {config.model_type} config does not stand for the "
                "plan's frequencies; nothing was written"
            )


def compare(wanted: Reference, found: list[torch.Tensor], draft: Draft, what: str) -> Comparison:
    """The largest difference; `Unexportable` when it is above what the target allows."""
    largest = max(logits.abs().max().item() for logits in wanted.logits)
    relative = 0.0 if draft.exact else RELATIVE + PER_RADIAN * draft.angle
    differences = [_apart(a, b) for a, b in zip(wanted.logits, found, strict=True)]
    for difference, noise in zip(differences, wanted.noise, strict=True):
        allowed = relative * max(largest, 1.0) + TIMES_NOISE * noise
        if not difference <= allowed:
            raise Unexportable(
                f"{what}: logits of the exported model differ from the plan's by "
                f"{difference:.1e}, {allowed:.1e} allowed; nothing was written"
            )
    return Comparison(max(differences), largest)


@contextmanager
def _attention(model: Any, implementation: str | None) -> Iterator[None]:
    before = base_of(model).config._attn_implementation
    if implementation in (None, before):
        yield
        return
    base_of(model).set_attn_implementation(implementation)
    try:
        yield
    finally:
        base_of(model).set_attn_implementation(before)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def _rotated(layer: LayerPlan) -> list[float]:
    return sorted(value for value in layer.inv_freq if value)
