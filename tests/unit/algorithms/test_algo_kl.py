"""KL estimators against the exact divergence, the penalty in the reward, controllers, whole distributions."""

import pytest
import torch

from valor import algorithms
from valor.errors import UserError


def distributions(seed: int = 0, vocabulary: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, vocabulary, generator=generator, dtype=torch.float64)
    return logits, logits + 0.5 * torch.randn(5, vocabulary, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    """Their expectation under π, summed over the whole vocabulary, is the exact KL."""
    logits, ref_logits = distributions()
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    expected = (p.exp() * algorithms.kl_penalty(p, q, kind)).sum(-1)
    exact = algorithms.full_kl_from_logits(logits, ref_logits)
    torch.testing.assert_close(expected.float(), exact.float())
    torch.testing.assert_close(exact.double(), (p.exp() * (p - q)).sum(-1), atol=1e-6, rtol=1e-5)


def test_the_expected_gradient_of_k2_and_of_plus_variants_is_that_of_the_kl() -> None:
    logits, ref_logits = distributions()
    q = ref_logits.log_softmax(-1)
    z = logits.clone().requires_grad_()
    p = z.log_softmax(-1)
    (p.exp() * (p - q)).sum().backward()
    exact = z.grad
    for kind in ("k2", "k1+", "k3+", "abs+", "low_var_kl+"):
        z = logits.clone().requires_grad_()
        p = z.log_softmax(-1)
        (p.detach().exp() * algorithms.kl_penalty(p, q, kind)).sum().backward()
        torch.testing.assert_close(z.grad, exact)


def test_aliases_and_unknown_kinds() -> None:
    p, q = torch.randn(4), torch.randn(4)
    for long, short in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("mse+", "k2"), ("kl+", "k1+")):
        assert torch.equal(algorithms.kl_penalty(p, q, long), algorithms.kl_penalty(p, q, short))
    with pytest.raises(UserError, match="did you mean"):
        algorithms.kl_penalty(p, q, "low_var")
    with pytest.raises(UserError, match="full_kl_from_logits"):
        algorithms.kl_penalty(p, q, "full")


def test_penalty_leaves_masked_positions_and_rows_without_tokens_alone() -> None:
    scores = torch.tensor([[0.0, 3.0], [7.0, 0.0]])
    log_probs = torch.tensor([[-1.0, torch.nan], [torch.nan, torch.inf]])
    divergence = algorithms.kl_penalty(log_probs, torch.full((2, 2), -2.0), "k1")
    rewards, current = algorithms.subtract_divergence(scores, divergence, torch.tensor([[1.0, 0], [0, 0]]), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 3.0], [7.0, 0.0]] and current == 1.0


def test_controllers_resume_where_they_were() -> None:
    first = algorithms.KLController(0.1, target_kl=1.0, horizon=100)
    first.update(5.0, 10)
    assert first.value == pytest.approx(0.1 * 1.02)
    again = algorithms.KLController(0.7, target_kl=1.0, horizon=100)
    again.value = first.value
    for controller in (first, again):
        controller.update(0.0, 10)
    assert again.value == first.value == pytest.approx(0.1 * 1.02 * 0.98)
    fixed = algorithms.KLController(0.3)
    fixed.update(100.0, 1000)
    assert fixed.value == 0.3


def test_exact_kl_with_a_token_that_is_ruled_out() -> None:
    logits, ref_logits = distributions()
    logits[0, 0] = ref_logits[0, 0] = -torch.inf
    leaf = logits.clone().requires_grad_()
    algorithms.full_kl_from_logits(leaf, ref_logits).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
