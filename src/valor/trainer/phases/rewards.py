"""From scores to rewards: noise, the critic as reward, the KL penalty, rewards that are taken away."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.data.sampler import keyed_generator
from valor.trainer.advantage import from_critic
from valor.trainer.phases.base import Metrics, Phase, of_rows, where_true

_MASK_STREAM, _NOISE_STREAM = 2, 5  # last words of random keys


class Rewards(Phase):
    """Scores with noise, KL penalty and missing rewards.

    State: the weight of the KL penalty, and the fraction of a masked reward that `reward_mask_type=fixed_ratio` carries
    over to the next step.
    """

    name = "rewards"
    timer = "adv"
    reads = frozenset(("response_mask", "response_lengths", "token_level_scores", "uid"))
    reads_if_there = frozenset(("episode",))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        algorithm = self.algorithm = config.algorithm
        self.seed = config.trainer.seed
        self.remainder = 0.0
        self.kl_controller: algorithms.KLController | None = None
        if algorithm.use_kl_in_reward:
            control = algorithm.kl_ctrl
            target = control.target_kl if control.type == "adaptive" else None
            self.kl_controller = algorithms.KLController(control.kl_coef, target, control.horizon)
            more = ("full_kl",) if algorithm.exact_kl_in_reward else ("old_log_probs", "ref_log_probs")
            self.reads = self.reads | {*more}
        if algorithm.reward_source == "critic" or algorithm.reads_end_value:
            self.reads = self.reads | {"values"}
        missing = ("reward_missing",) if algorithm.reward_mask_ratio > 0 else ()
        self.adds = frozenset(("token_level_rewards", *missing))

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        algorithm = config.algorithm
        by_critic, masked = algorithm.reward_source == "critic", algorithm.reward_mask_ratio > 0
        wrong = {
            "algorithm.reward_source=critic needs a critic: set critic.enable=true": (
                by_critic and not config.critic.enable
            ),
            f"algorithm.missing_reward={algorithm.missing_reward} needs a critic: set critic.enable=true": (
                algorithm.reads_end_value and not config.critic.enable
            ),
            "algorithm.reward_source=critic replaces every reward and algorithm.reward_mask_ratio takes some away: for "
            "a part of them use reward_source=rule_based with missing_reward=critic": by_critic and masked,
            "algorithm.reward_source=critic leaves no reward to subtract algorithm.use_kl_in_reward from: use "
            "actor_rollout_ref.actor.use_kl_loss=true": algorithm.use_kl_in_reward and from_critic(algorithm),
            "algorithm.kl_penalty=full needs a pass of the actor over each batch, which "
            "algorithm.rollout_correction.bypass_mode leaves out: set bypass_mode=false, or an estimator such as kl": (
                algorithm.exact_kl_in_reward and algorithm.rollout_correction.bypass_mode
            ),
        }
        yield from where_true(wrong)

    def plan(self) -> str:
        algorithm = self.algorithm
        by_critic = algorithm.reward_source == "critic"
        parts = ["the critic's value in place of scores" if by_critic else "scores"]
        if algorithm.reward_binarize and not by_critic:
            parts.append(f"1 above {algorithm.reward_threshold:g}, else 0")
        if algorithm.reward_noise and not by_critic:
            parts.append(f"noise of {algorithm.reward_noise:g}")
        if algorithm.use_kl_in_reward:
            parts.append(f"KL penalty ({algorithm.kl_penalty})")
        if algorithm.reward_mask_ratio:
            parts.append(f"{algorithm.reward_mask_ratio:.0%} missing: {algorithm.missing_reward}")
        return ", ".join(parts)

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        episodes = Episodes(batch)
        joined = episodes.joined()
        metrics = self.shape_rewards(joined, step)
        return of_rows(episodes, {name: joined[name] for name in self.adds}), metrics

    def shape_rewards(self, batch: Batch, step: int) -> dict[str, float]:
        """Adds `token_level_rewards` [B, T], and `reward_missing` [B] where rewards are taken away. Returns metrics."""
        config, mask = self.algorithm, batch["response_mask"]
        scores = batch["token_level_scores"]
        if config.reward_noise > 0:
            draw = keyed_generator(self.seed, step, _NOISE_STREAM)
            noise = config.reward_noise * torch.randn(len(batch), generator=draw)
            scores = scores + algorithms.place_at_end(noise, mask)
        if config.reward_source == "critic":
            scores = algorithms.place_at_end(algorithms.value_at_end(batch["values"], mask), mask)
        batch["token_level_rewards"], metrics = self._minus_kl(scores, batch)
        if config.reward_mask_ratio > 0:
            batch["reward_missing"], self.remainder = algorithms.draw_reward_mask(
                len(batch),
                config.reward_mask_ratio,
                generator=keyed_generator(self.seed, step, _MASK_STREAM),
                kind=config.reward_mask_type,
                level=config.reward_mask_level,
                group_ids=batch.objects["uid"],
                remainder=self.remainder,
            )
            missing = batch["reward_missing"]
            batch["token_level_rewards"] = algorithms.apply_missing_reward(
                batch["token_level_rewards"], mask, missing, config.missing_reward, batch.tensors.get("values")
            )
            metrics["reward/missing_ratio"] = float(missing.float().mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        kl = {"value": self.kl_controller.value} if self.kl_controller else None
        return {"kl_controller": kl, "reward_mask_remainder": self.remainder}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A KL controller that the earlier run did not have starts afresh."""
        if self.kl_controller and state["kl_controller"]:
            self.kl_controller.value = float(state["kl_controller"]["value"])
        self.remainder = float(state["reward_mask_remainder"])

    def _minus_kl(self, scores: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Scores − β · KL(old ‖ ref) under `use_kl_in_reward`, else the scores."""
        if self.kl_controller is None:
            return scores, {}
        beta = self.kl_controller.value
        divergence = batch.tensors.get("full_kl")
        if divergence is None:
            kind = self.algorithm.kl_penalty
            divergence = algorithms.kl_penalty(batch["old_log_probs"], batch["ref_log_probs"], kind)
        rewards, current_kl = algorithms.subtract_divergence(scores, divergence, batch["response_mask"], kl_coef=beta)
        self.kl_controller.update(current_kl, n_steps=len(batch))
        return rewards, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
