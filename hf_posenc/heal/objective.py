"""One training step's loss: the student's pass, the teacher's pass, and what is compared.

The teacher is the same model with the plan and the adapter off, run without a graph before the
student. B rows, T tokens per row, N predicted tokens of the batch, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc import losses
from hf_posenc.errors import PosencError
from hf_posenc.head import checked_head, last_hidden_state
from hf_posenc.heal.data import IGNORED, Row
from hf_posenc.runtime.patch import unpatched


@dataclass(frozen=True)
class _Pass:
    states: Tensor  # [N, D] last hidden states, or [N, V] logits when the head is not separable
    layers: list[Tensor]  # [N, D] each


class Objective:
    """The weighted sum of ce, kl and hidden for a PEFT model, summed over predicted tokens.

    weights        objective name -> weight
    hidden_layers  the layers whose outputs `hidden` compares; None = all; averaged over layers
    Errors: `PosencError` for a layer that the model does not have, or a trainable head.
    """

    def __init__(
        self,
        model: Any,
        weights: Mapping[Any, float],
        *,
        hidden_layers: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.weights: dict[str, float] = dict(weights)
        base = model.get_base_model()
        self.decoder: nn.Module = base.get_decoder()
        self.head = checked_head(base)
        self.layers = _chosen(self.decoder.layers, hidden_layers)
        self.vocabulary: int = base.config.get_text_config().vocab_size
        # Flash attention recognises packed documents only in a batch of one row.
        self.one_row = "flash" in str(base.config._attn_implementation)

    def weighted(self, weights: Mapping[Any, float]) -> Objective:
        """The same model's loss under other weights; nothing is checked or run again."""
        other = copy(self)
        other.weights = dict(weights)
        return other

    def __call__(self, model: nn.Module, batch: Row) -> Tensor:
        """The loss of a batch (see `data.make_row`, stacked to [B, T]), summed over its N tokens.

        `model` is the PEFT model itself or a wrapper of it (data parallel).
        """
        batch = self._laid_out(batch)
        mask, targets = predicted(batch["labels"])
        compared = self.layers if "hidden" in self.weights else []
        teacher = None
        if self.weights.keys() & {"kl", "hidden"}:
            with as_teacher(self.model):
                teacher = self._run(self.model, batch, mask, compared)
        student = self._run(model, batch, mask, compared)
        parts = []
        if self.weights.keys() & {"ce", "kl"}:
            of_chunk = self._of_chunk(targets, teacher)
            parts.append(self._summed(of_chunk, student.states))
        if teacher is not None and compared:
            pairs = zip(student.layers, teacher.layers, strict=True)
            each = [losses.hidden(mine, theirs) for mine, theirs in pairs]
            parts.append(self.weights["hidden"] * torch.stack(each).mean())
        return torch.stack(parts).sum()

    @torch.no_grad()
    def cross_entropy(self, batch: Row) -> tuple[float, int]:
        """Summed next-token loss (nats) of the model as it stands, and the number of tokens."""
        batch = self._laid_out(batch)
        mask, targets = predicted(batch["labels"])
        with _evaluating(self.model):
            states = self._run(self.model, batch, mask).states
            total = self._summed(
                lambda piece, part: losses.ce(self._logits(piece), targets[part]), states
            )
        return total.item(), targets.numel()

    def _of_chunk(self, targets: Tensor, teacher: _Pass | None) -> losses.ChunkLoss:
        def loss(piece: Tensor, part: slice) -> Tensor:
            total = piece.new_zeros((), dtype=torch.float32)
            logits = self._logits(piece)
            if "ce" in self.weights:
                total = total + self.weights["ce"] * losses.ce(logits, targets[part])
            if "kl" in self.weights and teacher is not None:
                with torch.no_grad():
                    goal = self._logits(teacher.states[part])
                total = total + self.weights["kl"] * losses.kl(logits, goal)
            return total

        return loss

    def _summed(self, loss: losses.ChunkLoss, states: Tensor) -> Tensor:
        chunk = losses.chunk_tokens(self.vocabulary, states.device)
        return losses.chunked_sum(loss, states, chunk=chunk)

    def _logits(self, states: Tensor) -> Tensor:
        return states if self.head is None else self.head(states)

    def _run(
        self, model: nn.Module, batch: Row, mask: Tensor, compared: Sequence[nn.Module] = ()
    ) -> _Pass:
        arguments: dict[str, Any] = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "attention_mask": None,
            "use_cache": False,
        }
        if self.head is not None:
            arguments["logits_to_keep"] = 1
        with last_hidden_state(self.decoder) as last, _outputs(compared) as layers:
            logits = model(**arguments).logits
        states = logits if self.head is None else last[0]
        return _Pass(states[mask], [output[mask] for output in layers])

    def _laid_out(self, batch: Row) -> Row:
        return (
            {name: rows.reshape(1, -1) for name, rows in batch.items()} if self.one_row else batch
        )


def predicted(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which positions predict a target (bool [B, T]), and those targets (int64 [N])."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORED
    return mask, labels[:, 1:][mask[:, :-1]]


@contextmanager
def as_teacher(model: Any) -> Iterator[None]:
    """The PEFT model as its own teacher: no graph, no dropout, plan and adapter off."""
    with torch.no_grad(), _evaluating(model), unpatched(model), model.disable_adapter():
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _outputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []

    def collect(module: nn.Module, arguments: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(collect).remove)
        yield seen


def _chosen(layers: nn.ModuleList, wanted: Sequence[int] | None) -> list[nn.Module]:
    if wanted is None:
        return list(layers)
    for index in wanted:
        if not 0 <= index < len(layers):
            raise PosencError(
                f"heal.hidden_layers has {index}; this model has layers 0 to {len(layers) - 1}"
            )
    return [layers[index] for index in sorted(set(wanted))]
