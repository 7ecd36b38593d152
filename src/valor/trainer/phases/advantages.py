"""Advantages and returns by the estimator of `algorithm.adv_estimator`, on whole episodes."""

from valor.algorithms import ADVANTAGES
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.trainer.advantage import OFFERED_COLUMNS, compute_advantages, from_critic, right_answers
from valor.trainer.phases.base import Metrics, Phase, of_rows


class Advantages(Phase):
    """Advantages and returns of every sample; runs in the driver, so that groups and whitening see all samples."""

    name = "advantages"
    reads = frozenset(("response_mask", "response_lengths", "token_level_scores", "token_level_rewards", "uid"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        algorithm, entry = config.algorithm, ADVANTAGES[config.algorithm.adv_estimator]
        read = {"finish_reason", "reward_info", "episode", "reward_baselines", "progress", "reward_missing", "turn_ids"}
        read |= {"values", "quantiles", "branch_mask", "branch_values", "bootstrap_values"}
        read |= {column for column in OFFERED_COLUMNS if column in entry.options}
        self.reads_if_there = frozenset(read)
        added = ["advantages", "returns"]
        added += ["quantile_returns"] * config.learns_quantiles
        added += ["value_mask"] * (algorithm.gae_unit == "turn" and not from_critic(algorithm))
        added += ["positive"] * bool(config.actor_rollout_ref.actor.positive_nll_coef)
        self.adds = frozenset(added)

    def plan(self) -> str:
        return f"by {self.config.algorithm.adv_estimator}"

    def timing(self, batch: Batch, step: int) -> str | None:
        return "adv"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        metrics: Metrics = {}
        episodes = Episodes(batch)
        joined = episodes.joined()
        joined["advantages"], joined["returns"] = compute_advantages(
            joined, self.config.algorithm, self.config.reward.error_score, metrics
        )
        if self.config.actor_rollout_ref.actor.positive_nll_coef:
            joined["positive"] = right_answers(joined)
        return of_rows(episodes, {name: joined[name] for name in self.adds if name in joined}), metrics
