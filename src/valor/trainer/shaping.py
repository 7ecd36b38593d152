"""From scores to rewards: the KL penalty, rewards that are taken away, the critic's value in the rule's place."""

from __future__ import annotations

from typing import Any

import torch

from valor import algorithms
from valor.config import AlgorithmConfig
from valor.data.batch import Batch
from valor.data.sampler import keyed_generator

_MASK_STREAM = 2  # last word of the random key


class RewardShaping:
    """`algorithm`'s settings at work on the batches of a run; its state is part of a checkpoint.

    `remainder` is what `reward_mask_type=fixed_ratio` owes to the next step.
    """

    def __init__(self, config: AlgorithmConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.remainder = 0.0
        self.kl_controller: algorithms.KLController | None = None
        if config.use_kl_in_reward:
            control = config.kl_ctrl
            self.kl_controller = algorithms.make_kl_controller(
                control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
            )

    def shape_rewards(self, batch: Batch, step: int) -> dict[str, float]:
        """Adds `token_level_rewards` [B, T], and `reward_missing` [B] where rewards are taken away. Returns metrics."""
        config, mask = self.config, batch["response_mask"]
        scores = batch["token_level_scores"]
        if config.reward_source == "critic":
            scores = algorithms.place_at_end(algorithms.value_at_end(batch["values"], mask), mask)
        batch["token_level_rewards"], metrics = self._minus_kl(scores, batch)
        if config.reward_mask_ratio > 0:
            missing = self._draw(batch, step)
            batch["reward_missing"] = missing
            batch["token_level_rewards"] = algorithms.apply_missing_reward(
                batch["token_level_rewards"], mask, missing, config.missing_reward, batch.tensors.get("values")
            )
            metrics["reward/missing_ratio"] = float(missing.float().mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The KL controller's state and the mask's remainder."""
        kl = self.kl_controller.state_dict() if self.kl_controller else None
        return {"kl_controller": kl, "reward_mask_remainder": self.remainder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave; a controller that is new to the run starts afresh."""
        if self.kl_controller and state["kl_controller"]:
            self.kl_controller.load_state_dict(state["kl_controller"])
        self.remainder = float(state["reward_mask_remainder"])

    def _minus_kl(self, scores: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Scores − β · KL(old ‖ ref) under `use_kl_in_reward`, else the scores."""
        if self.kl_controller is None:
            return scores, {}
        beta = self.kl_controller.value
        divergence = batch.tensors.get("full_kl")
        if divergence is None:
            divergence = algorithms.kl_penalty(batch["old_log_probs"], batch["ref_log_probs"], self.config.kl_penalty)
        rewards, current_kl = algorithms.subtract_divergence(scores, divergence, batch["response_mask"], kl_coef=beta)
        self.kl_controller.update(current_kl, n_steps=len(batch))
        return rewards, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}

    def _draw(self, batch: Batch, step: int) -> torch.Tensor:
        missing, self.remainder = algorithms.draw_reward_mask(
            len(batch),
            self.config.reward_mask_ratio,
            generator=keyed_generator(self.seed, step, _MASK_STREAM),
            kind=self.config.reward_mask_type,
            level=self.config.reward_mask_level,
            group_ids=batch.objects["uid"],
            remainder=self.remainder,
        )
        return missing
