"""DAPO's dynamic sampling: which prompts have samples that differ, and when to stop drawing further ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes
from valor.errors import TrainingStopped, UserError
from valor.rewards.executor import RewardResult

_SCORE_NAMES = (None, "score", "seq_reward", "seq_final_reward")  # verl's ways to say "the score"


def informative_rows(batch: Batch, results: Sequence[RewardResult], scores: Tensor, config: PPOConfig) -> Batch:
    """The rows of prompts whose episodes differ in `algorithm.filter_groups.metric`. `scores` [E]: of training."""
    metric, rows = _metric(results, scores, config), Episodes(batch).rows
    prompts = [batch.objects["uid"][one[0]] for one in rows]
    kept = algorithms.filter_groups(metric, prompts).nonzero().squeeze(1).tolist()
    return batch.take([row for number in kept for row in rows[number]])


def _metric(results: Sequence[RewardResult], scores: Tensor, config: PPOConfig) -> Tensor:
    name = config.algorithm.filter_groups.metric
    if name in _SCORE_NAMES:
        return scores
    values: list[float] = []
    for result in results:
        if name in result.components:
            values.append(float(result.components[name]))
        elif name == "acc":
            values.append(float(result.correct))
        elif result.error is not None:  # a grader that failed names no components
            values.append(config.reward.error_score)
        else:
            known = ", ".join(sorted(result.components)) or "none"
            raise UserError(
                f"algorithm.filter_groups.metric={name}: the grader reports no such component (it has {known}): "
                "take one of these, acc, or null for the score"
            )
    return torch.tensor(values)


def check_limit(step: int, rounds: int, found: int, config: PPOConfig) -> str:
    """Before a further round: how far the step is. TrainingStopped at `algorithm.filter_groups.max_num_gen_batches`."""
    wanted, limit = config.data.train_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    line = f"step {step}: {found} of {wanted} prompts have samples that differ after {rounds} generation batches"
    if limit and rounds >= limit:
        raise TrainingStopped(
            f"{line}: are the prompts too easy or too hard? Raise algorithm.filter_groups.max_num_gen_batches="
            f"{limit}, data.gen_batch_size or actor_rollout_ref.rollout.n, or give other data"
        )
    return line
