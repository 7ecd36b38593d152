"""The policy's log-probabilities against transformers' own full logits, architecture by architecture."""

import pytest
import torch
from tiny_models import ARCHITECTURES, build_hf, reference_scores, sequences
from torch import nn

from valor.algorithms import full_kl_from_logits
from valor.models.policy import PolicyModel, find_logit_map


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_and_entropy_equal_full_logits(name, rows):
    policy = PolicyModel(build_hf(name))
    assert policy.logit_map is not None, "these architectures must not fall back to full logits"
    with torch.no_grad():
        out = policy(rows, temperature=0.7, with_entropy=True)
        log_probs, entropy = reference_scores(policy.hf, rows, 0.7)
    torch.testing.assert_close(out["log_probs"], log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(out["entropy"], entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_softcap", "gpt_neox"])
def test_gradients_equal_plain_autograd(name, rows):
    policy = PolicyModel(build_hf(name))
    out = policy(rows, temperature=0.7, with_entropy=True)
    (out["log_probs"].sum() - 0.3 * out["entropy"].sum()).backward()
    mine = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    log_probs, entropy = reference_scores(policy.hf, rows, 0.7)
    (log_probs.sum() - 0.3 * entropy.sum()).backward()
    for n, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(mine[n], p.grad, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_softcap", "gpt_neox"])
def test_the_exact_kl_equals_that_of_full_logits(name, full_logits, rows):
    """Both policies' own logits, as transformers gives them; values, and gradients of the trained one alone."""
    policy, other = PolicyModel(build_hf(name)), PolicyModel(build_hf(name))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    if full_logits:
        policy.logit_map = other.logit_map = None
    out = policy(rows, temperature=0.7, reference=lambda rows: other(rows, as_reference=True))
    expected = torch.zeros_like(out["log_probs"])
    for i, p, r, ids in sequences(rows):
        logits, ref_logits = (m.hf(input_ids=ids).logits[0, p - 1 : p - 1 + r] / 0.7 for m in (policy, other))
        expected[i, :r] = full_kl_from_logits(logits, ref_logits.detach())
    assert expected.max() > 0.01
    torch.testing.assert_close(out["full_kl"], expected, rtol=1e-4, atol=1e-5)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    grads = [
        torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True) for x in (out["full_kl"], expected)
    ]
    for mine, plainly in zip(*grads, strict=True):
        assert (mine is None) == (plainly is None)
        if mine is not None:
            torch.testing.assert_close(mine, plainly, rtol=1e-3, atol=2e-5)
    assert all(p.grad is None for p in other.parameters())


def test_without_entropy_only_log_probs_come_back(rows):
    assert set(PolicyModel(build_hf("qwen2_tied"))(rows)) == {"log_probs"}


def test_padding_does_not_touch_the_result(rows):
    policy = PolicyModel(build_hf("qwen2_tied"))
    noisy = {name: value.clone() for name, value in rows.items()}
    for name, lengths in (("prompts", "prompt_lengths"), ("responses", "response_lengths")):
        for i, length in enumerate(rows[lengths].tolist()):
            noisy[name][i, length:] = 60
    wide = {**noisy, "responses": torch.nn.functional.pad(noisy["responses"], (0, 5), value=7)}
    with torch.no_grad():
        base, other = policy(rows)["log_probs"], policy(wide)["log_probs"]
    assert torch.equal(base, other[:, :7])
    assert not other[:, 7:].any() and not base[2].any()


@pytest.mark.parametrize("name", ["llama_dropout", "gpt_neox", "gpt2_dropout"])
def test_dropout_is_off_even_in_training_mode(name, rows):
    policy = PolicyModel(build_hf(name))
    with torch.no_grad():
        evaluated = policy(rows)["log_probs"]
        policy.train()
        assert torch.equal(policy(rows)["log_probs"], evaluated)
    rates = [v for k, v in policy.hf.config.to_dict().items() if "drop" in k and isinstance(v, float)]
    assert rates and not any(rates)


def test_a_head_of_its_own_kind_goes_through_full_logits(rows, caplog):
    hf = build_hf("llama_dropout")
    original = hf.forward

    def with_twist(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]) * 0.1
        return out

    hf.forward = with_twist
    with caplog.at_level("WARNING"):
        policy = PolicyModel(hf)
    assert policy.logit_map is None and "full logits" in caplog.text
    with torch.no_grad():
        log_probs, entropy = reference_scores(hf, rows, 1.5)
        out = policy(rows, temperature=1.5, with_entropy=True)
    torch.testing.assert_close(out["log_probs"], log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(out["entropy"], entropy, rtol=0, atol=1e-5)


def test_a_head_that_is_not_linear_goes_through_full_logits():
    hf = build_hf("qwen2_tied")
    hf.lm_head = nn.Sequential(nn.Linear(32, 61))
    assert find_logit_map(hf) is None


def test_the_check_at_load_leaves_the_random_generator_alone():
    hf = build_hf("qwen2_tied")
    before = torch.get_rng_state()
    PolicyModel(hf)
    assert torch.equal(before, torch.get_rng_state())


def test_the_same_hf_module_decodes_with_a_cache(rows):
    policy = PolicyModel(build_hf("qwen2_tied"))
    ids = torch.cat([rows["prompts"][:1], rows["responses"][:1, :4]], 1)
    with torch.no_grad():
        step = policy.hf(input_ids=ids[:, :-1], use_cache=True)
        last = policy.hf(input_ids=ids[:, -1:], past_key_values=step.past_key_values, use_cache=True).logits[:, -1]
        full = policy.hf(input_ids=ids).logits[:, -1]
    torch.testing.assert_close(last, full, rtol=0, atol=1e-5)
