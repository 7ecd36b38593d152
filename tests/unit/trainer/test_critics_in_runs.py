"""Gate, mini-critics, branches and imitation between configuration and algorithms: columns, shares, what is refused."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.config import AlgorithmConfig, CriticConfig, PPOConfig, load
from valor.data.batch import Batch
from valor.errors import Diverged, UserError
from valor.trainer.advantage import compute_advantages
from valor.trainer.checks import check
from valor.trainer.phases.advantages import right_answers
from valor.trainer.plan import plan
from valor.trainer.run import SkippedUpdates
from valor.trainer.updates import Critics, Updates, counted

REWARDING_TEACHER = [
    "distillation={enabled: true, teacher_models: {t: {model_path: /x}}}",
    "distillation.distillation_loss={loss_mode: k1, use_policy_gradient: true, signal: reward}",
]
ENSEMBLE = ["critic.ensemble_size=2", "critic.model.value_head_init=normal"]


def four_rows(**columns: torch.Tensor) -> Batch:
    """Two prompts with two answers of two tokens each; the first of either is right."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    tensors = {
        "response_mask": torch.ones(4, 2),
        "token_level_rewards": rewards,
        "token_level_scores": rewards,
        "values": torch.full((4, 2), 0.5),
        **columns,
    }
    info = [{}, {}, {"acc": 0.0}, {"acc": 1.0}]
    return Batch(tensors, {"uid": list("aabb"), "finish_reason": ["stop"] * 4, "reward_info": info})


def test_branch_values_are_baseline_and_target_where_they_are() -> None:
    """One state of the first row: V = 0.75 from branches, where the critic has 0.5."""
    mask, values = torch.zeros(4, 2), torch.zeros(4, 2)
    mask[0, 1], values[0, 1] = 1.0, 0.75
    batch = four_rows(branch_mask=mask, branch_values=values)
    advantages, returns = compute_advantages(batch, AlgorithmConfig(adv_whitening="none", lam=0.0, lam_critic=1.0))
    assert advantages.tolist() == [[0.25, 0.25], [0.0, -0.5], [0.0, 0.5], [0.0, -0.5]]
    assert returns.tolist() == [[1.0, 0.75], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert (batch["values"] == 0.5).all()  # the clip of the value loss is around what the critic said


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_branch_values_agree_with_numpy(seed, share, lam, lam_critic) -> None:
    """GAE backwards over rows of one to five tokens; V is the branches' where there are any, the critic's elsewhere."""
    draw = np.random.default_rng(seed)
    mask = np.arange(5) < draw.integers(1, 6, (4, 1))
    branched = mask & (draw.random((4, 5)) < share)
    rewards, critic, mean = (draw.normal(size=(4, 5)) * mask for _ in range(3))
    value = np.where(branched, mean, critic)

    def backwards(decay: float) -> np.ndarray:
        found, after, later = np.zeros((4, 5)), np.zeros(4), np.zeros(4)
        for t in reversed(range(5)):
            later = np.where(mask[:, t], rewards[:, t] + after - value[:, t] + decay * later, 0)
            found[:, t], after = later, value[:, t]
        return found

    tensors = {"token_level_rewards": rewards, "values": critic, "branch_values": mean * branched}
    tensors |= {"branch_mask": branched.astype(float), "response_mask": mask.astype(float)}
    batch = four_rows(**{name: torch.tensor(column) for name, column in tensors.items()})
    config = AlgorithmConfig(adv_whitening="none", lam=lam, lam_critic=lam_critic)
    advantages, returns = compute_advantages(batch, config)
    np.testing.assert_allclose(advantages, backwards(lam), atol=1e-6)
    np.testing.assert_allclose(returns, np.where(branched, mean, (backwards(lam_critic) + value) * mask), atol=1e-6)


def test_the_gate_reports_to_the_metrics_also_where_rewards_are_missing() -> None:
    config = AlgorithmConfig(adv_estimator="evpo", reward_mask_ratio=0.5, missing_reward="exclude")
    metrics: dict[str, float] = {}
    missing = torch.tensor([False, False, True, True])
    compute_advantages(four_rows(reward_missing=missing), config, 0.0, metrics)
    assert metrics == {"critic/gate": 0.0, "critic/gate_explained_var": 0.0}


def test_right_answers_are_the_graders_and_nobodys_where_the_reward_is_missing() -> None:
    assert right_answers(four_rows()).tolist() == [1, 0, 0, 1]
    missing = torch.tensor([True, False, False, False])
    assert right_answers(four_rows(reward_missing=missing)).tolist() == [0, 0, 0, 1]


def test_imitation_divides_by_the_right_answers_tokens_of_the_mini_batch() -> None:
    assert counted(four_rows(positive=right_answers(four_rows()))).meta["num_positive_tokens"] == 4
    assert counted(four_rows(positive=torch.zeros(4))).meta["num_positive_tokens"] == 1


class Learner:
    """Remembers the samples of each update, whose gradients are finite unless it is `broken`."""

    group = SimpleNamespace(apart=False)

    def __init__(self, broken: bool = False) -> None:
        self.seen: list[list[int]] = []
        self.broken = broken

    def start(self, method: str, mini_batch: Batch) -> Callable[[], dict[str, float]]:
        assert method == "update"
        self.seen.append(mini_batch["prompts"][:, 0].tolist())
        return lambda: {"skipped": float(self.broken)}


def two_critics_learn(roles: dict[str, Learner], skips: SkippedUpdates, *settings: str) -> None:
    """A step's updates of both, from two prompts of two samples."""
    settings = ("actor_rollout_ref.rollout.n=2", "data.train_batch_size=2", *settings)
    config = load([*ENSEMBLE, *settings, "actor_rollout_ref.actor.ppo_mini_batch_size=1"], PPOConfig).config
    batch = four_rows(
        prompts=torch.arange(4)[:, None],
        prompt_lengths=torch.ones(4).long(),
        responses=torch.zeros(4, 2).long(),
        response_lengths=torch.full((4,), 2),
        returns=torch.zeros(4, 2),
        **{"values/critic": torch.zeros(4, 2), "values/critic_2": torch.zeros(4, 2)},
    )
    Critics(config, roles, Updates(config, roles, skips)).update(batch, step=1)  # type: ignore[arg-type]


def test_a_critic_that_never_learns_ends_the_run_though_another_one_learns() -> None:
    """One update a step: the first critic's are good, the second's are skipped, three steps in a row."""
    skips = SkippedUpdates(3, print)
    roles = {"critic": Learner(), "critic_2": Learner(broken=True)}
    for _ in range(2):
        two_critics_learn(roles, skips, "critic.ppo_mini_batch_size=2")
    with pytest.raises(Diverged, match=r"3 updates in a row had non-finite gradients \(critic_2\)"):
        two_critics_learn(roles, skips, "critic.ppo_mini_batch_size=2")


def test_steps_without_a_clip() -> None:
    critic = CriticConfig(cliprange_value=0.2, unclipped_steps=["1-50", "70"])
    assert [critic.cliprange_at(step) for step in (1, 50, 51, 70, 71)] == [None, None, 0.2, None, 0.2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.branch_values.share=0.5", "algorithm.adv_estimator=grpo"], "needs a critic: set critic.enable"),
        (
            ["algorithm.branch_values.share=0.5", "algorithm.reward_mask_ratio=0.5"],
            "reward_mask_ratio is to do without",
        ),
        (["algorithm.branch_values.share=0.5", "trainer.v1.trainer_mode=colocate_async"], "set trainer_mode=sync"),
        (["algorithm.branch_values.share=0.5", "do_search=true"], "branches go off answers of one turn"),
        (["algorithm.branch_values.share=0.5", "algorithm.use_kl_in_reward=true"], "actor.use_kl_loss=true instead"),
        (["algorithm.branch_values.share=0.5", *REWARDING_TEACHER], "no teacher rewards them: set it to 0"),
        (["critic.ensemble_size=2", "critic.freeze=true", "critic.model.path=/x"], "critics would all be the same"),
        (["algorithm.adv_estimator=evpo", "+algorithm.adv_kwargs.gate=hrad"], "unknown gate 'hrad'"),
        (["algorithm.adv_estimator=evpo", "+algorithm.adv_kwargs.report=1"], "comes from the run"),
        (["+algorithm.adv_kwargs.lam_positions=[1,2]"], "lam_positions must be between 0 and 1"),
    ],
)
def test_what_does_not_go_together_is_one_line(settings, words) -> None:
    argv = ["data.train_files=a.parquet", "actor_rollout_ref.rollout.n=2", *settings]
    with pytest.raises(UserError) as caught:
        load(argv, PPOConfig, check)
    [line] = str(caught.value).splitlines()
    assert words in line


@pytest.mark.parametrize("preset", ["evpo_config", "vapo_config"])
def test_presets_are_whole(preset) -> None:
    loaded = load([f"--config-name={preset}"], PPOConfig, check)
    assert loaded.config.critic.enable
    assert loaded.config.trainer.experiment_name == f"{preset.partition('_')[0]}_gsm8k"


def test_a_plan_says_what_branches_cost() -> None:
    """Two prompts of three samples, a tenth of 50 tokens each: 6 x 5 states x 4 branches of half a response."""
    given = [
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    text = plan(load([*given, "data.max_response_length=50", "algorithm.branch_values.share=0.1"], PPOConfig).config)
    assert "4 x 5 states of each response = 120 samples/step, about 3,000 tokens/step" in text
