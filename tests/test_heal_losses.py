"""The objectives against naive references, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hf_posenc import losses

N, V, D = 23, 61, 12


def _tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_ce_is_the_summed_cross_entropy() -> None:
    (logits,) = _tensors((N, V))
    targets = torch.arange(N) % V
    by_hand = -sum(logits[i].double().softmax(-1)[t].log() for i, t in enumerate(targets))
    assert losses.ce(logits, targets).item() == pytest.approx(float(by_hand), rel=1e-6)


def test_kl_is_forward_and_summed() -> None:
    student, teacher = _tensors((N, V), (N, V))
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    assert losses.kl(student, teacher).item() == pytest.approx(
        float((p * (p / q).log()).sum()), rel=1e-5
    )
    assert losses.kl(student, teacher).item() != pytest.approx(
        losses.kl(teacher, student).item(), rel=1e-2
    )
    assert losses.kl(student, student.clone()).item() == 0.0


def test_kl_moves_the_student_only() -> None:
    student, teacher = (t.requires_grad_() for t in _tensors((N, V), (N, V)))
    losses.kl(student, teacher).backward()
    expected = student.softmax(-1) - teacher.softmax(-1)
    assert teacher.grad is None
    torch.testing.assert_close(student.grad, expected.detach(), atol=1e-5, rtol=1e-5)


def test_hidden_is_relative_to_the_teachers_variance() -> None:
    student, teacher = _tensors((N, D), (N, D))
    expected = sum(
        ((s - t) ** 2).mean() / t.var(correction=0) for s, t in zip(student, teacher, strict=True)
    )
    assert losses.hidden(student, teacher).item() == pytest.approx(float(expected), rel=1e-5)
    assert losses.hidden(10 * student, 10 * teacher).item() == pytest.approx(
        float(expected), rel=1e-5
    )
    mean = teacher.mean(-1, keepdim=True).expand_as(teacher)
    assert losses.hidden(mean, teacher).item() == pytest.approx(N, rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, N, 100])
def test_chunks_give_the_whole_loss_and_gradient(chunk: int) -> None:
    states, weight, goal = _tensors((N, D), (V, D), (N, D))
    targets = torch.arange(N) % V

    def of(piece: torch.Tensor, part: slice) -> torch.Tensor:
        logits = functional.linear(piece, weight)
        teacher = functional.linear(goal[part], weight)
        return 0.3 * losses.ce(logits, targets[part]) + 0.7 * losses.kl(logits, teacher)

    whole = states.clone().requires_grad_()
    of(whole, slice(None)).mul(2).backward()
    pieces = states.clone().requires_grad_()
    total = losses.chunked_sum(of, pieces, chunk=chunk)
    total.mul(2).backward()
    torch.testing.assert_close(total, of(states, slice(None)), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(pieces.grad, whole.grad, atol=1e-5, rtol=1e-5)


def test_chunks_without_a_graph_build_none() -> None:
    states, weight = _tensors((N, D), (V, D))
    with torch.no_grad():
        total = losses.chunked_sum(
            lambda piece, part: functional.linear(piece, weight).sum(), states, chunk=5
        )
    assert not total.requires_grad
    assert total.item() == pytest.approx(functional.linear(states, weight).sum().item(), rel=1e-4)


def test_a_chunk_holds_a_bounded_number_of_logits() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert losses.chunk_tokens(49_152, cpu) * 49_152 <= losses.CHUNK_ELEMENTS["cpu"]
    assert losses.chunk_tokens(49_152, gpu) > losses.chunk_tokens(49_152, cpu)
    assert losses.chunk_tokens(10**9, cpu) == 16
