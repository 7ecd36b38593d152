"""The policy losses by name: `policy_loss` and its registry."""

from typing import Any

import torch
from torch import Tensor

from valor.algorithms.policy_gradient import cispo, dro, gpg, reinforce, sapo
from valor.algorithms.ppo import LossInputs, Metrics, ppo
from valor.algorithms.reductions import Denominator, keep_masked
from valor.algorithms.registry import Entry, Registry
from valor.algorithms.trust_regions import clip_cov, dppo_kl, dppo_tv, geo_mean, gspo, kl_cov
from valor.errors import UserError

POLICY_LOSSES = Registry(
    "policy loss",
    ("inputs", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    {
        "ppo": ppo,
        "vanilla": ppo,
        "reinforce": reinforce,
        "gpg": gpg,
        "gspo": gspo,
        "geo_mean": geo_mean,
        "cispo": cispo,
        "sapo": sapo,
        "dro": dro,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
    },
)


def policy_loss(
    name: str = "ppo",
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    num_tokens: Denominator = None,
    num_sequences: Denominator = None,
    rollout_is_weights: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """The loss `name` (a scalar with gradient to log_probs) and its metrics (detached scalars); inputs [B, T].

    old_log_probs: None when the batch gets a single update: the ratio is exactly 1.
    num_tokens, num_sequences: counts of the whole mini-batch when this is a part of it: losses, gradients and metrics
        of the parts then add up to those of the whole.
    rollout_is_weights [B, T]: importance weights of the rollout correction, multiplied onto each token's loss.
    clip_ratio_*: reach those losses that clip; further options are the loss's own, an unknown one is a UserError.
    A loss that fixes its aggregation (`Capability.aggregation`) uses that in place of the default token-mean.
    """
    entry = POLICY_LOSSES[name]
    if log_probs.shape != response_mask.shape or advantages.shape != response_mask.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)}, advantages {tuple(advantages.shape)} and response_mask "
            f"{tuple(response_mask.shape)} must have one shape"
        )
    inputs = LossInputs(
        log_probs=keep_masked(log_probs, response_mask),
        old_log_probs=keep_masked(log_probs.detach() if old_log_probs is None else old_log_probs, response_mask),
        advantages=keep_masked(advantages, response_mask),
        response_mask=response_mask,
        rollout_is_weights=None if rollout_is_weights is None else keep_masked(rollout_is_weights, response_mask),
        loss_agg_mode=_aggregation(entry, loss_agg_mode),
        loss_scale_factor=loss_scale_factor,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
    )
    common = {
        "inputs": inputs,
        "clip_ratio_low": clip_ratio_low,
        "clip_ratio_high": clip_ratio_high,
        "clip_ratio_c": clip_ratio_c,
    }
    loss, metrics = entry.call(common, options)
    return loss, {key: torch.as_tensor(value).detach() for key, value in metrics.items()}


def _aggregation(entry: Entry, requested: str) -> str:
    fixed = entry.capability.aggregation
    if fixed is None or requested == fixed:
        return requested
    if requested != "token-mean":
        raise UserError(f"{entry.name} always aggregates as {fixed}; remove loss_agg_mode={requested}")
    return fixed


register_policy_loss = POLICY_LOSSES.register
"""Decorator: adds a policy loss under `name`; keywords are `Capability` fields.

The function takes `inputs` (a `LossInputs`) and, by keyword, those of clip_ratio_low, clip_ratio_high,
clip_ratio_c that it names, and options of its own; it returns (loss, metrics): `inputs.aggregate(per_token)` and
`inputs.fraction(per_token)` put them over the global denominators.
"""
