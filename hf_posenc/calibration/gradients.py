"""`sensitivity`: how the output answers to gates on rotation, to second order.

A gate g per layer and pair mixes the pair's part of the scores, g * rotated + (1 - g) * unrotated.
At g = 1 the model is as it was; KL(original || gated) is 1/2 (1 - g)^2 times the Fisher information
of g, the mean square of d log p(y) / dg over the model's own next tokens y. With one y drawn per
position from the model itself, the square of the summed gradient of a row is an unbiased estimate
of the row's sum of Fisher informations: the positions' gradients have mean zero and are
uncorrelated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.calibration.probe import Seen
from hf_posenc.head import VocabularyHead
from hf_posenc.losses import chunk_tokens, chunked_sum


class Gates:
    """Gates of one batch, all 1: [L, B, F]; `attend` is the gated attention of a layer."""

    def __init__(self, layers: int, rows: int, pairs: int, device: torch.device) -> None:
        self.values = torch.ones(layers, rows, pairs, device=device, requires_grad=True)

    def attend(self, seen: Seen) -> Tensor:
        """Attended values [B, H, T, D]; with gates at 1 those of the plain layer."""
        gate = self.values[seen.layer][:, None, None]
        on = seen.features.spread(gate, seen.key, 1.0)
        off = seen.features.spread(1.0 - gate, seen.key, 0.0)
        query = torch.cat((seen.query, seen.still_query), dim=-1)
        key = torch.cat((seen.key * on, seen.still_key * off), dim=-1)
        # One width for all three lets the fused kernel run.
        value = functional.pad(seen.value, (0, key.shape[-1] - seen.value.shape[-1]))
        attended = replace(seen, value=value).attended(query, key)
        return attended[..., : seen.value.shape[-1]]


def fisher(
    gates: Gates, states: Tensor, head: VocabularyHead, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Squared gradients of one draw of next tokens: pairs [L, F] and whole layers [L].

    states  last hidden states of the gated forward [B, T, D]
    Summed over rows: divide by the number of tokens for nats per token, and halve for the KL.
    """
    flat = states.flatten(0, 1)

    def drawn(piece: Tensor, part: slice) -> Tensor:
        logits = head(piece).float()
        with torch.no_grad():
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        return functional.cross_entropy(logits, tokens, reduction="sum")

    chunk = chunk_tokens(vocabulary, states.device)
    loss = chunked_sum(drawn, flat, chunk=chunk)
    (gradient,) = torch.autograd.grad(loss, gates.values)
    gradient = gradient.double()
    return gradient.square().sum(1), gradient.sum(-1).square().sum(1)


def no_gradients(model: Any) -> list[Tensor]:
    """Freeze what is trainable and say what it was, so that only gates build a graph."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    return trainable
