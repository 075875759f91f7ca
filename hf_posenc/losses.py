"""The healing objectives, each as a pure function, and how their sums are taken over tokens.

Every objective returns the SUM over the tokens it is given, so that a step is the same however
its rows are split over batches, accumulation steps and processes. N tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Logits in one chunk. On a processor 32 MiB of them are as fast as any larger piece; an accelerator
# needs larger products to be busy.
CHUNK_ELEMENTS = {"cpu": 2**23, "accelerator": 2**26}


def ce(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of `logits` [N, V] against token ids `targets` [N]: nats, summed, in fp32."""
    return functional.cross_entropy(logits.float(), targets, reduction="sum")


def kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Forward KL(teacher || student) of logits [N, V]: nats, summed over tokens, in fp32.

    Exactly 0 for equal logits. Only the student's logits receive a gradient.
    """
    return _ForwardKL.apply(student_logits, teacher_logits)


class _ForwardKL(torch.autograd.Function):
    # Value and gradient in one pass over four buffers: half the memory and traffic that autograd
    # needs for the same formula.
    @staticmethod
    def forward(ctx: Any, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        student = student_logits.float().log_softmax(-1)
        teacher = teacher_logits.float().log_softmax(-1)
        probability = teacher.exp()
        value = teacher.sub_(student).mul_(probability).sum()
        if ctx.needs_input_grad[0]:
            ctx.gradient = student.exp_().sub_(probability).to(student_logits.dtype)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient * upstream.to(ctx.gradient.dtype), None


def hidden(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of one layer's output [N, D] over the teacher's variance, summed over tokens.

    Error and variance are means over D per token, so a layer whose output is all noise about the
    teacher's own mean scores about 1 per token. In fp32; only the student receives a gradient.
    """
    goal = teacher.detach().float()
    error = (student.float() - goal).square().mean(-1)
    return (error / goal.var(-1, correction=0)).sum()


ChunkLoss = Callable[[Tensor, slice], Tensor]


def chunked_sum(loss: ChunkLoss, states: Tensor, *, chunk: int) -> Tensor:
    """`loss(states[s], s)` summed over slices `s` of `chunk` tokens, with its gradient.

    The gradient with respect to `states` [N, D] is taken chunk by chunk in the forward pass, so
    what `loss` builds (logits) exists for one chunk at a time. Other tensors that `loss` uses
    receive no gradient: the vocabulary head must be frozen.
    """
    return _ChunkedSum.apply(states, loss, chunk)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, loss: ChunkLoss, chunk: int) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(states) if wants_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for start in range(0, len(states), chunk):
            part = slice(start, min(start + chunk, len(states)))
            with torch.set_grad_enabled(wants_gradient):
                piece = states[part].detach().requires_grad_(wants_gradient)
                value = loss(piece, part)
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(value, piece)
            total += value.detach()
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.gradient is None:
            return None, None, None
        return ctx.gradient * upstream.to(ctx.gradient.dtype), None, None


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """How many tokens' logits exist at once: `CHUNK_ELEMENTS` of them, and at least 16 tokens."""
    kind = "cpu" if device.type == "cpu" else "accelerator"
    return max(16, CHUNK_ELEMENTS[kind] // vocabulary)
