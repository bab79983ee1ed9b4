"""Losses against plain float64 formulas, and their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.algorithms.entropy import entropy_from_logits
from moe_asyncrl.algorithms.kl import Estimator, k3, kl_estimate
from moe_asyncrl.algorithms.policy_loss import importance_weight, policy_terms
from moe_asyncrl.algorithms.supervised import supervised_loss

LOGP = st.floats(-8, -0.01)
TOKEN = st.tuples(LOGP, LOGP, LOGP, st.floats(-3, 3))


def plain(new: float, old: float, sampler: float, a: float, low: float, high: float, cap: float) -> float:
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    weight = min(math.exp(old - sampler), cap) if cap > 0 else 1.0
    return -weight * min(ratio * a, bounded * a)


def terms(rows: list[tuple[float, float, float, float]], cap: float, new: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
    columns = [torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True)]
    return policy_terms(
        columns[0] if new is None else new,
        *columns[1:],
        clip_low=0.2,
        clip_high=0.3,
        importance_cap=cap,
    )


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(TOKEN, min_size=1, max_size=8), cap=st.sampled_from([0.0, 0.5, 2.0]))
def test_policy_loss_equals_its_formula(rows: list[tuple[float, float, float, float]], cap: float) -> None:
    found = terms(rows, cap).loss
    wanted = [plain(*row, 0.2, 0.3, cap) for row in rows]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_policy_gradient_by_finite_differences(cap: float) -> None:
    torch.manual_seed(0)
    n = 200
    old = -3 * torch.rand(n, dtype=torch.float64) - 0.1
    rows = list(
        zip(
            (old + 0.4 * torch.randn(n, dtype=torch.float64)).tolist(),
            old.tolist(),
            (old + torch.randn(n, dtype=torch.float64)).tolist(),
            torch.randn(n, dtype=torch.float64).tolist(),
            strict=True,
        )
    )
    new = torch.tensor([r[0] for r in rows], dtype=torch.float64, requires_grad=True)
    found = terms(rows, cap, new)
    (gradient,) = torch.autograd.grad(found.loss.sum(), new)
    h = 1e-6
    # Away from the kinks of min and clip, where no derivative exists.
    smooth = ((found.ratio - 0.8).abs() > 1e-4) & ((found.ratio - 1.3).abs() > 1e-4)
    up, down = (terms(rows, cap, (new + s * h).detach()).loss for s in (1, -1))
    torch.testing.assert_close(gradient[smooth], ((up - down) / (2 * h))[smooth], rtol=1e-6, atol=1e-8)
    assert found.clipped.any() and not found.clipped.all()
    assert (gradient[found.clipped] == 0).all(), "a clipped token has no gradient"


def test_the_bounds_are_asymmetric() -> None:
    for ratio, advantage, clipped in ((1.25, 1.0, False), (1.35, 1.0, True), (0.75, -1.0, True), (0.85, -1.0, False)):
        row = (math.log(ratio) - 1.0, -1.0, -1.0, advantage)
        assert bool(terms([row], 0.0).clipped[0]) is clipped, (ratio, advantage)
    # The other side is never clipped: there the policy may always come back.
    assert not terms([(math.log(5.0) - 1.0, -1.0, -1.0, -1.0)], 0.0).clipped[0]
    assert not terms([(math.log(0.1) - 1.0, -1.0, -1.0, 1.0)], 0.0).clipped[0]


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages, sampler = torch.tensor([0.5, -2.0]), torch.tensor([-1.5, -2.0])
    loss = policy_terms(new, new, sampler, advantages, clip_low=0.2, clip_high=0.28, importance_cap=2.0).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    weight = torch.tensor([math.exp(0.5), 1.0])
    torch.testing.assert_close(gradient, -weight * advantages)


def test_importance_weight() -> None:
    old = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -5.0, -1.0])
    weight = importance_weight(old, sampler, 2.0)
    assert not weight.requires_grad
    torch.testing.assert_close(weight, torch.tensor([1.0, 2.0, math.exp(-2.0)]))
    torch.testing.assert_close(importance_weight(old, sampler, 0.0), torch.ones(3))


def test_supervised_loss() -> None:
    torch.testing.assert_close(supervised_loss(torch.tensor([-0.5, -2.0])), torch.tensor([0.5, 2.0]))


def test_k3_is_unbiased_never_negative_and_keeps_its_digits() -> None:
    torch.manual_seed(1)
    p, q = (torch.randn(16, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * k3(p, q)).sum(), exact, rtol=1e-12, atol=0.0)
    assert (k3(p, q) >= 0).all()
    # Near agreement k3 is half the squared difference: float32 would lose it if computed as exp(x) - 1 - x.
    x = torch.tensor([1e-3])
    assert k3(torch.zeros(1), x).item() == pytest.approx(0.5e-6, rel=2e-2)


def plain_kl(drawn: float, other: float, estimator: Estimator) -> float:
    log_ratio = other - drawn
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_equal_their_formulas_and_their_gradients_finite_differences(estimator: Estimator) -> None:
    torch.manual_seed(3)
    drawn, other = (-4 * torch.rand(200, dtype=torch.float64) - 0.1 for _ in range(2))
    drawn.requires_grad_()
    found = kl_estimate(drawn, other, estimator)
    wanted = [plain_kl(a, b, estimator) for a, b in zip(drawn.tolist(), other.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), drawn)
    h = 1e-6
    up, down = (kl_estimate((drawn + s * h).detach(), other, estimator) for s in (1, -1))
    torch.testing.assert_close(gradient, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)


def test_what_the_estimators_are_over_all_tokens() -> None:
    """k1 and k3 have the divergence as their mean, k2 its gradient; k1 has none on average."""
    torch.manual_seed(4)
    logits = torch.randn(16, dtype=torch.float64, requires_grad=True)
    q = torch.randn(16, dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)

    def mean(estimator: Estimator) -> torch.Tensor:
        return (p.exp().detach() * kl_estimate(p, q, estimator)).sum()

    for unbiased in ("k1", "k3"):
        torch.testing.assert_close(mean(unbiased), exact)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.autograd.grad(mean("k2"), logits, retain_graph=True)[0], slope)
    nothing = torch.autograd.grad(mean("k1"), logits)[0]
    torch.testing.assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=1e-12)


def test_entropy() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy_from_logits(logits), -(p * p.log()).sum(-1))
    assert torch.autograd.gradcheck(entropy_from_logits, (logits,))
    cut = torch.tensor([[0.0, 0.0, -math.inf]])
    assert entropy_from_logits(cut).item() == pytest.approx(math.log(2))
    assert entropy_from_logits(torch.zeros(1, 7)).item() == pytest.approx(math.log(7))
