"""The answer to a log-likelihood request: the pair lm-eval expects, and the tokens behind it."""

from __future__ import annotations

import math
from typing import Any

from hf_posenc.errors import PosencError


class Answer(tuple[float, bool]):
    """`(sum of log-probabilities, all tokens greedy)`, as lm-eval expects it.

    `logprobs` holds the log-probability of each answer token in nats, `greedy` whether the token
    was the most likely one.
    """

    logprobs: list[float]
    greedy: list[bool]

    def __new__(cls, logprobs: list[float], greedy: list[bool]) -> Answer:
        answer = super().__new__(cls, (math.fsum(logprobs), all(greedy)))
        answer.logprobs, answer.greedy = logprobs, greedy
        return answer

    def __reduce__(self) -> tuple[Any, ...]:
        return Answer, (self.logprobs, self.greedy)


def as_answer(result: Any) -> Answer:
    """`result` itself if it carries its tokens; a `PosencError` for another model's answer."""
    if isinstance(result, Answer):
        return result
    raise PosencError(
        "these tasks need log-probabilities per token, which this lm-eval model does not give; "
        "run them with --model hf-posenc"
    )
