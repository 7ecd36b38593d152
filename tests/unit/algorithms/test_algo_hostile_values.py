"""Nothing that a log-prob, a filler or a rejected sample can be reaches a gradient or another sample as NaN or ∞."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from valor import algorithms
from valor.algorithms.kl import KL_KINDS
from valor.algorithms.registry import ADVANTAGES, POLICY_LOSSES, VALUE_LOSSES
from valor.models.token_log_probs import HeadProduct, token_log_probs

GAPS = (100.0, -100.0, 1e4, -1e4, -math.inf, 21.0, -21.0, 0.0)
FILLERS = (math.nan, math.inf, -math.inf, 1e30)
LOSS_OPTIONS = {"dro": {"dro_beta": 0.1}}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASK = torch.tensor([[1.0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])


def with_filler(x: Tensor, filler: float) -> Tensor:
    return x.masked_fill(MASK == 0, filler)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("both", [False, True], ids=["one", "both ruled out"])
def test_gradients_of_policy_losses_are_finite_and_zero_at_masked_positions(name, gap, both):
    old, advantages = -draw(4, 6).abs() - 0.1, draw(4, 6, seed=1)
    advantages[0, 1] = 0.0
    gaps = torch.where(torch.arange(6) % 2 == 0, gap, 0.01)
    for filler in FILLERS:
        new = with_filler(old + gaps, filler).requires_grad_()
        before = with_filler(new.detach() if both else old, filler)
        turns = {"turn_ids": MASK.cumsum(1).long()} if "turn_ids" in POLICY_LOSSES[name].parameters else {}
        loss, metrics = algorithms.policy_loss(
            name,
            log_probs=new,
            old_log_probs=before,
            advantages=with_filler(advantages, filler),
            response_mask=MASK,
            rollout_is_weights=with_filler(torch.ones(4, 6), filler),
            **turns,
            **LOSS_OPTIONS.get(name, {}),
        )
        loss.backward()
        assert loss.isfinite() and all(value.isfinite() for value in metrics.values()), metrics
        assert new.grad.isfinite().all() and (new.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("gap", GAPS)
def test_gradients_of_the_kl_are_finite(kind, gap):
    ref = -draw(4, 6).abs()
    for ruled_out in (False, True):
        new = (ref + gap).requires_grad_()
        kl = algorithms.kl_penalty(new, new.detach() if ruled_out else ref, kind)
        assert kl.isfinite().all()
        algorithms.aggregate_loss(kl, MASK).backward()
        assert new.grad.isfinite().all() and (new.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("name", VALUE_LOSSES)
@pytest.mark.parametrize("filler", FILLERS)
def test_gradients_of_value_losses_do_not_see_fillers(name, filler):
    parts = (4, 6, 5) if name == "hl_gauss" else (4, 6)
    mask = MASK.unsqueeze(-1) if len(parts) == 3 else MASK
    values = draw(*parts).masked_fill(mask == 0, filler).requires_grad_()
    loss, metrics = algorithms.value_loss(
        name,
        values=values,
        old_values=with_filler(draw(4, 6), filler),
        returns=with_filler(draw(4, 6, seed=2), filler),
        response_mask=MASK,
    )
    loss.backward()
    assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    assert values.grad.isfinite().all() and (values.grad * (1 - mask) == 0).all()


def estimate(name: str, mask: Tensor, filler: float, rows: Tensor, *, rejected_score: float = 0.0):
    """Advantages and returns of eight samples, four to a prompt, or of some `rows` of them."""
    fill = lambda x: x.masked_fill(mask == 0, filler)  # noqa: E731
    scores = draw(8).masked_fill(mask.sum(1) == 0, rejected_score)
    inputs = {
        "values": fill(draw(8, 6, seed=1)),
        "old_log_probs": fill(-draw(8, 6, seed=2).abs()),
        "rollout_log_probs": fill(-draw(8, 6, seed=3).abs()),
        "sum_pi_squared": fill(draw(8, 6, seed=4).sigmoid()),
        "reward_baselines": draw(8, seed=5),
        "turn_ids": torch.ones(8, 6).long(),
    }
    takes = ADVANTAGES[name].parameters
    given = {key: value[rows] for key, value in inputs.items() if key in takes}
    if "component_scores" in takes:
        given["component_scores"] = {"a": scores[rows], "b": scores[rows].square()}
    groups = [str(i // 4) for i in rows.tolist()]
    rewards = algorithms.place_at_end(scores, torch.ones(8, 6))[rows]
    return algorithms.compute_advantages(name, rewards=rewards, response_mask=mask[rows], group_ids=groups, **given)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(
    "rejected", [[1], [0, 1], [1, 5], [0, 1, 2], [0, 1, 2, 3], [3, 4, 5, 6, 7], list(range(8))], ids=str
)
def test_a_rejected_sample_is_as_if_it_was_not_sampled(name, rejected):
    mask = (torch.arange(6) < torch.arange(1, 9).clamp(max=6).unsqueeze(1)).float()
    mask[rejected] = 0.0
    rest = torch.tensor([row for row in range(8) if row not in rejected], dtype=torch.long)
    for filler, score in product((0.0, math.nan, 1e30), (0.0, 100.0, -1e6)):
        advantages, returns = estimate(name, mask, filler, torch.arange(8), rejected_score=score)
        assert not advantages[rejected].any() and not returns[rejected].any()
        if len(rest):
            alone = estimate(name, mask, 0.0, rest)
            torch.testing.assert_close((advantages[rest], returns[rest]), alone, rtol=0, atol=0)


def test_the_default_v_trace_stays_bounded_on_a_long_response():
    old, rollout = -draw(4, 2000).abs(), -draw(4, 2000, seed=1).abs()
    inputs = {"values": draw(4, 2000, seed=2), "old_log_probs": old, "rollout_log_probs": rollout, "whitening": "none"}
    mask, rewards = torch.ones(4, 2000), torch.zeros(4, 2000)
    for c_bar in (1.0, 1.2, 5.0):
        more = {} if c_bar == 1.0 else {"c_bar": c_bar}
        _, targets = algorithms.compute_advantages("vtrace", rewards=rewards, response_mask=mask, **inputs, **more)
        assert targets.abs().max() < 1e4
    default = algorithms.compute_advantages("vtrace", rewards=rewards, response_mask=mask, **inputs)[1]
    assert default.abs().max() < 100


@pytest.mark.parametrize("plain", [False, True])
def test_tokens_that_are_ruled_out_add_nothing_to_entropy_and_kl(plain):
    hidden, weight, bias = draw(3, 4).requires_grad_(), draw(7, 4, seed=1).requires_grad_(), torch.zeros(7)
    bias[2] = bias[5] = -math.inf
    other, targets = draw(7, 4, seed=2), torch.tensor([0, 1, 3])
    if plain:
        logits, ref = hidden @ weight.T + bias, hidden.detach() @ other.T + bias
        found = token_log_probs(HeadProduct(logits), targets, with_entropy=True, reference=HeadProduct(ref))
    else:
        reference = HeadProduct(hidden.detach(), other, bias)
        found = token_log_probs(HeadProduct(hidden, weight, bias), targets, with_entropy=True, reference=reference)
    left = [i for i in range(7) if i not in (2, 5)]
    p = (hidden @ weight.T)[:, left].log_softmax(-1)
    q = (hidden.detach() @ other.T)[:, left].log_softmax(-1)
    expected = (-(p.exp() * p).sum(-1), (p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close((found.entropy, found.full_kl), expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((found.entropy + 2 * found.full_kl + found.log_probs).sum(), (hidden, weight))
    logs = p.gather(1, torch.tensor([0, 1, 2])[:, None]).squeeze(1)
    right = torch.autograd.grad((expected[0] + 2 * expected[1] + logs).sum(), (hidden, weight))
    torch.testing.assert_close(gradients, right, rtol=1e-4, atol=1e-5)
