"""The vocabulary head as a function of the decoder's last hidden state, checked against the model.

Chunked losses need logits of a few tokens at a time. Families scale or cap what `lm_head` gives;
the known forms are tried on the model itself, and one that does not reproduce it is not used.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError

logger = logging.getLogger(__name__)

Head = Callable[[Tensor], Tensor]


class VocabularyHead:
    """Logits [N, V] of last hidden states [N, D]: `lm_head`, then the family's cap and scale."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.project: nn.Module = model.get_output_embeddings()
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.divide: float | None = getattr(config, "logits_scaling", None)
        self.multiply: float | None = getattr(config, "logit_scale", None)

    def __call__(self, states: Tensor) -> Tensor:
        logits: Tensor = self.project(states)
        if self.multiply is not None:
            logits = logits * self.multiply
        if self.divide is not None:
            logits = logits / self.divide
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


@contextmanager
def last_hidden_state(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the decoder's last hidden state [B, T, D] of each forward in the block."""
    seen: list[Tensor] = []

    def collect(module: nn.Module, arguments: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = decoder.register_forward_hook(collect)
    try:
        yield seen
    finally:
        handle.remove()


def checked_head(model: Any) -> VocabularyHead | None:
    """The head of a causal LM, or None (and a logged notice) when it cannot be taken apart.

    Compares on random tokens, in the model's own dtype: exact, or within 1e-5 of the largest logit.
    Errors: `PosencError` when the head is trainable, which chunked losses do not support.
    """
    head = VocabularyHead(model) if model.get_output_embeddings() is not None else None
    if head is not None and any(weight.requires_grad for weight in head.project.parameters()):
        raise PosencError("the vocabulary head is trainable; freeze it: healing trains the layers")
    reason = _misfit(model, head)
    if reason is None:
        return head
    logger.warning(
        "%s: %s; losses use the full logits, which needs more memory", type(model).__name__, reason
    )
    return None


@torch.no_grad()
def _misfit(model: Any, head: VocabularyHead | None) -> str | None:
    """Why losses cannot use `head` on the last hidden state; None when they can."""
    if head is None:
        return "it has no output embeddings"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return "it does not take logits_to_keep"
    embeddings: Tensor = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.shape[0], (1, 12), generator=generator).to(embeddings.device)
    with last_hidden_state(model.get_decoder()) as seen:
        logits = model(input_ids=ids, use_cache=False).logits.float()
    if not logits.isfinite().all():
        raise PosencError(f"{type(model).__name__}: its logits are not finite; is it damaged?")
    mine = head(seen[0]).float()
    if mine.shape != logits.shape:
        return f"its head gives logits of another shape, {tuple(mine.shape)}"
    worst = (logits - mine).abs().max().item()
    if not worst <= 1e-5 * logits.abs().max().item():
        return f"logits taken from its last hidden state differ by {worst:.2g}"
    return None
