"""From scores to advantages: where the configuration's `algorithm` section meets the pure functions.

Runs on the driver over the whole batch, so group statistics and whitening see every sample whatever the number of
workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.config import AlgorithmConfig
from valor.data.batch import Batch


def place_scores(batch: Batch, scores: list[float]) -> Tensor:
    """Outcome scores [B] as token-level scores [B, T]: each on the last token of its response."""
    out = torch.zeros_like(batch["response_mask"])
    last = batch["response_lengths"] - 1
    rows = torch.nonzero(last >= 0).squeeze(1)
    out[rows, last[rows]] = torch.tensor(scores, dtype=out.dtype)[rows]
    return out


def shape_rewards(
    batch: Batch, config: AlgorithmConfig, kl_controller: algorithms.KLController | None
) -> tuple[Tensor, dict[str, float]]:
    """Token-level rewards [B, T] = scores − β · KL(old ‖ ref) when `use_kl_in_reward`, else the scores."""
    if kl_controller is None:
        return batch["token_level_scores"], {}
    beta = kl_controller.value
    rewards, current_kl = algorithms.apply_kl_penalty(
        batch["token_level_scores"],
        batch["old_log_probs"],
        batch["ref_log_probs"],
        batch["response_mask"],
        kl_coef=beta,
        kind=config.kl_penalty,
    )
    kl_controller.update(float(current_kl), n_steps=len(batch))
    return rewards, {"actor/reward_kl_penalty": float(current_kl), "actor/reward_kl_penalty_coeff": beta}


def estimate_advantages(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] by `algorithm.adv_estimator`."""
    tensors = batch.tensors
    cut_off = torch.tensor([r == "length" for r in batch.objects["finish_reason"]])
    offered: dict[str, Any] = {
        **config.model_dump(include={"lam_actor", "lam_critic", "adaptive_lam_alpha"}),
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "whitening": "batch" if config.adv_whitening == "batch" else "none",
    }
    if config.truncation_bootstrap:
        offered |= {"bootstrap_mask": cut_off}
    accepted = algorithms.advantage_options(config.adv_estimator)
    return algorithms.compute_advantages(
        config.adv_estimator,
        rewards=tensors["token_level_rewards"],
        response_mask=tensors["response_mask"],
        values=tensors.get("values"),
        group_ids=batch.objects["uid"],
        reward_baselines=tensors.get("reward_baselines"),
        gamma=config.gamma,
        lam=config.lam,
        **{k: v for k, v in offered.items() if k in accepted},
    )
