"""Losses over top-K rows with a tail bucket, against the closed form and against the literature's figures."""

import pytest
import torch
from torch import Tensor

from adapter.loss import FLOOR, drafter_rows, forward_kl, overlap, target_rows

SEED = 7


def some(rows: int, vocab: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of a target and of a drafter [rows, vocab]."""
    generator = torch.Generator().manual_seed(SEED)
    p, q = (scale * torch.randn(rows, vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    return p, q


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, log-probabilities, log tail mass) of a target's logits."""
    log_p = logits.log_softmax(-1)
    values, ids = log_p.topk(k, dim=-1)
    return ids, values.float(), (1 - values.exp().sum(-1)).log().float()


def test_with_all_tokens_named_the_loss_is_the_full_divergence() -> None:
    p, q = some(5, 9)
    ids, values, tail = top(p, 9)
    full = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    loss = forward_kl(target_rows(values, torch.full_like(tail, -torch.inf), ids), drafter_rows(q, ids))
    torch.testing.assert_close(loss.double(), full, rtol=1e-4, atol=1e-5)


def test_the_bucket_holds_the_mass_of_every_token_that_is_not_named() -> None:
    p, q = some(4, 30)
    ids, values, tail = top(p, 6)
    expected_q = q.softmax(-1).gather(-1, ids)
    expected_q = torch.cat([expected_q, 1 - expected_q.sum(-1, keepdim=True)], dim=-1)
    torch.testing.assert_close(drafter_rows(q, ids).exp().double(), expected_q, rtol=1e-4, atol=1e-6)
    assert torch.allclose(target_rows(values, tail, ids).exp().sum(-1), torch.ones(4))


def test_the_gradient_is_q_minus_p_where_all_tokens_are_named() -> None:
    p, q = some(3, 8)
    ids, values, _ = top(p, 8)
    logits = q.float().requires_grad_()
    log_p = target_rows(values, torch.full((3,), -torch.inf), ids)
    forward_kl(log_p, drafter_rows(logits, ids)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (q.softmax(-1) - p.softmax(-1)).float(), rtol=1e-4, atol=1e-6)


def test_in_the_bucket_the_gradient_is_shared_by_the_drafters_own_proportions() -> None:
    p, q = some(3, 12)
    ids, values, tail = top(p, 4)
    logits = q.float().requires_grad_()
    forward_kl(target_rows(values, tail, ids), drafter_rows(logits, ids)).sum().backward()
    probs = q.softmax(-1)
    outside = torch.ones_like(probs).scatter(-1, ids, 0.0)
    p_tail, q_tail = tail.double().exp()[:, None], (probs * outside).sum(-1, keepdim=True)
    expected = torch.where(outside.bool(), probs - probs * p_tail / q_tail, probs - p.softmax(-1))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_autograd_agrees_with_finite_differences() -> None:
    p, q = some(2, 7)
    ids, values, tail = top(p, 3)
    log_p = target_rows(values, tail, ids)
    logits = q.float().requires_grad_()
    forward_kl(log_p, drafter_rows(logits, ids)).sum().backward()
    step = 1e-2
    for row, column in ((0, 0), (1, 6)):
        moved = torch.zeros_like(logits)
        moved[row, column] = step
        up, down = (forward_kl(log_p, drafter_rows(logits.detach() + s * moved, ids)).sum() for s in (1, -1))
        assert logits.grad is not None
        assert float((up - down) / (2 * step)) == pytest.approx(float(logits.grad[row, column]), abs=2e-3)


def test_a_token_outside_the_draft_vocabulary_falls_into_the_bucket() -> None:
    log_probs = torch.tensor([[0.5, 0.3]]).log()
    rows = target_rows(log_probs, torch.tensor([0.2]).log(), torch.tensor([[4, -1]]))
    torch.testing.assert_close(rows.exp(), torch.tensor([[0.5, 0.0, 0.5]]))


def test_an_absent_token_adds_nothing_to_loss_or_gradient() -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(SEED)).requires_grad_()
    two, one = torch.tensor([[4, -1]]), torch.tensor([[4]])
    with_absent = forward_kl(torch.tensor([[0.5, 0.0, 0.5]]).log(), drafter_rows(logits, two))
    without = forward_kl(torch.tensor([[0.5, 0.5]]).log(), drafter_rows(logits, one))
    torch.testing.assert_close(with_absent, without)
    (gradient,) = torch.autograd.grad(with_absent.sum() - without.sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(logits), atol=1e-6, rtol=0)


def test_the_teacher_is_detached() -> None:
    log_p = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    assert not forward_kl(log_p, torch.tensor([[0.4, 0.6]]).log()).requires_grad


def test_the_loss_is_finite_where_the_drafter_has_no_mass() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = forward_kl(torch.tensor([[0.0, 1.0, 0.0]]).log(), drafter_rows(logits, torch.tensor([[0, 1]])))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-FLOOR)
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_the_loss_is_finite_where_no_token_is_left_for_the_bucket() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    loss = forward_kl(torch.tensor([[0.5, 0.3, 0.2]]).log(), drafter_rows(logits, torch.tensor([[0, 1]])))
    loss.sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(logits.grad).all())


def test_a_bucket_smaller_than_float32s_step_at_one_is_not_lost() -> None:
    rows = drafter_rows(torch.tensor([[20.0, 0.0, 0.0]]), torch.tensor([[0]]))
    assert float(rows[0, 1]) == pytest.approx(float(torch.tensor(2.0).log()) - 20.0, abs=1e-3)


@pytest.mark.parametrize("k", [4, 16, 64])
def test_coarse_rows_lower_the_divergence_and_raise_the_overlap(k: int) -> None:
    p, q = some(6, 200)
    ids, values, tail = top(p, k)
    log_p, log_q = target_rows(values, tail, ids), drafter_rows(q, ids)
    full_kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    full_overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    assert bool((forward_kl(log_p, log_q) <= full_kl + 1e-4).all())
    assert bool((overlap(log_p, log_q) >= full_overlap - 1e-4).all())


def test_overlap_of_the_first_golden_vector() -> None:
    log_p, log_q = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log(), torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert float(overlap(log_p, log_q)) == pytest.approx(0.6)
