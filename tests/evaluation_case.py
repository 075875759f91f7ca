"""Tiny models for the evaluation tests: one with uneven attention, one that knows the answers."""

from __future__ import annotations

import re
from typing import Any

import torch
from tiny_tokenizer import VOCAB_SIZE
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput


def tiny_config(**changes: Any) -> LlamaConfig:
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    return LlamaConfig(**{**options, **changes})


def tiny_model(seed: int = 0, config: Any = None) -> Any:
    """Random weights, large enough that attention is far from even."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_config()).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.2 if "lm_head" in name else 0.3)
    return model


class Oracle(LlamaForCausalLM):
    """Looks the asked-for number up in the prompt and is certain of it, or of another number.

    `wrong`: answers with the digits of the value turned by one.
    """

    def attach(self, tokenizer: Any, *, wrong: bool = False) -> Oracle:
        self.tokenizer, self.wrong = tokenizer, wrong
        return self

    def forward(
        self, input_ids: Any, logits_to_keep: int = 0, use_cache: bool = False, **_: Any
    ) -> CausalLMOutput:
        assert not use_cache
        logits = torch.zeros(*input_ids.shape, VOCAB_SIZE)
        for row, ids in enumerate(input_ids.tolist()):
            text = self.tokenizer.decode(ids)
            prompt = text[: text.rindex("provided text is") + len("provided text is")]
            key = re.findall(r"number for (\S+) mentioned", prompt)[-1]
            value = re.findall(rf"numbers for {key} is: (\d+)\.", prompt)[0]
            if self.wrong:
                value = "".join(str((int(digit) + 1) % 10) for digit in value)
            truth = self.tokenizer(f"{prompt} {value}").input_ids
            for position, following in enumerate(truth[1:][: len(ids)]):
                logits[row, position, following] = 50.0
        return CausalLMOutput(logits=logits[:, -logits_to_keep:])
