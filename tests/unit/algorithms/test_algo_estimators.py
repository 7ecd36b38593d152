"""Critic-free estimators: hand-worked cases, ties, groups of one, ids of every kind."""

import itertools
import uuid

import numpy as np
import pytest
import torch
from torch import Tensor

from valor import algorithms
from valor.errors import UserError

GROUPED = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def outcome(scores: list[float], lengths: list[int] | None = None) -> dict[str, Tensor]:
    lengths = lengths or [3] * len(scores)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores)
    return {"rewards": rewards, "response_mask": mask}


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_that_agrees_has_advantage_exactly_zero(name: str) -> None:
    case = outcome([0.1] * 7 + [1.0, 0.0], lengths=[3, 5, 2, 4, 1, 5, 3, 2, 2])
    advantages, _ = algorithms.compute_advantages(name, **case, group_ids=[0] * 7 + [1, 1], **whitening_off(name))
    assert not advantages[:7].any() and advantages[7:].any()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("scale", [1.0, 33.0])
def test_a_group_that_agrees_but_for_rounding_has_advantage_exactly_zero(name: str, scale: float) -> None:
    """Rewards of steps that add up to the same score in other parts, such as those of an agent's turns."""
    parts = [[0.1, 0.2, 0.4], [0.7, 0.0, 0.0], [0.35, 0.35, 0.0], [0.6, 0.05, 0.05], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    rewards, mask = torch.tensor(parts) * scale, torch.ones(6, 3)
    assert len(set(rewards[:4].sum(1).tolist())) > 1
    advantages, _ = algorithms.compute_advantages(
        name, rewards=rewards, response_mask=mask, group_ids=[0] * 4 + [1, 1], **whitening_off(name)
    )
    assert not advantages[:4].any() and advantages[4:].any()


def whitening_off(name: str) -> dict[str, str]:
    return {"whitening": "none"} if "whitening" in algorithms.ADVANTAGES[name].options else {}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_one_are_zero(name: str) -> None:
    advantages, _ = algorithms.compute_advantages(name, **outcome([1.0, 0.0, 3.0]), group_ids=["a", "a", "b"])
    assert not advantages[2].any() and advantages[:2].any() and not advantages.isnan().any()


def test_a_singleton_leaves_the_other_rows_as_they_are_with_either_setting() -> None:
    case = outcome([1.0, 0.0, 3.0, 0.5, 0.2])
    for name in ("reinforce_plus_plus_baseline", "grpo", "opo", "rloo", "gpg"):
        zero, _ = algorithms.compute_advantages(name, **case, group_ids=[0, 0, 1, 2, 2])
        raw, _ = algorithms.compute_advantages(name, **case, group_ids=[0, 0, 1, 2, 2], singleton="raw")
        assert torch.equal(zero[[0, 1, 3, 4]], raw[[0, 1, 3, 4]]) and raw[2].any()


@pytest.mark.parametrize("name", GROUPED)
def test_ids_of_every_kind_mean_the_same(name: str) -> None:
    case = outcome([1.0, 0.0, 3.0, 0.5, 0.2])
    numbers = [7, 3, 7, 3, 7]
    names = {7: str(uuid.uuid4()), 3: str(uuid.uuid4())}
    forms = [
        numbers,
        tuple(numbers),
        torch.tensor(numbers),
        np.array(numbers),
        [names[n] for n in numbers],
        np.array([names[n] for n in numbers], dtype=object),
    ]
    results = [algorithms.compute_advantages(name, **case, group_ids=ids)[0] for ids in forms]
    assert results[0].any() and all(torch.equal(results[0], other) for other in results[1:])


def test_group_ids_are_checked() -> None:
    with pytest.raises(UserError, match="pass group_ids"):
        algorithms.compute_advantages("grpo", **outcome([1.0, 0.0]))
    with pytest.raises(UserError, match="one id per sample"):
        algorithms.compute_advantages("grpo", **outcome([1.0, 0.0]), group_ids=[1, 1, 1])


def test_rloo_is_the_score_minus_the_mean_of_the_others() -> None:
    scores = [1.0, 0.5, -2.0, 4.0]
    advantages, _ = algorithms.compute_advantages("rloo", **outcome(scores), group_ids=[0] * 4)
    expected = [s - (sum(scores) - s) / 3 for s in scores]
    torch.testing.assert_close(advantages[:, 0], torch.tensor(expected))


def test_opo_weighs_the_baseline_by_length() -> None:
    """(10·1 + 2·0) / 12 = 5/6."""
    advantages, _ = algorithms.compute_advantages("opo", **outcome([1.0, 0.0], lengths=[10, 2]), group_ids=[0, 0])
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1 / 6, -5 / 6]))


def test_gpg_scales_by_the_share_of_samples_with_a_score() -> None:
    case = outcome([1.0, 0.0, 0.0, 0.0])
    advantages, _ = algorithms.compute_advantages("gpg", **case, group_ids=[0] * 4, f_norm=2.0)
    torch.testing.assert_close(advantages[:, 0], 4.0 * torch.tensor([0.75, -0.25, -0.25, -0.25]) / 2.0)
    nothing, _ = algorithms.compute_advantages("gpg", **outcome([0.0] * 4), group_ids=[0] * 4)
    assert not nothing.any()


def test_passk_is_what_the_best_of_the_group_loses_without_the_sample() -> None:
    scores = [0.3, 2.0, -1.0, 1.5]
    advantages, _ = algorithms.compute_advantages(
        "grpo_passk", **outcome(scores), group_ids=[0] * 4, norm_adv_by_std_in_grpo=False
    )
    without = [max(others) for others in itertools.combinations(scores, 3)][::-1]  # leaves out sample 0, 1, …
    torch.testing.assert_close(advantages[:, 0], torch.tensor([2.0 - w for w in without]))
    tie, _ = algorithms.compute_advantages("grpo_passk", **outcome([1.0, 1.0, 0.0]), group_ids=[0] * 3)
    assert not tie.any()


def test_remax_subtracts_the_greedy_reward() -> None:
    case = outcome([1.0, 0.0], lengths=[2, 3])
    advantages, returns = algorithms.compute_advantages("remax", **case, reward_baselines=torch.tensor([0.25, 0.5]))
    torch.testing.assert_close(returns, torch.tensor([[1.0, 1, 0], [0, 0, 0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.75, 0], [-0.5, -0.5, -0.5]]))
    with pytest.raises(UserError, match="reward_baselines"):
        algorithms.compute_advantages("remax", **case)


def test_gdpo_keeps_components_apart() -> None:
    """A component with a large spread does not drown the other, as it does in GRPO on their sum."""
    components = {"format": torch.tensor([1.0, 0.0, 1.0, 0.0]), "answer": torch.tensor([100.0, 100.0, 0.0, 0.0])}
    case = outcome([101.0, 100.0, 1.0, 0.0])
    inputs = {**case, "group_ids": [0] * 4, "whitening": "none"}
    equal, _ = algorithms.compute_advantages("gdpo", **inputs, component_scores=components)
    assert equal[:, 0].tolist() == pytest.approx([3**0.5, 0.0, 0.0, -(3**0.5)], abs=1e-4)
    weights = {"format": 1.0, "answer": 0.0}
    format_only, _ = algorithms.compute_advantages(
        "gdpo", **inputs, component_scores=components, component_weights=weights
    )
    alone, _ = algorithms.compute_advantages("grpo", **outcome([1.0, 0.0, 1.0, 0.0]), group_ids=[0] * 4)
    torch.testing.assert_close(format_only, alone)
    whitened, _ = algorithms.compute_advantages("gdpo", **case, group_ids=[0] * 4, component_scores=components)
    assert whitened.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whitened.std().item() == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(UserError, match="component_scores"):
        algorithms.compute_advantages("gdpo", **case, group_ids=[0] * 4)
    with pytest.raises(UserError, match="component_weights"):
        algorithms.compute_advantages("gdpo", **inputs, component_scores=components, component_weights={"other": 1.0})


def otb_case(gaps: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([6, 3, 5, 2])
    mask = (torch.arange(7) < lengths[:, None]).float()
    if gaps:
        mask[0, 2] = mask[2, 1] = 0.0
    return {
        "rewards": torch.randn(4, 7, generator=generator) * mask,
        "response_mask": mask,
        "old_log_probs": -torch.rand(4, 7, generator=generator),
        "sum_pi_squared": torch.rand(4, 7, generator=generator),
        "rollout_is_weights": torch.rand(4, 7, generator=generator) + 0.5,
    }


@pytest.mark.parametrize("compact", [False, True])
def test_optimal_token_baseline_equals_a_plain_loop(compact: bool) -> None:
    case = otb_case(gaps=True)
    advantages, returns = algorithms.compute_advantages(
        "optimal_token_baseline", **case, group_ids=[0] * 4, compact=compact
    )
    mask = case["response_mask"]
    places = [[t for t in range(7) if mask[i, t]] for i in range(4)]
    gain, energy = torch.zeros(4, 7), torch.zeros(4, 7)
    for i, row in enumerate(places):
        total = 0.0
        for t in row:
            gain[i, t] = case["rewards"][i, [s for s in row if s >= t]].sum()
            weight = 1 - 2 * case["old_log_probs"][i, t].exp() + case["sum_pi_squared"][i, t]
            total += (weight * case["rollout_is_weights"][i, t] ** 2).item()
            energy[i, t] = total
    expected = torch.zeros(4, 7)
    for step in range(7):
        at = [
            (i, row[step] if compact else step)
            for i, row in enumerate(places)
            if (step < len(row) if compact else step in row)
        ]
        weight = sum(energy[place].item() for place in at)
        baseline = sum((gain[place] * energy[place]).item() for place in at) / (weight + 1e-8) if len(at) > 1 else 0.0
        for place in at:
            expected[place] = gain[place] - baseline
    torch.testing.assert_close(returns, gain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)


def test_optimal_token_baseline_of_a_group_of_one() -> None:
    case = otb_case(gaps=False)
    zero, returns = algorithms.compute_advantages("optimal_token_baseline", **case, group_ids=[0, 0, 0, 1])
    raw, _ = algorithms.compute_advantages("optimal_token_baseline", **case, group_ids=[0, 0, 0, 1], singleton="raw")
    assert not zero[3].any() and torch.equal(raw[3], returns[3]) and torch.equal(raw[:3], zero[:3])


def test_sample_mask_leaves_samples_out_of_every_statistic() -> None:
    case = outcome([1.0, 0.0, 100.0, 0.5, 0.2])
    keep = torch.tensor([1, 1, 0, 1, 1])
    for name in ("grpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus"):
        ids = {"group_ids": [0, 0, 0, 1, 1]}
        advantages, _ = algorithms.compute_advantages(name, **case, **ids, sample_mask=keep)
        rows = keep.bool()
        chosen = {key: value[rows] for key, value in case.items()}
        expected, _ = algorithms.compute_advantages(name, **chosen, group_ids=[0, 0, 1, 1])
        assert torch.equal(advantages[rows], expected) and not advantages[2].any()


def test_whitening_scope_and_masked_positions() -> None:
    case = outcome([1.0, 0.0, 3.0], lengths=[4, 2, 3])
    mask = case["response_mask"]
    plain, returns = algorithms.compute_advantages("reinforce_plus_plus", **case, whitening="none")
    assert torch.equal(plain, returns)
    whitened, _ = algorithms.compute_advantages("reinforce_plus_plus", **case)
    tokens = whitened[mask == 1]
    assert tokens.mean().item() == pytest.approx(0.0, abs=1e-6) and tokens.std().item() == pytest.approx(1.0, abs=1e-5)
    assert not whitened[mask == 0].any()
    torch.testing.assert_close(whitened, algorithms.masked_whiten(plain, mask))
