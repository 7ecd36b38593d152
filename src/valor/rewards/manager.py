"""Scores of a step: from samples to results, metrics and one line for the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from valor.rewards.code import CodeSettings
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor
from valor.rewards.registry import require_graders
from valor.rewards.remote import RemoteGraders
from valor.rewards.worker import RewardResult, Sample, gather

if TYPE_CHECKING:
    from valor.config import RewardConfig


class RewardManager:
    """The graders of a run, as `config.reward` asks for them. Raises UserError when a custom function is no good.

    `one_by_one`: a sample can be graded before the others are there.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.one_by_one = config.reward_manager.name != "batch"
        self._graders: RewardExecutor | RemoteGraders
        if config.reward_manager.name == "remote":
            self._graders = RemoteGraders(config.remote, timeout=config.timeout, error_score=config.error_score)
            return
        custom, server = config.custom_reward_function, config.sandbox_fusion
        function, code = None, CodeSettings()
        if custom.path:
            function = CustomFunction(custom.path, custom.name, custom.reward_kwargs, whole_batch=not self.one_by_one)
        if server.url is not None:
            code = CodeSettings(
                sandbox_fusion=server.url, max_concurrent=server.max_concurrent, memory_mb=server.memory_limit_mb
            )
        self._graders = RewardExecutor(
            num_workers=config.num_workers,
            timeout=config.timeout,
            error_score=config.error_score,
            custom=function,
            code=code,
            memory_mb=config.memory_limit_mb,
        )

    @property
    def grades_everything(self) -> bool:
        """Whether samples of any data source can be graded: by a function or a server of the user's own."""
        return isinstance(self._graders, RemoteGraders) or self._graders.custom is not None

    def check(self, data_sources: Iterable[str]) -> None:
        """Before a run: raise a UserError that names the data sources nobody can grade."""
        if isinstance(self._graders, RemoteGraders):
            self._graders.check()
        elif not self.grades_everything:
            require_graders(data_sources)

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        """Grade samples in the background. The futures never fail: errors are in their results."""
        return self._graders.submit_all(samples)

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Grade samples; results in their order."""
        return gather(self.submit_all(samples))

    def close(self) -> None:
        """End the grader processes."""
        self._graders.close()


def summarize(data_sources: Sequence[str], results: Sequence[RewardResult]) -> tuple[dict[str, float], str]:
    """Metrics and one line for the log: `reward openai/gsm8k: 113/512 correct, mean 0.221, 0 errors`.

    Per data source: `reward/<source>/mean`, `/correct` (fraction), and the mean of every numeric component.

    A component's mean is over the samples that have it. Over all samples: `reward/errors` (number),
    `reward/errors/<kind>` for each kind that occurred, and `reward/grading_seconds_max`.
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
        correct = sum(r.correct for r in group)
        mean = sum(r.score for r in group) / len(group)
        metrics |= {f"reward/{name}/{k}": v for k, v in _component_means(group).items()}
        metrics |= {f"reward/{name}/mean": mean, f"reward/{name}/correct": correct / len(group)}
        lines.append(f"reward {name}: {correct}/{len(group)} correct, mean {mean:.3f}, {_errors(group)}")
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
