"""The blockwise log-probabilities against plain log_softmax, values and gradients."""

import math
from functools import partial

import pytest
import torch

from valor.algorithms import divergence, full_kl_from_logits
from valor.models import token_log_probs as module
from valor.models.token_log_probs import HeadProduct, LogitMap, token_log_probs

N, H, V = 11, 8, 37


def problem(seed: int = 0, bias: bool = True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    offset = torch.randn(V, generator=generator).requires_grad_() if bias else None
    targets = torch.randint(0, V, (N,), generator=generator)
    upstream = torch.randn(2, N, generator=generator)
    return hidden, weight, offset, targets, upstream


def plain_logits(hidden, weight, bias, temperature, logit_map):
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_map.scale
    if logit_map.softcap:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    return logits / temperature


def plain(hidden, weight, bias, targets, temperature, logit_map):
    log_p = torch.log_softmax(plain_logits(hidden, weight, bias, temperature, logit_map), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=["one product", "many products"])
def chunking(request, monkeypatch):
    """Everything in one product, or products of three rows (recomputed going back) in blocks of two."""
    if request.param == "many products":
        monkeypatch.setattr(module, "_PRODUCT_ELEMENTS", {"cpu": 3 * V})
        monkeypatch.setattr(module, "_SOFTMAX_ELEMENTS", {"cpu": 2 * V})


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.5), LogitMap(1.3, 2.0)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_plain_autograd(temperature, logit_map, with_entropy, bias):
    hidden, weight, offset, targets, upstream = problem(bias=bias)
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    product = HeadProduct(hidden, weight, offset)
    got, entropy, full_kl = token_log_probs(
        product, targets, temperature=temperature, logit_map=logit_map, with_entropy=with_entropy
    )
    assert full_kl is None
    expected, expected_entropy = plain(hidden, weight, offset, targets, temperature, logit_map)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    loss, expected_loss = got @ upstream[0], expected @ upstream[0]
    if with_entropy:
        torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
        loss, expected_loss = loss + entropy @ upstream[1], expected_loss + expected_entropy @ upstream[1]
    else:
        assert entropy is None
    for mine, reference in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected_loss, leaves), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize(("temperature", "logit_map"), [(1.0, LogitMap()), (0.6, LogitMap(1.3, 2.0))])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_exact_kl_equals_that_of_whole_logits_with_its_gradient(temperature, logit_map, with_entropy):
    hidden, weight, offset, targets, upstream = problem()
    reference = HeadProduct(*[x.detach() for x in problem(seed=1)[:3]])
    weights = torch.randn(N, generator=torch.Generator().manual_seed(2))
    got = token_log_probs(
        HeadProduct(hidden, weight, offset),
        targets,
        temperature=temperature,
        logit_map=logit_map,
        with_entropy=with_entropy,
        reference=reference,
    )
    expected = full_kl_from_logits(
        plain_logits(hidden, weight, offset, temperature, logit_map),
        plain_logits(*reference[:3], temperature, logit_map),
    )
    assert expected.min() > 0.1
    torch.testing.assert_close(got.full_kl, expected, rtol=1e-5, atol=1e-5)
    log_probs, entropy = plain(hidden, weight, offset, targets, temperature, logit_map)
    for with_log_probs in (0.0, 1.0):  # the KL alone, and beside the others
        loss = got.full_kl @ weights + with_log_probs * got.log_probs @ upstream[0]
        expected_loss = expected @ weights + with_log_probs * log_probs @ upstream[0]
        if with_entropy:
            loss, expected_loss = loss + got.entropy @ upstream[1], expected_loss + entropy @ upstream[1]
        for mine, plainly in zip(
            torch.autograd.grad(loss, (hidden, weight, offset), retain_graph=True),
            torch.autograd.grad(expected_loss, (hidden, weight, offset), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, plainly, rtol=1e-4, atol=1e-5)


def test_the_exact_kl_to_itself_is_zero_to_the_bit():
    hidden, weight, offset, targets, _ = problem()
    product = HeadProduct(hidden, weight, offset)
    full_kl = token_log_probs(product, targets, reference=product).full_kl
    assert not full_kl.any()
    assert not torch.autograd.grad(full_kl.sum(), hidden)[0].any()


@pytest.mark.usefixtures("chunking")
def test_entropy_alone_has_its_gradient():
    hidden, weight, offset, targets, upstream = problem()
    entropy = token_log_probs(HeadProduct(hidden, weight, offset), targets, with_entropy=True).entropy
    _, expected = plain(hidden, weight, offset, targets, 1.0, LogitMap())
    (mine,) = torch.autograd.grad(entropy @ upstream[1], hidden)
    (reference,) = torch.autograd.grad(expected @ upstream[1], hidden)
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_a_second_backward_pass_gives_the_same_gradient():
    hidden, weight, offset, targets, upstream = problem()
    log_probs = token_log_probs(HeadProduct(hidden, weight, offset), targets).log_probs
    first = torch.autograd.grad(log_probs @ upstream[0], hidden, retain_graph=True)[0]
    second = torch.autograd.grad(log_probs @ upstream[0], hidden)[0]
    assert torch.equal(first, second)


def test_uniform_logits_have_known_numbers():
    product = HeadProduct(torch.ones(2, H), torch.zeros(V, H), None)
    log_probs, entropy, _ = token_log_probs(product, torch.tensor([0, 5]), with_entropy=True)
    torch.testing.assert_close(log_probs, torch.full((2,), -math.log(V)))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(V)))


def test_bfloat16_stays_near_float32_and_returns_float32():
    hidden, weight, _, targets, upstream = problem(bias=False)
    half_hidden = hidden.detach().bfloat16().requires_grad_()
    half_weight = weight.detach().bfloat16().requires_grad_()
    log_probs = token_log_probs(HeadProduct(half_hidden, half_weight, None), targets).log_probs
    assert log_probs.dtype is torch.float32
    expected, _ = plain(half_hidden.float(), half_weight.float(), None, targets, 1.0, LogitMap())
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=0.1)
    grads = torch.autograd.grad(log_probs @ upstream[0], [half_hidden, half_weight])
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2
    reference = torch.autograd.grad(expected @ upstream[0], [half_hidden, half_weight])
    for mine, theirs in zip(grads, reference, strict=True):
        assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()


def test_confident_tokens_keep_small_gradients_in_bfloat16():
    # p = 1 - 2e-4 at the target: 1 - p must survive rounding to bfloat16, whose step at 1 is 4e-3.
    weight = torch.zeros(2, 4, dtype=torch.bfloat16)
    weight[0, 0] = 8.5
    hidden = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.bfloat16, requires_grad=True)
    log_probs = token_log_probs(HeadProduct(hidden, weight, None), torch.tensor([0])).log_probs
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden)
    exact = 8.5 / (1 + math.exp(8.5))
    assert abs(grad[0, 0].item() - exact) < 0.02 * exact


def test_no_tokens_at_all():
    hidden, weight, _, _, _ = problem(bias=False)
    product = HeadProduct(hidden[:0], weight, None)
    nothing = torch.zeros(0, dtype=torch.long)
    log_probs, entropy, full_kl = token_log_probs(product, nothing, with_entropy=True, reference=product)
    assert log_probs.shape == entropy.shape == full_kl.shape == (0,)
    (log_probs.sum() + entropy.sum() + full_kl.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_temperature_must_be_positive():
    hidden, weight, _, targets, _ = problem(bias=False)
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(HeadProduct(hidden, weight, None), targets, temperature=0.0)


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize("options", [{"kind": "forward_kl"}, {"kind": "jsd", "beta": 0.3, "topk": 3}])
def test_a_teacher_with_more_tokens_a_temperature_and_a_logit_map_of_its_own(options):
    hidden, weight, offset, targets, upstream = problem()
    other = [x.detach() for x in problem(seed=1)[:3]]
    mine, theirs = LogitMap(1.3, 2.0), LogitMap(0.7)
    filled_up = [
        other[0],
        torch.cat([other[1], torch.ones(5, other[1].shape[1])]),
        torch.cat([other[2], torch.ones(5)]),
    ]
    got = token_log_probs(
        HeadProduct(hidden, weight, offset),
        targets,
        temperature=0.6,
        logit_map=mine,
        with_entropy=True,
        reference=HeadProduct(*filled_up, logit_map=theirs, temperature=1.7),
        divergence=partial(divergence, **options),
    )
    student = plain_logits(hidden, weight, offset, 0.6, mine).log_softmax(-1)
    teacher = plain_logits(*other, 1.7, theirs).log_softmax(-1)
    expected = divergence(student, teacher, **options)
    torch.testing.assert_close(got.full_kl, expected, rtol=1e-5, atol=1e-5)
    log_probs, entropy = plain(hidden, weight, offset, targets, 0.6, mine)
    a, b = (
        torch.autograd.grad(x @ upstream[0] + y @ upstream[1] + z.sum(), (hidden, weight, offset))
        for x, y, z in ((got.full_kl, got.entropy, got.log_probs), (expected, entropy, log_probs))
    )
    for found, plainly in zip(a, b, strict=True):
        torch.testing.assert_close(found, plainly, rtol=1e-4, atol=1e-5)
