"""Values by rollouts that branch off the responses (VinePPO, https://arxiv.org/abs/2410.01679)."""

from collections.abc import Iterator

import torch

from valor.collector.branches import BRANCH_STREAM, branch_returns
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.trainer.phases.base import COLLECTED, EVERY_COLUMN, Metrics, Phase, where_true


class Branches(Phase):
    """Rollouts from states of each response; their mean return is the state's value."""

    name = "gen_branches"
    role = "rollout"
    reads = EVERY_COLUMN | COLLECTED
    adds = frozenset(("branch_mask", "branch_values"))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.algorithm.branch_values.share > 0

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        algorithm, v1, share = config.algorithm, config.trainer.v1, "algorithm.branch_values.share"
        masked, loop = algorithm.reward_mask_ratio > 0, config.default_agent_loop
        taken = "reward_mask_ratio" if masked else "reward_source=critic"
        wrong = {
            f"{share}={algorithm.branch_values.share} needs a critic: set critic.enable=true": not config.critic.enable,
            f"{share}: branches go off answers of one turn, and this run's loop ({loop}) may play several: set it to "
            "0": config.plays_episodes,
            f"trainer.v1.trainer_mode={v1.trainer_mode}: branches go on by the weights that answered: set "
            "trainer_mode=sync": v1.runs_ahead,
            f"algorithm.branch_values grade outcomes, which algorithm.{taken} is to do without: drop one of them": (
                masked or algorithm.reward_source == "critic"
            ),
            "algorithm.use_kl_in_reward is no part of what branches earn: set "
            "actor_rollout_ref.actor.use_kl_loss=true instead": algorithm.use_kl_in_reward,
            f"{share}: branches are graded, and no teacher rewards them: set it to 0, or "
            "distillation.distillation_loss.signal=advantage": config.distillation.as_reward,
        }
        yield from where_true(wrong)

    def plan(self) -> str:
        data, branching = self.config.data, self.config.algorithm.branch_values
        states = max(round(branching.share * data.max_response_length), 1)
        drawn = data.train_batch_size * self.config.actor_rollout_ref.rollout.n * states * branching.branches
        return (
            f"at most {branching.branches} x {states:,} states of each response = {drawn:,} samples/step, about "
            f"{drawn * data.max_response_length // 2:,} tokens/step"
        )

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Metrics: what the branches cost."""
        collector, algorithm = self.resources.collector, self.config.algorithm
        settings, points = algorithm.branch_values, list[tuple[int, int]]()
        for row, length in enumerate(batch["response_lengths"].tolist()):
            count = max(round(settings.share * length), 1) if length else 0
            points += [(row, token) for token in torch.linspace(0, length - 1, count).round().long().tolist()]
        stream = BRANCH_STREAM - step
        returns, tokens = branch_returns(collector, batch, points, settings.branches, algorithm.gamma, stream)
        collector.roles["rollout"].sleep()
        rows, columns = torch.tensor(points).T
        mask, values = torch.zeros(2, *batch["response_mask"].shape)
        mask[rows, columns] = 1.0
        values[rows, columns] = returns.mean(1)
        return Batch({"branch_mask": mask, "branch_values": values}), {
            "branches/states": len(points),
            "branches/samples": returns.numel(),
            "branches/tokens": tokens,
            "branches/tokens_ratio": tokens / max(float(batch["response_mask"].sum()), 1.0),
        }
