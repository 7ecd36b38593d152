"""Scores of a step: who grades, and what is logged of the results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor
from valor.rewards.worker import RewardResult

if TYPE_CHECKING:
    from valor.config import RewardConfig


def make_graders(config: RewardConfig) -> RewardExecutor:
    """The graders of a run, as `config.reward` asks for them. Raises UserError when a custom function is no good."""
    custom, function = config.custom_reward_function, None
    if custom.path:
        whole_batch = config.reward_manager.name == "batch"
        function = CustomFunction(custom.path, custom.name, custom.reward_kwargs, whole_batch=whole_batch)
    return RewardExecutor(
        num_workers=config.num_workers,
        timeout=config.timeout,
        error_score=config.error_score,
        custom=function,
        memory_mb=config.memory_limit_mb,
    )


def summarize(data_sources: Sequence[str], results: Sequence[RewardResult]) -> tuple[dict[str, float], str]:
    """Metrics and one line for the log: `reward openai/gsm8k: 113/512 correct, mean 0.221, 0 errors`; of a learned
    reward alone, which knows no right and wrong, only the mean.

    The metrics are those of docs/rewards.md.
    """
    groups: dict[str, list[RewardResult]] = defaultdict(list)
    for source, result in zip(data_sources, results, strict=True):
        groups[source].append(result)
    kinds = Counter(r.kind for r in results if r.error is not None)
    metrics = {"reward/errors": float(kinds.total())}
    metrics |= {f"reward/errors/{kind}": float(count) for kind, count in sorted(kinds.items())}
    if results:
        metrics["reward/grading_seconds_max"] = max(r.seconds for r in results)
    lines = []
    for source, group in sorted(groups.items()):
        name = source or "unnamed"
        mean = sum(r.score for r in group) / len(group)
        metrics |= {f"reward/{name}/{k}": v for k, v in _component_means(group).items()}
        metrics[f"reward/{name}/mean"] = mean
        correct = ""
        if all(r.has_verdict for r in group):
            count = sum(r.correct for r in group)
            metrics[f"reward/{name}/correct"] = count / len(group)
            correct = f"{count}/{len(group)} correct, "
        lines.append(f"reward {name}: {correct}mean {mean:.3f}, {_errors(group)}")
    return metrics, "; ".join(lines)


def _component_means(group: Sequence[RewardResult]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for result in group:
        for name, value in result.components.items():
            if isinstance(value, bool | int | float):
                values[name].append(float(value))
    return {name: sum(v) / len(v) for name, v in values.items()}


def _errors(group: Sequence[RewardResult]) -> str:
    reasons = Counter(r.error for r in group if r.error is not None)
    if not reasons:
        return "0 errors"
    total, (reason, count) = reasons.total(), reasons.most_common(1)[0]
    return f"{total} error{'s' if total > 1 else ''} ({count} x {reason})"
