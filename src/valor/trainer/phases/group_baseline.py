"""Values as the mean outcome of the prompt's other samples and what a critic adds to it (`critic.target=residual`)."""

from collections.abc import Iterator

from valor.algorithms.groups import Groups
from valor.config import PPOConfig
from valor.data.balance import grouped
from valor.data.batch import Batch, Episodes
from valor.errors import StepRefused
from valor.trainer.phases.base import Metrics, Phase, where_true

BASELINE, RESIDUAL = "group_baseline", "residual_values"  # columns [B] and [B, T]


class GroupBaseline(Phase):
    """V = mean outcome of the prompt's other samples + the critic's output, which learns what that mean leaves."""

    name = "group_baseline"
    timer = "adv"
    reads = frozenset(("response_mask", "response_lengths", "token_level_rewards", "uid", "values"))
    reads_if_there = frozenset(("episode", "bootstrap_values"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        end = ["bootstrap_values"] * config.algorithm.truncation_bootstrap
        self.adds = frozenset((BASELINE, RESIDUAL, "values", *end))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.critic.enable and config.critic.target == "residual"

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        algorithm, critic, n = config.algorithm, config.critic, config.actor_rollout_ref.rollout.n
        value_loss = critic.value_loss if config.has_value_model else ""
        low = critic.value_loss_kwargs.get("value_min", 0.0)
        discounts = algorithm.gamma < 1 or (algorithm.gae_unit != "token" and algorithm.gamma_turn < 1)
        name = "critic.target=residual"
        yield from where_true(
            {
                f"{name} compares samples of one prompt: set actor_rollout_ref.rollout.n to at least 2, or "
                "critic.target=absolute": n < 2,
                f"{name} adds one number to all values of a response, which is right without discounts alone: set "
                "algorithm.gamma=1 (and gamma_turn=1), or critic.target=absolute": discounts,
                f"{name} has targets below 0, which critic.value_loss=bce has not: use mse or huber": (
                    value_loss == "bce"
                ),
                f"{name} has targets below 0: set critic.value_loss_kwargs.value_min to the least, such as -1": (
                    value_loss == "hl_gauss" and isinstance(low, int | float) and low >= 0
                ),
                f"{name} needs outcomes, which algorithm.reward_source=critic and algorithm.reward_mask_ratio take "
                "away: use critic.target=absolute": (
                    algorithm.reward_source == "critic" or algorithm.reward_mask_ratio > 0
                ),
            }
        )

    def refuse(self, batch: Batch) -> None:
        last = [rows[-1] for rows in Episodes(batch).rows]
        alone = sum(len(group) == 1 for group in grouped(last, [batch.objects["uid"][row] for row in last]))
        if alone:
            raise StepRefused(
                f"critic.target=residual compares samples of one prompt, and {alone} prompts of this step have one: "
                "use critic.target=absolute"
            )

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        episodes = Episodes(batch)
        outcomes = episodes.sums(batch["token_level_rewards"])
        uid = [batch.objects["uid"][rows[-1]] for rows in episodes.rows]
        baseline = episodes.spread(Groups(uid, len(outcomes), outcomes.device).mean_of_others(outcomes).float())
        values, mask = batch["values"], batch["response_mask"]
        columns = {BASELINE: baseline, RESIDUAL: values, "values": (values + baseline[:, None]) * (mask != 0)}
        if "bootstrap_values" in self.adds:
            columns["bootstrap_values"] = batch["bootstrap_values"] + baseline
        return Batch(columns), {}
