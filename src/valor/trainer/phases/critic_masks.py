"""Tokens left out of the policy's update by the disagreement of an ensemble of critics (AsyPPO, docs/algorithms)."""

from collections.abc import Iterator

import torch

from valor import algorithms
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.trainer.phases.base import Metrics, Phase, of_rows
from valor.workers.roles import critic_names


class CriticMasks(Phase):
    """No advantage where an ensemble of critics agrees most, no entropy bonus where it agrees least."""

    name = "critic_masks"
    timer = "adv"
    adds = frozenset(("advantages", "entropy_mask"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.values_by_member = [f"values/{name}" for name in critic_names(config)]
        self.reads = frozenset(("response_mask", "response_lengths", "advantages", *self.values_by_member))
        self.reads_if_there = frozenset(("episode",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        algorithm = config.algorithm
        return config.critic.ensemble_size > 1 and bool(algorithm.agreement_mask or algorithm.divergence_mask)

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        if config.algorithm.agreement_mask and config.algorithm.adv_whitening == "mini_batch":
            yield (
                "algorithm.agreement_mask leaves advantages out after whitening: set algorithm.adv_whitening to batch "
                "or none"
            )

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        algorithm, episodes = self.config.algorithm, Episodes(batch)
        joined = episodes.joined()
        mask = joined["response_mask"]
        values = torch.stack([joined[name] for name in self.values_by_member])
        stays, explored = algorithms.where_critics_tell(
            values, mask, algorithm.agreement_mask, algorithm.divergence_mask
        )
        count = mask.sum().clamp(min=1.0)
        return of_rows(episodes, {"advantages": joined["advantages"] * stays, "entropy_mask": explored}), {
            "critic/agreement_masked": float((mask - stays).sum() / count),
            "critic/divergence_masked": float((mask - explored).sum() / count),
        }
