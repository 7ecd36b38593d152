"""Distances to a teacher against torch.distributions, the formulas of GKD and verl, and numerical gradients."""

import math
from itertools import pairwise

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from valor.algorithms import divergence, policy_loss, sampled_divergence

V = 7


def pair(seed: int = 0, rows: int = 5, vocabulary: int = V, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student, which have a gradient, and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64) * scale
    return student.requires_grad_(), teacher


def jsd(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    """From probabilities."""
    m = (1 - beta) * p + beta * q
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)


EXACT = {
    "forward_kl": lambda p, q: kl_divergence(Categorical(probs=q), Categorical(probs=p)),
    "reverse_kl": lambda p, q: kl_divergence(Categorical(probs=p), Categorical(probs=q)),
    "jsd": lambda p, q: jsd(p, q, 0.3),
}


def with_tail(p: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    some = p.gather(-1, top)
    return torch.cat([some, 1 - some.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("topk", [None, 1, 3, V, 50])
@pytest.mark.parametrize("kind", EXACT)
def test_divergences_and_their_gradients_are_those_of_torch_distributions(kind, topk):
    student, teacher = pair()
    got = divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind, beta=0.3, topk=topk)
    p, q = student.softmax(-1), teacher.softmax(-1)
    if topk is not None and topk < V:
        top = q.topk(topk).indices
        p, q = with_tail(p, top), with_tail(q, top)
    expected = EXACT[kind](p, q)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    weights = torch.linspace(-1, 2, len(got), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad(x @ weights, student, retain_graph=True)[0] for x in (got, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    assert (got > 0).all()


def test_jsd_has_the_two_kls_as_its_limits_and_is_symmetric_at_a_half():
    student, teacher = (x.detach().log_softmax(-1) for x in pair())
    for beta, kind in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        exact = divergence(student, teacher, kind)
        assert torch.equal(divergence(student, teacher, "jsd", beta=beta), exact)
        near = 1e-5 if beta == 0.0 else 1 - 1e-5
        scaled = divergence(student, teacher, "jsd", beta=near) / 1e-5
        torch.testing.assert_close(scaled, exact, rtol=1e-3, atol=0)
    both = divergence(student, teacher, "jsd"), divergence(teacher, student, "jsd")
    torch.testing.assert_close(*both)
    assert (both[0] < math.log(2)).all()


def test_without_its_tail_top_k_is_the_sum_of_verl():
    student, teacher = pair(seed=3)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    got = divergence(log_p, log_q, "forward_kl", topk=2, add_tail=False, log_prob_min=-1.5)
    ids = log_q.topk(2).indices
    p, q = (x.gather(-1, ids).clamp_min(-1.5) for x in (log_p, log_q))
    raw = (q.exp() * (q - p)).sum(-1)
    assert (raw < 0).any() and (raw > 0).any()
    torch.testing.assert_close(got, raw.clamp_min(0.0))


def test_the_tail_is_a_lower_bound_that_more_tokens_raise_to_the_divergence():
    student, teacher = (x.detach().log_softmax(-1) for x in pair(rows=20, vocabulary=40))
    for kind in EXACT:
        bounds = [divergence(student, teacher, kind, topk=k) for k in (1, 2, 5, 20, 39)]
        bounds.append(divergence(student, teacher, kind))
        assert all((lower <= upper + 1e-12).all() for lower, upper in pairwise(bounds))


@pytest.mark.parametrize("topk", [None, 2])
@pytest.mark.parametrize("kind", EXACT)
def test_tokens_that_are_ruled_out_leave_finite_numbers_and_gradients(kind, topk):
    student, teacher = pair()
    with torch.no_grad():
        student[0, 1] = student[1, 2] = -math.inf
        teacher[0, 1] = teacher[2, 3] = -math.inf
    got = divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind, topk=topk)
    assert got.isfinite().all() and torch.autograd.grad(got.sum(), student)[0].isfinite().all()


def test_limits_cut_what_is_larger_and_its_gradient():
    student, teacher = pair()
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    whole = divergence(log_p, log_q, "reverse_kl")
    limit = float(whole.detach().median())
    got = divergence(log_p, log_q, "reverse_kl", limit=limit)
    assert torch.equal(got, whole.clamp(max=limit)) and (got < whole).any()
    assert not torch.autograd.grad(got.sum(), student)[0][whole > limit].any()
    x = sampled_divergence(torch.tensor([-9.0, -1.0, -0.5]), torch.tensor([-1.0, -9.0, -0.6]), "k1", limit=4.0)
    torch.testing.assert_close(x, torch.tensor([-4.0, 4.0, 0.1]))
    x = sampled_divergence(torch.tensor([-9.0, -1.0]), torch.tensor([-1.0, -9.0]), "k1", log_prob_min=-2.0)
    torch.testing.assert_close(x, torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_have_the_expectation_that_their_names_say(kind):
    """Over all tokens of the vocabulary, each with its probability under the student. (k3 is cut at 10.)"""
    student, teacher = pair(rows=1, scale=1.0)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    p = log_p.exp().detach()
    estimate = sampled_divergence(log_p, log_q, kind)
    if kind != "k2":
        torch.testing.assert_close((p * estimate).sum(), divergence(log_p, log_q, "reverse_kl")[0])
    # the gradient of k2 is that of the reverse KL, of k3 that of the forward KL; k1 has none
    exact = {"k1": 0.0 * log_p.sum(), "k2": divergence(log_p, log_q, "reverse_kl").sum()}
    expected = exact.get(kind, divergence(log_p, log_q, "forward_kl").sum())
    mine, theirs = (torch.autograd.grad(x, student, retain_graph=True)[0] for x in ((p * estimate).sum(), expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_minus_k1_as_advantage_is_in_expectation_the_gradient_of_the_reverse_kl():
    student, teacher = pair(rows=1)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(V):
        chosen = log_p[:, token : token + 1]
        signal = -sampled_divergence(chosen.detach(), log_q[:, token : token + 1], "k1")
        mask = torch.ones_like(signal)
        loss, _ = policy_loss("ppo", log_probs=chosen, old_log_probs=None, advantages=signal, response_mask=mask)
        total = total + loss * float(chosen.detach().exp())
    expected = divergence(log_p, log_q, "reverse_kl").sum()
    mine, theirs = (torch.autograd.grad(x, student, retain_graph=True)[0] for x in (total, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
