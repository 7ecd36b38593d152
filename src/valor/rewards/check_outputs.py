"""What the graders make of sample outputs: agreement with labels, failures, and scores that teach nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from valor.rewards.check import Grading, Row, score, short
from valor.rewards.executor import RewardExecutor
from valor.rewards.worker import RewardResult

_FEWEST_OUTPUTS = 8  # of fewer, equal scores may be chance
_EXAMPLES = 3
_END = 60  # characters of an output that a message shows


class Output(NamedTuple):
    """A response to a row, and what its file says of it: whether it is right, which score it got."""

    row: Row
    response: str
    label: bool | None = None
    score: float | None = None


_Graded = Sequence[tuple[Output, RewardResult]]


def check_outputs(outputs: Sequence[Output], executor: RewardExecutor) -> Grading:
    """Grade responses. That many of one source all get one score, or that a grader fails on one, is a problem.

    UserError when a data source has no grader, unless the executor has a custom one.
    """
    report = Grading([("data source", "outputs", "correct", "mean score", "no answer found", "errors", "slowest")])
    results = score(executor, [output.row for output in outputs], [output.response for output in outputs])
    sources: dict[str, list[tuple[Output, RewardResult]]] = defaultdict(list)
    for output, result in zip(outputs, results, strict=True):
        sources[output.row.sample.data_source].append((output, result))
    for source, graded in sources.items():
        count, found = len(graded), [result for _, result in graded]
        mean, right = sum(r.score for r in found) / count, sum(r.correct for r in found) / count
        failed = [(o.row.place, f"{r.error}; the output ends {_end(o)}") for o, r in graded if r.error is not None]
        unread = sum(result.components.get("pred") == "" for result in found)
        slowest = f"{max(r.seconds for r in found) * 1000:.1f} ms"
        report.table.append((source, count, f"{right:.1%}", f"{mean:.3f}", unread, len(failed), slowest))
        if failed:
            report.problem(f"{source}: the grader fails on {len(failed)} of {count} outputs", failed)
        elif count >= _FEWEST_OUTPUTS and len({result.score for result in found}) == 1:
            title = f"{source}: all {count} outputs get the score {mean:g}: nothing can be learned from that"
            report.problem(title, [(o.row.place, f"{_truth(o)}; the output ends {_end(o)}") for o, _ in graded])
        report.notes += _disagreements(source, graded) + _without_contrast(source, graded)
    return report


def _disagreements(source: str, graded: _Graded) -> list[str]:
    """Where the file says another thing of an output than the grader does now."""
    notes = []
    labelled = [(output, result) for output, result in graded if output.label is not None]
    wrong = [(output, result) for output, result in labelled if output.label != result.correct]
    if labelled:
        agreement = f"{len(labelled) - len(wrong)} of {len(labelled)} ({1 - len(wrong) / len(labelled):.1%})"
        lines = [f"{source}: the grader agrees with {agreement} labels"]
        for output, result in wrong[:_EXAMPLES]:
            said = "right" if output.label else "wrong"
            lines.append(
                f"{output.row.place}: labelled {said}, graded {result.score:g}; {_truth(output)}, ends {_end(output)}"
            )
        notes.append("\n    ".join(lines))
    changed = sum(output.score is not None and abs(output.score - result.score) > 1e-6 for output, result in graded)
    if changed:
        notes.append(f"{source}: {changed} of {len(graded)} outputs had another score in their file")
    return notes


def _without_contrast(source: str, graded: _Graded) -> list[str]:
    """How many prompts have outputs of one kind only: group-relative algorithms learn nothing from them."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for output, result in graded:
        groups[output.row.place].append(result.correct)
    several = [found for found in groups.values() if len(found) > 1]
    if not several:
        return []
    return [
        f"{source}: of {len(several)} prompts with several outputs, {sum(map(all, several))} are always right and "
        f"{sum(not any(found) for found in several)} never"
    ]


def _truth(output: Output) -> str:
    return f"ground truth {short(output.row.sample.ground_truth)}"


def _end(output: Output) -> str:
    return repr(output.response.strip()[-_END:])
