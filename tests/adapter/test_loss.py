"""Losses over top-K rows with a tail bucket, against the closed form and against the literature's figures."""

import math

import pytest
import torch
from torch import Tensor

from adapter.loss import (
    FLOOR,
    LOSSES,
    SHARPNESS,
    LossName,
    drafter_rows,
    forward_kl,
    jsd,
    lk_hybrid,
    negative_log_acceptance,
    overlap,
    reverse_kl,
    target_rows,
    total_variation,
)

SEED = 7
ALL = tuple(LOSSES)


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


def row(*p: float) -> Tensor:
    """One row of log-probabilities."""
    return torch.tensor([p], dtype=torch.float64).log()


def closed_form(name: LossName, p: Tensor, q: Tensor) -> Tensor:
    """The gradient in the drafter's logits, where all tokens are named (osd.md 5.6)."""
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    below = (q < p).double()
    variation = -q * (below - (q * below).sum(-1, keepdim=True))
    to_p, to_m = (q / p).log(), (q / (0.5 * (p + q))).log()
    w = torch.exp(-SHARPNESS * alpha)
    return {
        "forward_kl": q - p,
        "reverse_kl": q * (to_p - (q * to_p).sum(-1, keepdim=True)),
        "jsd": 0.5 * q * (to_m - (q * to_m).sum(-1, keepdim=True)),
        "total_variation": variation,
        "negative_log_acceptance": variation / alpha,
        "lk_hybrid": w * (q - p) + (1 - w) * variation,
    }[name]


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_of_each_loss_is_its_closed_form(name: LossName) -> None:
    p, q = some(6, 9)
    ids = torch.arange(9).expand(6, 9)
    log_p = target_rows(p.log_softmax(-1), torch.full((6,), -torch.inf, dtype=torch.float64), ids)
    logits = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES[name](log_p, drafter_rows(logits, ids)).sum(), logits)
    expected = closed_form(name, p.softmax(-1), q.softmax(-1))
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in ALL if name != "lk_hybrid"])  # its weight is detached
def test_the_gradient_of_each_loss_agrees_with_finite_differences_through_the_bucket(name: LossName) -> None:
    p, q = some(4, 12)
    ids, values, tail = top(p, 5)
    ids[0, 2] = -1  # a token outside the draft vocabulary
    log_p = target_rows(values.double(), tail.double(), ids)
    assert torch.autograd.gradcheck(lambda z: LOSSES[name](log_p, drafter_rows(z, ids)), q.clone().requires_grad_())


def test_the_hybrids_gradient_is_that_of_its_parts_by_a_weight_that_is_not_learnt() -> None:
    p, q = some(5, 12)
    ids, values, tail = top(p, 4)
    log_p = target_rows(values.double(), tail.double(), ids)
    logits = q.clone().requires_grad_()
    log_q = drafter_rows(logits, ids)
    w = torch.exp(-SHARPNESS * overlap(log_p, log_q)).detach()
    parts = w * forward_kl(log_p, log_q) + (1 - w) * total_variation(log_p, log_q)
    torch.testing.assert_close(lk_hybrid(log_p, log_q), parts)
    ours, theirs = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (lk_hybrid(log_p, log_q), parts)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ALL)
def test_each_loss_is_nothing_where_drafter_and_target_agree_and_more_elsewhere(name: LossName) -> None:
    p = row(0.4, 0.3, 0.2, 0.1)
    assert float(LOSSES[name](p, p)) == pytest.approx(0.0, abs=1e-12)
    assert float(LOSSES[name](p, row(0.1, 0.2, 0.3, 0.4))) > 0.05


@pytest.mark.parametrize("name", ALL)
def test_each_loss_and_its_gradient_are_finite_at_masses_of_zero(name: LossName) -> None:
    """A target that is one token, a drafter that is another, no tail, and a token outside the draft vocabulary."""
    ids = torch.tensor([[0, 1], [1, -1], [0, 1]])
    log_p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]).log()
    logits = torch.tensor([[0.0, 300.0, 0.0], [300.0, 0.0, -300.0], [0.0, 0.0, -300.0]], requires_grad=True)
    losses = LOSSES[name](log_p, drafter_rows(logits, ids))
    losses.sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(losses).all())
    assert bool(torch.isfinite(logits.grad).all())


@pytest.mark.parametrize("name", ALL)
def test_no_loss_teaches_the_target(name: LossName) -> None:
    log_p = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    assert not LOSSES[name](log_p, torch.tensor([[0.4, 0.6]]).log()).requires_grad


@pytest.mark.parametrize("name", ALL)
def test_no_loss_counts_a_column_of_an_absent_token(name: LossName) -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(SEED))
    with_absent = LOSSES[name](torch.tensor([[0.5, 0.0, 0.5]]).log(), drafter_rows(logits, torch.tensor([[4, -1]])))
    without = LOSSES[name](torch.tensor([[0.5, 0.5]]).log(), drafter_rows(logits, torch.tensor([[4]])))
    torch.testing.assert_close(with_absent, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [4, 16, 64])
@pytest.mark.parametrize("name", [name for name in ALL if name != "lk_hybrid"])  # mixes by a weight that rises
def test_coarse_rows_lower_every_divergence(name: LossName, k: int) -> None:
    p, q = some(6, 200)
    ids, values, tail = top(p, k)
    everything = torch.arange(200).expand(6, 200)
    full = LOSSES[name](
        target_rows(p.log_softmax(-1), torch.full((6,), -torch.inf, dtype=torch.float64), everything),
        drafter_rows(q, everything),
    )
    coarse = LOSSES[name](target_rows(values.double(), tail.double(), ids), drafter_rows(q, ids))
    assert bool((coarse <= full + 1e-4).all())


def test_losses_of_the_first_golden_vector() -> None:
    """alpha .6 and TV .4 (osd.md 5.8); the divergences by hand."""
    p, q = row(0.4, 0.3, 0.2, 0.1), row(0.1, 0.2, 0.3, 0.4)
    kl = 0.3 * math.log(4) + 0.1 * math.log(1.5)
    w = math.exp(-3 * 0.6)
    assert float(total_variation(p, q)) == pytest.approx(0.4)
    assert float(negative_log_acceptance(p, q)) == pytest.approx(-math.log(0.6))
    assert float(forward_kl(p, q)) == pytest.approx(kl)
    assert float(reverse_kl(p, q)) == pytest.approx(kl)  # the vector is its own mirror image
    assert float(lk_hybrid(p, q)) == pytest.approx(w * kl + (1 - w) * 0.4)
    assert float(jsd(p, q)) == pytest.approx(
        sum(a * math.log(2 * a / (a + b)) for a, b in ((0.4, 0.1), (0.3, 0.2), (0.2, 0.3), (0.1, 0.4)))
    )


def test_pinsker_bounds_the_variation_by_the_divergence() -> None:
    p, q = (x.log_softmax(-1) for x in some(50, 20))
    assert bool((total_variation(p, q) <= (forward_kl(p, q) / 2).sqrt() + 1e-9).all())


def test_of_one_emitted_token_the_log_of_acceptance_is_the_cross_entropy() -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64).requires_grad_()
    emitted, ids = torch.tensor([[1.0, 0.0]], dtype=torch.float64).log(), torch.tensor([[4]])
    expected = -logits.log_softmax(-1)[:, 4]
    for loss in (forward_kl, negative_log_acceptance):
        found = loss(emitted, drafter_rows(logits, ids))
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, expected))
        torch.testing.assert_close(ours, theirs)


def test_the_log_of_acceptance_has_a_gradient_where_the_variation_has_none_left() -> None:
    """Why it is summed in logarithms: at an acceptance of e^-20 only it still pulls."""
    log_p, ids = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0]])

    def pull(loss: LossName) -> float:
        logits = torch.tensor([[0.0, 20.0]], requires_grad=True)
        LOSSES[loss](log_p, drafter_rows(logits, ids)).sum().backward()
        assert logits.grad is not None
        return -float(logits.grad[0, 0])

    assert pull("total_variation") < 1e-7
    assert pull("negative_log_acceptance") == pytest.approx(1.0, abs=1e-4)
