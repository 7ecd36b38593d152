"""What the disagreement of an ensemble of critics leaves out of the policy's update."""

import torch

from valor import algorithms
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.trainer.phases.base import Metrics, Phase, of_rows
from valor.workers.roles import critic_names


class CriticMasks(Phase):
    """No advantage where an ensemble of critics agrees most, no entropy bonus where it agrees least."""

    name = "critic_masks"
    adds = frozenset(("advantages", "entropy_mask"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.opinions = [f"values/{name}" for name in critic_names(config)]
        self.reads = frozenset(("response_mask", "response_lengths", "advantages", *self.opinions))
        self.reads_if_there = frozenset(("episode",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return bool(config.algorithm.agreement_mask or config.algorithm.divergence_mask)

    def timing(self, batch: Batch, step: int) -> str | None:
        return "adv"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        algorithm, episodes = self.config.algorithm, Episodes(batch)
        joined = episodes.joined()
        mask = joined["response_mask"]
        opinions = torch.stack([joined[name] for name in self.opinions])
        stays, explored = algorithms.where_critics_tell(
            opinions, mask, algorithm.agreement_mask, algorithm.divergence_mask
        )
        count = mask.sum().clamp(min=1.0)
        return of_rows(episodes, {"advantages": joined["advantages"] * stays, "entropy_mask": explored}), {
            "critic/agreement_masked": float((mask - stays).sum() / count),
            "critic/divergence_masked": float((mask - explored).sum() / count),
        }
