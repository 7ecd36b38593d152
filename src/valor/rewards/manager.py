"""Scores of a step: from samples to results, metrics and one line for the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor, RewardResult, Sample
from valor.rewards.registry import require_graders

if TYPE_CHECKING:
    from valor.config import RewardConfig


@dataclass(frozen=True)
class ScoreSummary:
    """What a step's log says about its scores."""

    metrics: dict[str, float]
    lines: list[str]

    @property
    def line(self) -> str:
        """Everything in one line: `reward openai/gsm8k: 113/512 correct, mean 0.221, 0 errors`."""
        return "; ".join(self.lines)


class RewardManager:
    """The graders of a run, as `config.reward` asks for them. Raises UserError when a custom function is no good."""

    def __init__(self, config: RewardConfig) -> None:
        custom = config.custom_reward_function
        self.executor = RewardExecutor(
            num_workers=config.num_workers,
            timeout=config.timeout,
            error_score=config.error_score,
            custom=CustomFunction(custom.path, custom.name, dict(custom.reward_kwargs)) if custom.path else None,
        )

    def check(self, data_sources: Iterable[str]) -> None:
        """Before a run: raise a UserError that names the data sources nobody can grade."""
        if self.executor.custom is None:
            require_graders(data_sources)

    def submit(self, sample: Sample) -> Future[RewardResult]:
        """Grade one finished response while others are still being generated."""
        return self.executor.submit(sample)

    def gather(
        self, samples: Sequence[Sample], futures: Sequence[Future[RewardResult]]
    ) -> tuple[list[RewardResult], ScoreSummary]:
        """Results of submitted samples, in order, and their summary."""
        results = self.executor.gather(futures)
        return results, summarize([s.data_source for s in samples], results)

    def score(self, samples: Sequence[Sample]) -> tuple[list[RewardResult], ScoreSummary]:
        """Grade samples; results in order, and their summary."""
        results = self.executor.score(samples)
        return results, summarize([s.data_source for s in samples], results)

    def close(self) -> None:
        """End the grader processes."""
        self.executor.close()


def summarize(data_sources: Sequence[str], results: Sequence[RewardResult]) -> ScoreSummary:
    """Per data source: `reward/<source>/mean`, `/correct` (fraction), and the mean of every numeric component.

    A component's mean is over the samples that have it. Over all samples: `reward/errors` (number) and
    `reward/grading_seconds_max`.
    """
    groups: dict[str, list[RewardResult]] = defaultdict(list)
    for source, result in zip(data_sources, results, strict=True):
        groups[source].append(result)
    metrics: dict[str, float] = {"reward/errors": float(sum(r.error is not None for r in results))}
    if results:
        metrics["reward/grading_seconds_max"] = max(r.seconds for r in results)
    lines = []
    for source, group in sorted(groups.items()):
        name = source or "unnamed"
        correct = sum(r.correct for r in group)
        mean = sum(r.score for r in group) / len(group)
        metrics |= {f"reward/{name}/{k}": v for k, v in _component_means(group).items()}
        metrics |= {f"reward/{name}/mean": mean, f"reward/{name}/correct": correct / len(group)}
        lines.append(f"reward {name}: {correct}/{len(group)} correct, mean {mean:.3f}, {_errors(group)}")
    return ScoreSummary(metrics, lines)


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
