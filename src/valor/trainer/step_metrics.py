"""Metrics of a step's batch, under verl's names, and what they show of the critic."""

from collections import Counter

from torch import Tensor

from valor.algorithms.groups import Groups, mean_of_others, scored_groups
from valor.algorithms.scan import returns_to_go
from valor.config import PPOConfig
from valor.data.balance import grouped
from valor.data.batch import Batch
from valor.tracking.metrics import (
    EXTREME,
    Histogram,
    Timer,
    explained_variance,
    explained_variance_by_group,
    histogram,
    reduce_metrics,
    summarize,
)

_SPREAD = ("values", "returns", "advantages")
_NUM_PARTS = 5
_NUM_TURNS = 8  # that have an explained variance of their own


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Scores, rewards, advantages, values, lengths and finish reasons of a whole batch, a row an episode.

    `reward/equal_groups`: the share of prompts with several samples, all of which have one score.
    """
    mask, finished = batch["response_mask"], batch.objects["finish_reason"]
    judged = batch.tensors.get("value_mask", mask)
    scores = batch["token_level_scores"].sum(-1)
    out = {
        **summarize("critic/score", scores),
        **summarize("critic/rewards", batch["token_level_rewards"].sum(-1)),
        **summarize("critic/advantages", batch["advantages"], mask),
        **summarize("critic/returns", batch["returns"], judged),
        **summarize("response_length", batch["response_lengths"]),
        "response_length/clip_ratio": finished.count("length") / max(len(finished), 1),
        **summarize("prompt_length", batch["prompt_lengths"]),
    }
    _, outcomes = scored_groups(batch["token_level_scores"], mask, batch.objects["uid"])
    groups = [group for group in grouped(outcomes.tolist(), batch.objects["uid"]) if len(group) > 1]
    if groups:
        out["reward/equal_groups"] = sum(len(set(group)) == 1 for group in groups) / len(groups)
    if "values" in batch:
        out |= summarize("critic/values", batch["values"], judged)
        compared = (batch["values"], batch["returns"], judged)
        out["critic/vf_explained_var"] = explained_variance(*compared)
        if groups:
            prompts = Groups(batch.objects["uid"], len(mask), mask.device).index.tolist()
            within, between = explained_variance_by_group(*compared, prompts)
            out |= {"critic/vf_explained_var_within": within, "critic/vf_explained_var_between": between}
    return out


def baseline_metrics(batch: Batch, gamma: float) -> dict[str, float]:
    """Variance of the return that follows a policy token minus its value, and minus the mean return of the prompt's
    other samples (of all others where it has none): does this critic help as a baseline, on this batch?

    Of Monte-Carlo returns, by the critic as it was before this batch: lambda below 1 makes the variance small with any
    values. Where values have a target.
    """
    batch = batch.take((batch["response_mask"] != 0).any(1).nonzero().flatten())  # what is rejected has no return
    mask = batch["response_mask"]
    returns = returns_to_go(batch["token_level_rewards"], mask, gamma).double()
    outcomes = returns.gather(1, mask.argmax(1, keepdim=True))[:, 0]
    others = mean_of_others(outcomes, batch.objects["uid"])
    where = batch.tensors.get("value_mask", mask) != 0
    if len(mask) < 2 or not where.any():
        return {}
    variances = [(returns - base)[where].var(correction=0) for base in (batch["values"].double(), others[:, None])]
    names = ("critic/baseline_variance/critic", "critic/baseline_variance/group_mean")
    return {name: float(x) for name, x in zip(names, variances, strict=True)}


def critic_diagnostics(batch: Batch, config: PPOConfig) -> dict[str, float | Histogram]:
    """`critic/<quantity>/histogram` over policy tokens; with a critic also `critic/vf_abs_error/fifth_k`, mean |V - R|
    in the k-th fifth of each response's policy tokens, `critic/vf_explained_var/turn_k` where there are several turns,
    and `reward/from_critic`, whether the reward is its value. Values are judged where they have a target."""
    mask = batch["response_mask"]
    judged = batch.tensors.get("value_mask", mask)
    out: dict[str, float | Histogram] = {}
    for name in _SPREAD:
        where = mask if name == "advantages" else judged
        if name in batch and (bins := histogram(batch[name], where)) is not None:
            out[f"critic/{name}/histogram"] = bins
    if "values" in batch:
        out["reward/from_critic"] = float(config.algorithm.reward_source == "critic")
        for k, errors in enumerate(_errors(batch["values"], batch["returns"], mask, judged)):
            if len(errors):
                out[f"critic/vf_abs_error/fifth_{k + 1}"] = float(errors.mean())
        several = "episode" in batch and "turn_ids" in batch and mask.any()  # a single answer has one turn
        turns = int((batch["turn_ids"] * (mask != 0)).max()) if several else 1
        for turn in range(1, min(turns, _NUM_TURNS) + 1) if turns > 1 else ():
            here = judged * (batch["turn_ids"] == turn)
            out[f"critic/vf_explained_var/turn_{turn}"] = explained_variance(batch["values"], batch["returns"], here)
    return out


def _errors(values: Tensor, returns: Tensor, mask: Tensor, judged: Tensor) -> list[Tensor]:
    """|V - R| at the judged positions of each fifth of the responses; arguments [B, T]."""
    fraction = (mask.cumsum(1) - 1) * _NUM_PARTS / mask.sum(1, keepdim=True).clamp(min=1.0)
    part, error = fraction.floor().masked_fill(judged == 0, -1), (values - returns).abs()
    return [error[part == k] for k in range(_NUM_PARTS)]


def throughput_metrics(batch: Batch, timer: Timer, world_size: int) -> dict[str, float]:
    """Seconds of each phase, milliseconds a token, and tokens per second and process over the whole step."""
    response = int(batch["response_lengths"].sum())
    total = response + int(batch["prompt_lengths"].sum())
    phases = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
    step = timer.seconds["step"]
    return {
        "perf/total_num_tokens": total,
        "perf/time_per_step": step,
        "perf/throughput": total / step / world_size,
        **timer.metrics({"gen": response, **dict.fromkeys(phases, total)}),
    }


def mean_over_updates(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: the mean over those that have it; of an extreme, the extreme."""
    steps = Counter(key for part in parts for key in part)
    return {k: v if EXTREME.search(k) else v / steps[k] for k, v in reduce_metrics(parts).items()}
