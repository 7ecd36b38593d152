"""Values by rollouts that branch off the responses (VinePPO, https://arxiv.org/abs/2410.01679)."""

from collections.abc import Iterator

from valor.collector.branches import add_branch_values
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
            f"{share}={algorithm.branch_values.share} needs a critic: set critic.enable=true": (
                not config.critic.enable
            ),
            f"{share}: branches go off answers of one turn, and this run's loop ({loop}) may play several: set it to "
            "0": config.plays_episodes,
            f"trainer.v1.trainer_mode={v1.trainer_mode}: branches go on by the weights that answered: set "
            "trainer_mode=sync": v1.runs_ahead,
            f"algorithm.branch_values grade outcomes, which algorithm.{taken} is to do without: drop one of them": (
                masked or algorithm.reward_source == "critic"
            ),
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
        metrics = add_branch_values(self.resources.collector, batch, step)
        return batch.select(self.adds), metrics
