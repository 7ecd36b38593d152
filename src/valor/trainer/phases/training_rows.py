"""Which episodes critic and actor learn from: those with a reward, or as many drawn by their scores (PF-PPO)."""

from valor import algorithms
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.data.sampler import keyed_generator
from valor.trainer.phases.base import Metrics, Phase

CHOSEN = "trained_episodes"  # in a batch's meta: numbers of episodes, repetition allowed; absent: all
_RESAMPLING_STREAM = 1  # last word of a random key


def trained(batch: Batch) -> Batch:
    """The rows that critic and actor learn from."""
    chosen = batch.meta.get(CHOSEN)
    return batch if chosen is None else Episodes(batch).take(chosen)


class TrainingRows(Phase):
    """Leaves out episodes without a reward (missing_reward=exclude); draws episodes by their scores (PF-PPO)."""

    name = "training_rows"
    timer = "adv"
    reads = frozenset(("token_level_scores", "response_mask", "response_lengths"))
    reads_if_there = frozenset(("episode", "reward_missing"))
    adds = frozenset((CHOSEN,))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        algorithm = config.algorithm
        return algorithm.use_pf_ppo or (algorithm.reward_mask_ratio > 0 and algorithm.missing_reward == "exclude")

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        episodes, metrics = Episodes(batch), Metrics()
        chosen = list(range(len(episodes.rows)))
        if self.config.algorithm.missing_reward == "exclude" and "reward_missing" in batch:
            missing = batch["reward_missing"].tolist()
            chosen = [number for number in chosen if not missing[episodes.rows[number][0]]]
        written = episodes.sums(batch["response_mask"]) > 0  # the others were rejected
        present = [number for number in chosen if written[number]]
        if self.config.algorithm.use_pf_ppo and present:
            chosen = present
            scores = episodes.sums(batch["token_level_scores"])[chosen]
            config = self.config.algorithm.pf_ppo
            drawn = algorithms.pf_ppo_resample(
                scores,
                reweight_method=config.reweight_method,
                weight_pow=config.weight_pow,
                generator=keyed_generator(self.config.trainer.seed, step, _RESAMPLING_STREAM),
            )
            metrics = {
                "training/pf_ppo/distinct_ratio": len(drawn.unique()) / len(drawn),
                "training/pf_ppo/score_after": float(scores[drawn].mean()),
            }
            chosen = [chosen[number] for number in drawn.tolist()]
        return Batch(meta={CHOSEN: chosen}), metrics
