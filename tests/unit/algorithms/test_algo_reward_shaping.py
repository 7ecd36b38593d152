"""Binarized, masked and missing rewards, the critic as reward, overlong penalty; numbers by hand."""

import pytest
import torch

from valor import algorithms
from valor.algorithms.reward_shaping import REWARD_MASK_TYPES
from valor.errors import UserError

MASK = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 0]])
VALUES = torch.tensor([[0.2, 0.4, 0.6], [0.1, 9.0, 0.5], [0.3, 0.7, 9.0]])
REWARDS = torch.tensor([[0.0, 0, 1], [0, 0, 0.5], [-0.1, 1, 0]])
MISSING = torch.tensor([True, False, True])
PLAIN = {"gamma": 1.0, "lam": 1.0, "whitening": "none"}


def with_missing(policy: str, **more: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return algorithms.advantages_with_missing_rewards(
        "gae",
        rewards=REWARDS,
        response_mask=MASK,
        values=VALUES,
        missing=MISSING,
        missing_reward=policy,
        **{**PLAIN, **more},
    )


def test_binarize_asks_for_more_than_the_threshold() -> None:
    assert algorithms.binarize(torch.tensor([1.0, 0.88, -1.0]), 0.88).tolist() == [1.0, 0.0, 0.0]
    assert algorithms.binarize(torch.tensor([0.0, -0.5, -1.0]), -0.5).tolist() == [1.0, 0.0, 0.0]


def test_positions_at_the_end() -> None:
    assert algorithms.last_token(MASK).tolist() == [2, 2, 1]
    torch.testing.assert_close(algorithms.value_at_end(VALUES, MASK), torch.tensor([0.6, 0.5, 0.7]))
    placed = algorithms.place_at_end(torch.tensor([1.0, 2.0, 3.0]), MASK * torch.tensor([[1.0], [0.0], [1.0]]))
    assert placed.tolist() == [[0, 0, 1], [0, 0, 0], [0, 3, 0]]


def test_overlong_penalty() -> None:
    """100 tokens allowed, the last 20 of them punished: from 0 at 80 to −1 at 100."""
    penalty = algorithms.overlong_penalty(
        torch.tensor([10, 80, 90, 100, 110]), max_response_length=100, buffer_length=20
    )
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.5, -1.0, -1.5]))
    half = algorithms.overlong_penalty(
        torch.tensor([100]), max_response_length=100, buffer_length=20, penalty_factor=0.5
    )
    assert half.item() == -0.5
    with pytest.raises(UserError, match="buffer_length=200"):
        algorithms.overlong_penalty(torch.tensor([1]), max_response_length=100, buffer_length=200)


def test_missing_reward_zero_punishes_what_the_critic_liked() -> None:
    """λ = 1: A = return − V; the two rows without reward get −V, the higher V the lower; with a flip +V."""
    advantages, returns, loss_mask = with_missing("zero")
    expected = torch.tensor([[-0.2, -0.4, -0.6], [0.4, 0.0, 0.0], [-0.3, -0.7, 0.0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0, 0], [0.5, 0, 0.5], [0, 0, 0]]))
    assert torch.equal(loss_mask, MASK)
    flipped, _, _ = with_missing("zero", flip=True)
    torch.testing.assert_close(flipped, expected * torch.tensor([[-1.0], [1.0], [-1.0]]))


def test_missing_reward_bootstrap_puts_the_last_value_in_its_place() -> None:
    advantages, returns, _ = with_missing("bootstrap")
    torch.testing.assert_close(advantages, torch.tensor([[0.4, 0.2, 0.0], [0.4, 0.0, 0.0], [0.4, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.6, 0.6, 0.6], [0.5, 0.0, 0.5], [0.7, 0.7, 0.0]]))
    decayed, _, _ = with_missing("bootstrap", lam=0.5)
    torch.testing.assert_close(decayed[0], torch.tensor([0.3, 0.2, 0.0]))  # 0.2 + 0.5 · (0.2 + 0.5 · 0)


def test_a_cut_off_row_without_reward_has_one_value_at_its_end() -> None:
    """Rows 0 and 1 were cut off. Row 0 has lost its reward: V(last) = 0.6 stands for all that it would have earned, and
    the value after the end, 5, is not added to it. Row 1 has its reward of 0.5, and goes on with its end's 2."""
    cut_off, ends = torch.tensor([True, True, False]), torch.tensor([5.0, 2.0, 7.0])
    advantages, returns, _ = with_missing("bootstrap", bootstrap_mask=cut_off, bootstrap_values=ends)
    torch.testing.assert_close(returns, torch.tensor([[0.6, 0.6, 0.6], [2.5, 0.0, 2.5], [0.7, 0.7, 0.0]]))
    torch.testing.assert_close(advantages[0], torch.tensor([0.4, 0.2, 0.0]))
    _, zero, _ = with_missing("zero", bootstrap_mask=cut_off, bootstrap_values=ends)
    torch.testing.assert_close(zero[0], torch.tensor([5.0, 5.0, 5.0]))


def test_missing_reward_critic_does_not_decay() -> None:
    advantages, returns, _ = with_missing("critic", lam=0.5)
    torch.testing.assert_close(advantages[0], torch.tensor([0.4, 0.2, 0.0]))
    torch.testing.assert_close(returns[0], torch.tensor([0.6, 0.6, 0.6]))
    torch.testing.assert_close(advantages[1], torch.tensor([0.4, 0.0, 0.0]))  # 0.4 + 0.5 · 0


def test_missing_reward_exclude_leaves_the_rows_out_of_loss_and_whitening() -> None:
    advantages, returns, loss_mask = with_missing("exclude", whitening="batch")
    assert loss_mask.tolist() == [[0, 0, 0], [1, 0, 1], [0, 0, 0]]
    root = 0.5**0.5  # two tokens, 0.4 and 0: mean 0.2, standard deviation 0.4/√2
    torch.testing.assert_close(advantages[1], torch.tensor([root, 0.0, -root]))
    assert not advantages[[0, 2]].any() and not returns[[0, 2]].any()
    grouped, _, _ = algorithms.advantages_with_missing_rewards(
        "rloo", rewards=REWARDS, response_mask=MASK, missing=torch.tensor([True, False, False]),
        missing_reward="exclude", group_ids=[0, 0, 0],
    )  # fmt: skip
    torch.testing.assert_close(grouped[:, 0], torch.tensor([0.0, -0.4, 0.4]))  # of 0.5 and 0.9 alone


def test_a_group_of_one_that_exclude_leaves_is_what_the_estimator_makes_of_it() -> None:
    """Prompt 0 has one sample left: 0, and its score of 1 is one of the whitening's."""
    rewards, mask, missing = torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]]), torch.ones(5, 1), torch.zeros(5).bool()
    missing[1] = True
    shared = {"rewards": rewards, "response_mask": mask, "group_ids": [0, 0, 1, 1, 1]}
    advantages, _, _ = algorithms.advantages_with_missing_rewards(
        "reinforce_plus_plus_baseline", **shared, missing=missing, missing_reward="exclude"
    )
    others = torch.tensor([1.0, 2 / 3, -1 / 3, -1 / 3])
    expected = torch.tensor([0.0, 0.0, *((others - others.mean()) / others.std())[1:]])
    torch.testing.assert_close(advantages[:, 0], expected)


def test_an_option_of_as_many_numbers_as_there_are_samples_is_not_cut() -> None:
    """λ of 1, 0 and 1 along the response, and three samples, one of which is left out: A = 0.2 + A', 0.2, 0.4."""
    advantages, _, _ = algorithms.advantages_with_missing_rewards(
        "gae", rewards=REWARDS, response_mask=MASK, values=VALUES, missing=torch.tensor([False, True, False]),
        missing_reward="exclude", whitening="none", lam_positions=[1.0, 0.0, 1.0],
    )  # fmt: skip
    torch.testing.assert_close(advantages[0], torch.tensor([0.4, 0.2, 0.4]))


def test_whitening_comes_after_the_policy_and_before_the_flip() -> None:
    advantages, _, _ = with_missing("zero", whitening="batch")
    plain, _, _ = with_missing("zero")
    torch.testing.assert_close(advantages, algorithms.masked_whiten(plain, MASK))
    flipped, _, _ = with_missing("zero", whitening="batch", flip=True)
    torch.testing.assert_close(flipped, torch.where(MISSING[:, None], -advantages, advantages))


def test_critic_as_the_only_reward() -> None:
    advantages, returns = algorithms.critic_advantages(VALUES, MASK, whitening="none")
    torch.testing.assert_close(advantages, torch.tensor([[0.4, 0.2, 0.0], [0.4, 0.0, 0.0], [0.4, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.6, 0.6, 0.6], [0.5, 0.0, 0.5], [0.7, 0.7, 0.0]]))
    torch.testing.assert_close(returns, (advantages + VALUES) * MASK)
    whitened, same = algorithms.critic_advantages(VALUES, MASK)
    torch.testing.assert_close(whitened, algorithms.masked_whiten(advantages, MASK))
    assert torch.equal(same, returns)


def test_the_mask_empties_the_whole_row_kl_included() -> None:
    rewards = algorithms.apply_missing_reward(REWARDS, MASK, MISSING, "zero")
    assert torch.equal(rewards, torch.tensor([[0.0, 0, 0], [0, 0, 0.5], [0, 0, 0]]))
    filled = algorithms.apply_missing_reward(REWARDS, MASK, MISSING, "bootstrap", VALUES)
    torch.testing.assert_close(filled, torch.tensor([[0.0, 0, 0.6], [0, 0, 0.5], [0, 0.7, 0]]))


@pytest.mark.parametrize(("ratio", "size"), [(0.1, 4), (0.3, 7), (0.5, 3), (1.0, 5), (0.0, 5), (1 / 3, 3)])
def test_fixed_ratio_is_exact_over_steps(ratio: float, size: int) -> None:
    generator, remainder, total = torch.Generator().manual_seed(0), 0.0, 0
    for step in range(1, 61):
        missing, remainder = algorithms.draw_reward_mask(size, ratio, generator=generator, remainder=remainder)
        total += int(missing.sum())
        assert abs(total - ratio * size * step) < 1.0
    assert total == round(ratio * size * 60)


def test_draws_follow_the_generator() -> None:
    def draw(seed: int, kind: str) -> list[bool]:
        generator = torch.Generator().manual_seed(seed)
        return algorithms.draw_reward_mask(64, 0.5, generator=generator, kind=kind)[0].tolist()

    for kind in REWARD_MASK_TYPES:
        assert draw(0, kind) == draw(0, kind) != draw(1, kind)
    assert sum(draw(0, "fixed_ratio")) == 32


def test_bernoulli_has_the_ratio_as_its_mean() -> None:
    missing, remainder = algorithms.draw_reward_mask(
        20_000, 0.3, generator=torch.Generator().manual_seed(0), kind="bernoulli", remainder=0.25
    )
    assert missing.float().mean().item() == pytest.approx(0.3, abs=0.015) and remainder == 0.25


@pytest.mark.parametrize("kind", ["fixed_ratio", "bernoulli"])
def test_groups_lose_their_reward_together(kind: str) -> None:
    ids = ["a", "b", "c", "d"] * 4
    missing, _ = algorithms.draw_reward_mask(
        16, 0.5, generator=torch.Generator().manual_seed(1), kind=kind, level="group", group_ids=ids
    )
    by_group = {key: {flag for flag, one in zip(missing.tolist(), ids, strict=True) if one == key} for key in ids}
    assert all(len(flags) == 1 for flags in by_group.values())
    if kind == "fixed_ratio":
        assert missing.sum().item() == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: algorithms.draw_reward_mask(4, 1.2, generator=torch.Generator()), "between 0 and 1, got 1.2"),
        (lambda: algorithms.draw_reward_mask(4, 0.5, generator=torch.Generator(), kind="fixed"), "did you mean"),
        (
            lambda: algorithms.draw_reward_mask(4, 0.5, generator=torch.Generator(), level="groups"),
            "did you mean group",
        ),
        (lambda: algorithms.apply_missing_reward(REWARDS, MASK, MISSING, "bootstrap"), "needs the critic's values"),
        (lambda: with_missing("ignore"), "unknown missing_reward 'ignore'"),
    ],
)
def test_mistakes_are_named(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
