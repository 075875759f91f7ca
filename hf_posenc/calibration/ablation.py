"""`ablation`: the measured KL of dropping something, and how it is measured on a live model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.head import checked_head, last_hidden_state
from hf_posenc.losses import chunk_tokens, chunked_sum, kl
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime.patch import patch_model, unpatch_model
from hf_posenc.schemes.pairs import drop_rotation, keep_pairs


class Damage:
    """KL(unconverted || converted) on fixed rows, in nats per token; the model stays unconverted.

    rows  token ids [N, T]; the last hidden states of the unconverted model are kept [N, T, width]
    """

    def __init__(self, model: Any, rows: Tensor) -> None:
        self.model, self.rows = model, rows
        self.spec = ModelSpec.from_model(model)
        self.head = checked_head(model)
        self.reference = self._states()

    def of(self, layers: Sequence[LayerPlan]) -> float:
        """The KL when the model runs `layers` instead of its own."""
        plan = PositionPlan(tuple(layers), base=self.spec.fingerprint)
        patch_model(self.model, plan)
        try:
            return self.now()
        finally:
            unpatch_model(self.model)

    def now(self) -> float:
        """The KL of the model as it stands."""
        converted = self._states()
        total = 0.0
        for mine, goal in zip(converted, self.reference, strict=True):
            total += self._divergence(mine, goal)
        return total / self.rows.numel()

    def of_dropping(self, layer: int) -> float:
        """The KL when one layer loses its rotation."""
        own = self.spec.layers
        return self.of([drop_rotation(k) if i == layer else k for i, k in enumerate(own)])

    @torch.no_grad()
    def _states(self) -> list[Tensor]:
        """Per row: last hidden states [T, width], or logits [T, V] of an unusual head."""
        result = []
        device = self.model.get_input_embeddings().weight.device
        for row in self.rows:
            extra = {} if self.head is None else {"logits_to_keep": 1}
            with last_hidden_state(self.model.get_decoder()) as seen:
                logits = self.model(input_ids=row[None].to(device), use_cache=False, **extra).logits
            result.append(logits[0] if self.head is None else seen[0][0])
        return result

    @torch.no_grad()
    def _divergence(self, converted: Tensor, reference: Tensor) -> float:
        head = self.head or (lambda states: states)

        def loss(piece: Tensor, part: slice) -> Tensor:
            return kl(head(piece), head(reference[part]))

        vocabulary = self.model.config.get_text_config().vocab_size
        chunk = chunk_tokens(vocabulary, converted.device)
        return chunked_sum(loss, converted, chunk=chunk).item()


def without_pairs(layers: Sequence[LayerPlan], pairs: set[int]) -> list[LayerPlan]:
    """`layers` with the pairs `pairs` unrotated in all of them."""
    return [keep_pairs(k, set(range(len(k.inv_freq))) - pairs) for k in layers]
