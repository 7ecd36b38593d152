"""Policy losses: gradients against finite differences, additivity over parts, masks, and what users get wrong."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from valor import algorithms
from valor.errors import UserError

OPTIONS: dict[str, dict[str, object]] = {
    "ppo": {},
    "vanilla": {"clip_ratio_high": 0.28, "clip_ratio_c": 1.2},
    "reinforce": {},
    "gpg": {},
    "gspo": {},
    "turn_ppo": {},
    "geo_mean": {},
    "cispo": {},
    "sapo": {"tau_neg": 1.5},
    "dro": {"dro_beta": 0.3},
    "clip_cov": {"clip_cov_lb": -1.0, "clip_cov_ratio": 0.2},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
    "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02},
}
PICKS_TOKENS = {"clip_cov", "kl_cov"}  # which tokens they act on depends on the tokens they are shown


def case(rows: int = 5, width: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=dtype) * 2 - 0.1
    mask = (torch.rand(rows, width, generator=generator) > 0.25).to(dtype)
    mask[0, 0] = 1
    return {
        "log_probs": old + 0.4 * torch.randn(rows, width, generator=generator, dtype=dtype),
        "old_log_probs": old,
        "advantages": torch.randn(rows, width, generator=generator, dtype=dtype),
        "response_mask": mask,
        "rollout_is_weights": torch.rand(rows, width, generator=generator, dtype=dtype) + 0.5,
        "turn_ids": (torch.arange(width) // 3 + 1).expand(rows, width),
    }


def seeded(name: str) -> dict[str, object]:
    extra = {"generator": torch.Generator().manual_seed(0)} if name == "clip_cov" else {}
    return {**OPTIONS[name], **extra}


def gradient(name: str, inputs: dict[str, Tensor], **more: object) -> tuple[Tensor, Tensor]:
    log_probs = inputs["log_probs"].clone().requires_grad_()
    loss, _ = algorithms.policy_loss(name, **{**inputs, "log_probs": log_probs}, **seeded(name), **more)
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad


def surrogate(name: str, inputs: dict[str, Tensor], at: Tensor) -> Tensor:
    """The objective with everything that the loss holds constant (stop-gradient) taken at inputs["log_probs"], written
    anew from the papers; its ordinary derivative at that point is the loss's gradient."""
    log_probs, old, advantages = inputs["log_probs"], inputs["old_log_probs"], inputs["advantages"]
    mask, weights, options = inputs["response_mask"], inputs["rollout_is_weights"], OPTIONS[name]
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    if name in ("reinforce", "gpg"):
        token = -advantages * at
    elif name == "cispo":
        token = -advantages * (log_probs - old).exp().clamp(0.8, 1.2) * at
    elif name == "gspo":
        sequence = ((log_probs - old) * mask).sum(1, keepdim=True) / lengths
        ratio = (at - log_probs + sequence).exp()
        token = -torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
    elif name == "turn_ppo":
        token = torch.zeros_like(at)
        for row, turn in itertools.product(range(len(at)), inputs["turn_ids"].unique()):
            here = ((inputs["turn_ids"][row] == turn) & (mask[row] == 1)).nonzero().flatten().tolist()
            mean = sum((log_probs - old)[row, t] for t in here) / max(len(here), 1)
            for t in here:
                ratio = (at[row, t] - log_probs[row, t] + mean).exp()
                gain = advantages[row, t] * ratio, advantages[row, t] * ratio.clamp(0.8, 1.2)
                token[row, t] = -min(gain)
    else:
        limit = float(options["clip_ratio_high"])  # type: ignore[arg-type]
        new_p, old_p = log_probs.exp(), old.exp()
        if name == "dppo_tv":
            keep = torch.where(advantages > 0, new_p - old_p <= limit, old_p - new_p <= limit)
        else:
            binary = old_p * (old_p / new_p).log() + (1 - old_p) * ((1 - old_p + 1e-8) / (1 - new_p + 1e-8)).log()
            keep = (binary <= limit) | torch.where(advantages > 0, new_p <= old_p, new_p >= old_p)
        token = -advantages * (log_probs - old).exp().clamp(max=3.0) * keep * at
    if name in ("gspo", "turn_ppo"):
        return ((token * weights * mask).sum(1, keepdim=True) / lengths).sum() / (mask.sum(1) > 0).sum()
    return (token * weights * mask).sum() / mask.sum()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_equals_finite_differences(name: str, seed: int) -> None:
    inputs = case(seed=seed)
    _, analytic = gradient(name, inputs)
    held = {"reinforce", "gpg", "cispo", "gspo", "turn_ppo", "dppo_tv", "dppo_kl"}

    def value(at: Tensor) -> Tensor:
        if name in held:
            return surrogate(name, inputs, at)
        return algorithms.policy_loss(name, **{**inputs, "log_probs": at}, **seeded(name))[0]

    numeric = torch.zeros_like(analytic)
    step = 1e-6
    for index in range(analytic.numel()):
        shift = torch.zeros(analytic.numel(), dtype=torch.float64)
        shift[index] = step
        shift = shift.view_as(analytic)
        numeric.view(-1)[index] = (value(inputs["log_probs"] + shift) - value(inputs["log_probs"] - shift)) / (2 * step)
    torch.testing.assert_close(analytic, numeric, atol=1e-6, rtol=1e-5)
    assert analytic.abs().max() > 1e-3


def modes_of(name: str) -> tuple[str, ...]:
    return ("token-mean",) if algorithms.POLICY_LOSSES[name].capability.aggregation else algorithms.LOSS_AGG_MODES


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in OPTIONS if name not in PICKS_TOKENS for mode in modes_of(name)]
)
def test_parts_of_a_mini_batch_add_up(name: str, mode: str) -> None:
    inputs = case(rows=6)
    inputs["response_mask"][4] = 0
    mask = inputs["response_mask"]
    counts = {"num_tokens": mask.sum(), "num_sequences": float((mask.sum(1) > 0).sum()), "loss_scale_factor": 7.0}
    options = {**seeded(name), "loss_agg_mode": mode, "loss_scale_factor": 7.0}
    whole, metrics = algorithms.policy_loss(name, **inputs, **options)
    parts = [slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 6)]
    results = [
        algorithms.policy_loss(name, **{key: value[part] for key, value in inputs.items()}, **{**options, **counts})
        for part in parts
    ]
    torch.testing.assert_close(sum(loss for loss, _ in results), whole)
    for key, value in metrics.items():
        assert sum(part[key].item() for _, part in results) == pytest.approx(value.item(), abs=1e-6), key


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_leaks_from_masked_positions(name: str) -> None:
    inputs = case(dtype=torch.float32)
    clean = gradient(name, inputs)
    hole = inputs["response_mask"] == 0
    for filler in (math.nan, math.inf, -math.inf):
        floats = {key: x for key, x in inputs.items() if x.is_floating_point() and key != "response_mask"}
        loss, grad = gradient(name, {**inputs, **{key: x.masked_fill(hole, filler) for key, x in floats.items()}})
        assert torch.equal(loss, clean[0]) and torch.equal(grad, clean[1])
        assert not grad[hole].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_empty_mask_gives_zero(name: str) -> None:
    inputs = case()
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    loss, grad = gradient(name, inputs)
    assert loss.item() == 0.0 and not grad.any()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_single_update_has_ratio_one(name: str) -> None:
    """old_log_probs=None: the gradient of every loss but kl_cov's at ratio 1 is −A over the denominator; sapo's gate
    has slope 1 there, GSPO and GMPO spread it over the sequence."""
    inputs = case(rows=3, width=4) | {"response_mask": torch.ones(3, 4, dtype=torch.float64)}
    inputs["advantages"] = inputs["advantages"][:, :1].expand(3, 4).contiguous()
    inputs |= {"old_log_probs": None, "rollout_is_weights": None}  # type: ignore[dict-item]
    log_probs = inputs["log_probs"].clone().requires_grad_()
    options = {} if name in PICKS_TOKENS else OPTIONS[name]
    loss, metrics = algorithms.policy_loss(name, **{**inputs, "log_probs": log_probs}, **options)
    loss.backward()
    assert metrics["ppo_kl"].item() == 0.0 and log_probs.grad is not None
    if name not in PICKS_TOKENS:
        torch.testing.assert_close(log_probs.grad, -inputs["advantages"] / 12)


@pytest.mark.parametrize("number", [1, 40])
def test_a_response_of_one_turn_is_a_sequence_for_turn_ppo(number: int) -> None:
    inputs = case() | {"turn_ids": torch.full((5, 7), number)}
    loss, grad = gradient("gspo", inputs)
    by_turn, by_turn_grad = gradient("turn_ppo", inputs)
    torch.testing.assert_close(by_turn, loss, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(by_turn_grad, grad, atol=1e-14, rtol=1e-14)


def test_turns_of_one_token_are_clipped_as_tokens() -> None:
    inputs = case() | {"turn_ids": torch.arange(1, 8).expand(5, 7)}
    loss, grad = gradient("turn_ppo", inputs)
    plain = {**inputs, "clip_ratio_c": None, "loss_agg_mode": "seq-mean-token-mean"}
    log_probs = inputs["log_probs"].clone().requires_grad_()
    expected, _ = algorithms.policy_loss("ppo", **{**plain, "log_probs": log_probs})
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, log_probs.grad)


def test_rollout_weights_scale_each_token() -> None:
    inputs = case()
    plain, weighted = dict(inputs), dict(inputs)
    plain["rollout_is_weights"] = torch.ones_like(inputs["advantages"])
    unit, _ = gradient("ppo", plain)
    weighted["rollout_is_weights"] = 2 * plain["rollout_is_weights"]
    doubled, _ = gradient("ppo", weighted)
    torch.testing.assert_close(doubled, 2 * unit)
    without, _ = algorithms.policy_loss("ppo", **{k: v for k, v in inputs.items() if k != "rollout_is_weights"})
    torch.testing.assert_close(unit, without)


def test_clip_cov_holds_back_the_number_asked_for_and_draws_from_its_generator() -> None:
    inputs = case(rows=20, width=20) | {"rollout_is_weights": None}  # type: ignore[dict-item]
    options = {"clip_cov_lb": -10.0, "clip_cov_ub": 10.0, "clip_cov_ratio": 0.1}

    def held(seed: int) -> Tensor:
        log_probs = inputs["log_probs"].clone().requires_grad_()
        loss, metrics = algorithms.policy_loss(
            "clip_cov",
            **{**inputs, "log_probs": log_probs},
            **options,
            generator=torch.Generator().manual_seed(seed),
        )
        loss.backward()
        tokens = inputs["response_mask"].sum()
        assert (metrics["pg_clipfrac_cov"] * tokens).round().item() == int(0.1 * tokens.item())
        assert log_probs.grad is not None
        return log_probs.grad

    assert torch.equal(held(0), held(0)) and not torch.equal(held(0), held(1))


def test_kl_cov_pulls_back_the_tokens_of_largest_covariance() -> None:
    inputs = case(rows=4, width=5) | {"rollout_is_weights": None}  # type: ignore[dict-item]
    mask = inputs["response_mask"]
    plain, _ = algorithms.policy_loss("kl_cov", **inputs, kl_cov_ratio=0.25, ppo_kl_coef=0.0)
    pulled, _ = algorithms.policy_loss("kl_cov", **inputs, kl_cov_ratio=0.25, ppo_kl_coef=2.0)
    present = mask.bool()
    a, p = inputs["advantages"][present], inputs["log_probs"][present]
    drift = (p - inputs["old_log_probs"][present]).abs()
    top = ((a - a.mean()) * (p - p.mean())).topk(int(0.25 * len(a))).indices
    assert (pulled - plain).item() == pytest.approx(2.0 * drift[top].sum().item() / len(a))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pppo", {}, "did you mean ppo"),
        ("nothing_like_it", {}, "known: ppo"),
        ("ppo", {"clip_ratio_c": 0.9}, "greater than 1"),
        ("ppo", {"clip_ratio_low": -0.1}, "must not be negative"),
        ("ppo", {"dro_beta": 0.1}, "unknown option of ppo 'dro_beta'"),
        ("dro", {}, "dro_beta > 0"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos > 0"),
        ("kl_cov", {"kl_cov_ratio": 2.0}, "between 0 and 1"),
        ("dppo_tv", {"clip_ratio_c": 1.0}, "greater than 1"),
        ("ppo", {"loss_agg_mode": "token_mean"}, "did you mean token-mean"),
        ("gspo", {"loss_agg_mode": "token-sum"}, "always aggregates as seq-mean-token-mean"),
        ("turn_ppo", {"turn_ids": None}, r"pass turn_ids \[B, T\]"),
    ],
)
def test_mistakes_are_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        algorithms.policy_loss(name, **{**case(), **options})


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="must have one shape"):
        algorithms.policy_loss("ppo", **{**case(), "advantages": torch.zeros(2, 2)})


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "ppo"])
def test_no_dual_clip(name: str) -> None:
    """clip_ratio_c=None is the limit of a large one."""
    inputs = case()
    options = {"clip_ratio_low": 10.0, "clip_ratio_high": 10.0}
    inputs["log_probs"] = inputs["old_log_probs"] + 2.0
    none = algorithms.policy_loss(name, **inputs, **options, clip_ratio_c=None)[0]
    large = algorithms.policy_loss(name, **inputs, **options, clip_ratio_c=1e6)[0]
    small = algorithms.policy_loss(name, **inputs, **options, clip_ratio_c=1.1)[0]
    assert none == large and none != small
