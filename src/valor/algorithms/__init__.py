"""The mathematics of Valor: pure functions on tensors and floats. The names imported here are the public interface."""

# ruff: noqa: F401

from valor.algorithms import critic_gate, gae, group_relative, policy_gradient, reinforce, trust_regions, vtrace
from valor.algorithms.advantages import advantages_with_progress, compute_advantages, progress
from valor.algorithms.auto_lambda import advantage_errors, least_error_lambda
from valor.algorithms.distillation import divergence, sampled_divergence
from valor.algorithms.kl import KLController, full_kl_from_logits, kl_penalty, subtract_divergence
from valor.algorithms.mismatch import mismatch_sums, off_policy_metrics, ratio_metrics
from valor.algorithms.policy_gradient import positive_nll
from valor.algorithms.ppo import LossInputs, policy_loss
from valor.algorithms.reductions import (
    LOSS_AGG_MODES,
    aggregate_loss,
    keep_masked,
    last_token,
    log_ratio,
    loss_denominator,
    masked_count,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from valor.algorithms.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    VALUE_LOSSES,
    Capability,
    describe_algorithms,
    load_custom,
    register_advantage,
    register_policy_loss,
    register_value_loss,
)
from valor.algorithms.reward_shaping import (
    advantages_with_missing_rewards,
    apply_missing_reward,
    binarize,
    critic_advantages,
    draw_reward_mask,
    overlong_penalty,
    place_at_end,
    value_at_end,
)
from valor.algorithms.rollout_correction import rollout_correction
from valor.algorithms.selection import filter_groups
from valor.algorithms.value_losses import bradley_terry_loss, hl_gauss_value, value_loss
