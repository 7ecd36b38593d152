"""Invariances that hold for every estimator and loss, whatever the numbers."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from valor import algorithms

ESTIMATORS = tuple(algorithms.ADVANTAGES)
POLICY_LOSSES = [name for name in algorithms.POLICY_LOSSES if algorithms.POLICY_LOSSES[name].builtin]
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
LOSSES = ("ppo", "gspo", "geo_mean", "cispo", "sapo", "dro", "gpg", "reinforce", "dppo_tv", "dppo_kl")
# Estimators whose advantages are a multiple of the rewards, with every other input scaled alike; for the others only
# the direction is the same.
LINEAR = {"rloo", "opo", "gpg", "remax", "optimal_token_baseline"}
quick = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


def batch(seed: int, rows: int = 8, width: int = 9) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).float() * (torch.rand(rows, width, generator=generator) > 0.2)
    mask[:, 0] = 1.0
    return {
        "rewards": torch.randn(rows, width, generator=generator) * (torch.rand(rows, width, generator=generator) > 0.5),
        "response_mask": mask,
        "values": torch.randn(rows, width, generator=generator),
        "group_ids": torch.randint(0, 3, (rows,), generator=generator).tolist(),
        "reward_baselines": torch.randn(rows, generator=generator),
    }


def own_options(name: str, seed: int, rows: int = 8, width: int = 9) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed + 1)
    if name == "gdpo":
        return {"component_scores": {key: torch.randn(rows, generator=generator) for key in ("a", "b")}}
    if name == "vtrace":
        names = ("old_log_probs", "rollout_log_probs")
        return {key: -torch.rand(rows, width, generator=generator) for key in names}
    if name == "optimal_token_baseline":
        return {
            "old_log_probs": -torch.rand(rows, width, generator=generator),
            "sum_pi_squared": torch.rand(rows, width, generator=generator),
        }
    return {}


def rearrange(value: object, order: Tensor) -> object:
    if isinstance(value, dict):
        return {key: rearrange(item, order) for key, item in value.items()}
    return value[order] if isinstance(value, Tensor) else [value[i] for i in order.tolist()]  # type: ignore[index]


def estimate(name: str, inputs: dict[str, object], options: dict[str, object], **more: object) -> tuple[Tensor, Tensor]:
    return algorithms.compute_advantages(name, **inputs, **options, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=seeds)
def test_the_order_of_samples_does_not_matter(name: str, seed: int) -> None:
    inputs, options = batch(seed), own_options(name, seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    straight = estimate(name, inputs, options, gamma=0.9)
    shuffled = estimate(
        name,
        {key: rearrange(value, order) for key, value in inputs.items()},
        {key: rearrange(value, order) for key, value in options.items()},
        gamma=0.9,
    )
    for one, other in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(one[order], other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=seeds, extra=st.integers(1, 40))
def test_the_width_of_the_padding_does_not_matter(name: str, seed: int, extra: int) -> None:
    inputs, options = batch(seed), own_options(name, seed)

    def pad(value: object) -> object:
        if isinstance(value, Tensor) and value.ndim == 2:
            return torch.nn.functional.pad(value, (0, extra))
        return value

    straight = estimate(name, inputs, options, gamma=0.9, lam=0.8)
    padded = estimate(
        name,
        {key: pad(value) for key, value in inputs.items()},
        {key: pad(value) for key, value in options.items()},
        gamma=0.9,
        lam=0.8,
    )
    for one, other in zip(straight, padded, strict=True):
        torch.testing.assert_close(one, other[:, :9], atol=1e-5, rtol=1e-5)
        assert not other[:, 9:].any()


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=seeds)
def test_masked_positions_are_zero_and_everything_is_finite(name: str, seed: int) -> None:
    inputs, options = batch(seed), own_options(name, seed)
    for result in estimate(name, inputs, options):
        assert not result[inputs["response_mask"] == 0].any() and result.isfinite().all()


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=seeds, scale=st.sampled_from([0.25, 4.0, 64.0]))
def test_scaling_the_rewards(name: str, seed: int, scale: float) -> None:
    """Unnormalised advantages scale along; normalised ones (whitened, or over the group's std) stay, up to the eps."""
    inputs, options = batch(seed), own_options(name, seed)
    scaled = dict(inputs)
    for key in ("rewards", "values", "reward_baselines"):
        scaled[key] = inputs[key] * scale  # type: ignore[operator]
    scaled_options = dict(options)
    if name == "gdpo":
        scaled_options["component_scores"] = {k: v * scale for k, v in options["component_scores"].items()}  # type: ignore[attr-defined]
    advantages, returns = estimate(name, inputs, options)
    ours, our_returns = estimate(name, scaled, scaled_options)
    linear = name in LINEAR
    tolerance = 1e-4 * max(1.0, scale) if linear else 1e-2  # two scores that nearly agree: 1e-6 beside their std shows
    torch.testing.assert_close(ours, advantages * scale if linear else advantages, atol=tolerance, rtol=tolerance)
    if name in ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"):
        torch.testing.assert_close(our_returns, returns * scale, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(seed=seeds, cuts=st.lists(st.integers(0, 8), max_size=3), mode=st.sampled_from(algorithms.LOSS_AGG_MODES))
def test_splitting_a_mini_batch_over_ranks(name: str, seed: int, cuts: list[int], mode: str) -> None:
    """Losses and gradients of the parts add up to those of the whole; a rank may have no row at all."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.as_tensor(batch(seed)["response_mask"])
    mask[seed % 8] = 0.0
    old = -torch.rand(8, 9, generator=generator)
    inputs = {
        "log_probs": old + 0.3 * torch.randn(8, 9, generator=generator),
        "old_log_probs": old,
        "advantages": torch.randn(8, 9, generator=generator),
        "response_mask": mask,
    }
    if algorithms.POLICY_LOSSES[name].capability.aggregation:
        mode = "token-mean"
    options = {"loss_agg_mode": mode, "loss_scale_factor": 9.0} | ({"dro_beta": 0.1} if name == "dro" else {})
    counts = {"num_tokens": mask.sum().item(), "num_sequences": (mask.sum(1) > 0).sum().item()}

    def run(rows: slice, more: dict) -> tuple[Tensor, Tensor]:
        part = {key: value[rows] for key, value in inputs.items()}
        part["log_probs"] = part["log_probs"].clone().requires_grad_()
        loss, _ = algorithms.policy_loss(name, **part, **options, **more)
        loss.backward()
        return loss.detach(), part["log_probs"].grad

    whole, gradient = run(slice(None), {})
    edges = [0, *sorted(cuts), 8]
    parts = [run(slice(a, b), counts) for a, b in itertools.pairwise(edges)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient, atol=1e-6, rtol=1e-5)


def on_observations(inputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same with other numbers wherever the mask is 0, some of them no numbers."""
    mask = inputs["response_mask"]
    generator = torch.Generator().manual_seed(seed + 7)

    def change(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.where(mask == 1, x, seed % 5)
        filler = 9 * torch.randn(x.shape, generator=generator)
        filler = filler.masked_fill(torch.rand(x.shape, generator=generator) < 0.2, torch.nan)
        return torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)) == 1, x, filler)

    touched = {key: change(x) for key, x in inputs.items() if key != "response_mask" and x.shape[:2] == mask.shape}
    return inputs | touched


def loss_inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.as_tensor(batch(seed)["response_mask"])
    old = -torch.rand(8, 9, generator=generator)
    return {
        "log_probs": old + 0.3 * torch.randn(8, 9, generator=generator),
        "old_log_probs": old,
        "advantages": torch.randn(8, 9, generator=generator),
        "rollout_is_weights": torch.rand(8, 9, generator=generator) + 0.5,
        "response_mask": mask,
        "turn_ids": (torch.arange(9) // 4 + 1).expand(8, 9) * mask.long(),
    }


def policy_gradient(name: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Loss, gradient and metrics."""
    options: dict = {"dro_beta": 0.1} if name == "dro" else {}
    if name == "clip_cov":
        options = {"clip_cov_lb": -1.0, "clip_cov_ratio": 0.2, "generator": torch.Generator().manual_seed(0)}
    log_probs = inputs["log_probs"].clone().requires_grad_()
    loss, metrics = algorithms.policy_loss(name, **{**inputs, "log_probs": log_probs}, **options)  # type: ignore[arg-type]
    loss.backward()
    assert log_probs.grad is not None
    return [loss.detach(), log_probs.grad, *metrics.values()]


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@quick
@given(seed=seeds)
def test_observations_have_no_part_in_a_policy_loss(name: str, seed: int) -> None:
    """Nothing that stands there changes a bit of loss, gradient or metrics; that the policy said it would."""
    inputs = loss_inputs(seed)
    found = policy_gradient(name, inputs)
    hole = inputs["response_mask"] == 0
    assert not found[1][hole].any() and not found[1][hole].signbit().any()
    assert same_bits(policy_gradient(name, on_observations(inputs, seed)), found)
    if hole.any():
        row, place = hole.nonzero()[0].tolist()
        said = {**inputs, "response_mask": inputs["response_mask"].clone(), "turn_ids": inputs["turn_ids"].clone()}
        said["response_mask"][row, place], said["turn_ids"][row, place] = 1.0, place // 4 + 1
        assert not same_bits(policy_gradient(name, said), found)


@pytest.mark.parametrize("name", [n for n in algorithms.VALUE_LOSSES if algorithms.VALUE_LOSSES[n].builtin])
@quick
@given(seed=seeds)
def test_observations_have_no_part_in_a_value_loss(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.as_tensor(batch(seed)["response_mask"])
    shape = (8, 9, 5) if name == "hl_gauss" else (8, 9)
    inputs = {key: torch.rand(8, 9, generator=generator) for key in ("old_values", "returns")}
    inputs |= {"values": torch.randn(shape, generator=generator), "response_mask": mask}

    def gradient(inputs: dict[str, Tensor]) -> list[Tensor]:
        values = inputs["values"].clone().requires_grad_()
        loss, metrics = algorithms.value_loss(name, **{**inputs, "values": values})  # type: ignore[arg-type]
        loss.backward()
        assert values.grad is not None
        return [loss.detach(), values.grad, *metrics.values()]

    found = gradient(inputs)
    assert not found[1][mask == 0].any() and same_bits(gradient(on_observations(inputs, seed)), found)


@pytest.mark.parametrize("mode", algorithms.LOSS_AGG_MODES)
@quick
@given(seed=seeds, kind=st.sampled_from(KL_KINDS))
def test_observations_have_no_part_in_kl_and_entropy(mode: str, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.as_tensor(batch(seed)["response_mask"])
    inputs = {"ref_log_probs": -torch.rand(8, 9, generator=generator), "response_mask": mask}
    inputs["logits"] = torch.randn(8, 9, 4, generator=generator)

    def gradient(inputs: dict[str, Tensor]) -> list[Tensor]:
        logits = inputs["logits"].clone().requires_grad_()
        log_probs = logits.log_softmax(-1)
        kl = algorithms.kl_penalty(log_probs[..., 0], inputs["ref_log_probs"], kind)
        terms = [kl, -(log_probs.exp() * log_probs).sum(-1)]
        losses = [algorithms.aggregate_loss(term, mask, mode) for term in terms]
        torch.stack(losses).sum().backward()
        assert logits.grad is not None
        return [*(loss.detach() for loss in losses), logits.grad]

    found = gradient(inputs)
    changed = {key: torch.nan_to_num(x) for key, x in on_observations(inputs, seed).items()}  # a forward gives numbers
    again = gradient(changed)
    assert not found[-1][mask == 0].any() and not again[-1][mask == 0].any()
    assert same_bits(again, found)


@pytest.mark.parametrize(("name", "unit"), [*((n, "token") for n in ESTIMATORS), ("gae", "turn"), ("gae", "bilevel")])
@quick
@given(seed=seeds)
def test_observations_have_no_part_in_advantages(name: str, unit: str, seed: int) -> None:
    """But for a reward there, which `reward_on_masked` is about."""
    inputs, options = batch(seed), own_options(name, seed)
    mask = torch.as_tensor(inputs["response_mask"])
    inputs["rewards"] = torch.as_tensor(inputs["rewards"]) * mask
    if unit != "token":
        options |= {
            "gae_unit": unit,
            "turn_ids": (torch.arange(9) // 4 + 1).expand(8, 9) * mask.long(),
            "lam_turn": 0.8,
        }
    lam = 1.0 if unit == "turn" else 0.9
    found = estimate(name, inputs, options, lam=lam)
    tensors = {key: x for key, x in (inputs | options).items() if isinstance(x, Tensor) and key != "rewards"}
    changed = on_observations(tensors, seed)
    again = estimate(
        name,
        {key: changed.get(key, x) for key, x in inputs.items()},
        {key: changed.get(key, x) for key, x in options.items()},
        lam=lam,
    )
    assert same_bits(list(found), list(again))
