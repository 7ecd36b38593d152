"""Where the defaults differ from verl 0.9.1 on purpose: what, why, and the option that restores agreement.

Everything that is not listed here agrees to 1e-5. The documentation shows this table; tests hold both columns.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Deviation:
    """One deliberate difference."""

    name: str
    where: tuple[str, ...]
    ours: str
    verl: str
    reason: str
    restore: str


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "masked positions",
        ("gae", "remax", "masked_whiten"),
        "advantages and returns are 0 where response_mask is 0",
        "they hold whatever the recursion carried, whitened",
        "nothing downstream may read a number that belongs to no policy token",
        "zero_masked=False",
    ),
    Deviation(
        "groups of one",
        ("grpo", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline", "optimal_token_baseline"),
        "advantage 0 in that row, verl's in every other (gdpo leaves the row out of its whitening too)",
        "the raw score (rloo_vectorized: 0; grpo_passk: an error)",
        "without a second sample there is no baseline: the raw score pushes every sampled token up or down",
        'singleton="raw"',
    ),
    Deviation(
        "rewards on masked positions",
        ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"),
        "credited to the last policy token before (the first one if there is none)",
        "lost, while the estimators that sum a row keep them",
        "a reward given by a tool or an environment is a reward of the action before it",
        'reward_on_masked="drop"',
    ),
    Deviation(
        "optimal token baseline with gaps",
        ("optimal_token_baseline",),
        "a position that only one sample of the group reaches has baseline 0",
        "the same, but positions are counted from the number of policy tokens of the second longest response",
        "with observation tokens inside a response the two do not line up; without them both agree",
        "compact=True equals verl's tir_optimal_token_baseline",
    ),
    Deviation(
        "geo_mean denominators",
        ("geo_mean",),
        "sum over sequences with a policy token / global number of sequences",
        "mean over the local rows, whatever loss_agg_mode and the size of the mini-batch are",
        "the gradient must not depend on micro-batch size and world size",
        "num_sequences=<number of local rows>",
    ),
    Deviation(
        "empty masks",
        ("aggregate_loss", "masked_whiten", "gae", "ppo"),
        "0, with gradient 0",
        "NaN, or an error from the variance of fewer than two tokens",
        "a rank or micro-batch without policy tokens adds nothing",
        "none: there is no number to agree with",
    ),
    Deviation(
        "KL of rows without policy tokens",
        ("subtract_divergence",),
        "the controller sees the mean over sequences that have a policy token",
        "such rows count as KL 0",
        "padding rows must not lower the measured divergence",
        "none: equal whenever every row has a policy token",
    ),
    Deviation(
        "ppo_kl of kl_cov",
        ("kl_cov",),
        "ppo_kl is the mean of log(old/new), as in every loss; the mean of its absolute value is ppo_kl_abs",
        "ppo_kl is the mean of the absolute value",
        "one name, one meaning",
        "read ppo_kl_abs",
    ),
)
