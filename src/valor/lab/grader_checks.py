"""Do graders and ground truths fit together? A right answer must score, an empty one must not.

How a right answer is written follows from the ground truth (`right_answers`). A grader whose answers look otherwise
says so in an attribute: `grader.answer = function(ground_truth, extra_info)` returns the text, or None where a right
answer cannot be made of a ground truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from valor.data.files import DataRow
from valor.lab.row_checks import Report
from valor.rewards.executor import RewardExecutor
from valor.rewards.registry import BUILT_IN, Grader, grader_for
from valor.rewards.worker import RewardResult, Sample

WRONG = {"an empty response": "", '"I don\'t know."': "I don't know."}
_WAYS = ("The answer is \\boxed{%s}.", "#### %s", "Answer: %s", "<answer>%s</answer>", "%s")
_EXAMPLES, _NAMES = 3, 20  # rows of a problem that are shown, and that are named
_SLOW = 2.0  # s


class _Truth(NamedTuple):
    """A row, the ways to write a right answer, the results of those that were tried, and of each wrong answer."""

    row: DataRow
    ways: list[str]
    tried: list[RewardResult]
    wrong: list[RewardResult]

    @property
    def scores(self) -> bool:
        return bool(self.tried) and self.tried[-1].correct

    @property
    def seconds(self) -> float:
        return max(result.seconds for result in (*self.tried, *self.wrong))


def right_answers(row: DataRow, grader: Grader) -> list[str]:
    """Responses of which one should be graded as right, in the order to try; none where nothing can be said.

    What the grader's own `answer` says. Without it the ground truth (of several, each of the first three; of a
    dictionary, its `target`) in each of the usual ways.
    """
    own, truth = getattr(grader, "answer", None), row.ground_truth
    if own is not None:
        text = own(truth, row.extra_info)
        return [] if text is None else [str(text)]
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    several = truth if isinstance(truth, list | tuple) else [truth]
    texts = [str(one).strip() for one in several if one is not None and str(one).strip()][:3]
    return [way.replace("%s", text) for text in texts for way in _WAYS]


def check_truths(rows: Sequence[DataRow], executor: RewardExecutor, report: Report) -> None:
    """Grade right answers until one of them scores, and wrong ones, for every row.

    UserError when a data source has no grader, unless the executor has a custom one.
    """
    custom = executor.custom.load() if executor.custom else None
    table: list[Sequence[Any]] = [
        ("data source", "rows", "right answer scores", "not checked", "wrong answer scores", "slowest")
    ]
    for source in dict.fromkeys(row.data_source for row in rows):
        members, grader = [row for row in rows if row.data_source == source], custom or grader_for(source)
        wrong = [_graded(executor, ((row, text) for row in members)) for text in WRONG.values()]
        truths = [
            _Truth(row, right_answers(row, grader), [], list(results))
            for row, results in zip(members, zip(*wrong, strict=True), strict=True)
        ]
        _try_right_answers(truths, executor)
        slowest, unchecked = max(truths, key=lambda truth: truth.seconds), sum(not truth.tried for truth in truths)
        right = sum(truth.scores for truth in truths)
        fooled = sum(any(result.correct for result in truth.wrong) for truth in truths)
        table.append((source, len(members), right, unchecked, fooled, f"{slowest.seconds * 1000:.1f} ms"))
        if unchecked:
            report.notes.append(
                f"{source}: {unchecked} of {len(members)} rows do not say how a right answer is written, so whether it "
                "scores was not checked"
            )
        if slowest.seconds > _SLOW:
            place = slowest.row.place
            report.notes.append(f"{source}: one grading takes up to {slowest.seconds:.1f} s ({place})")
        _report_never(source, grader, truths, report)
        for i, name in enumerate(WRONG):
            always = [
                (truth.row, f"score {truth.wrong[i].score:g} for ground truth {_short(truth.row.ground_truth)}")
                for truth in truths
                if truth.wrong[i].correct
            ]
            title = f"{source}: {len(always)} of {len(members)} rows always score: {name} is graded as right"
            _problem(report, title, always)
    report.facts.append("ground truths graded against themselves:\n" + _aligned(table))


def _try_right_answers(truths: Sequence[_Truth], executor: RewardExecutor) -> None:
    """Fill in the results of their ways, up to the first that scores or runs into the time limit."""
    pending = [truth for truth in truths if truth.ways]
    while pending:
        results = _graded(executor, ((truth.row, truth.ways[len(truth.tried)]) for truth in pending))
        for truth, result in zip(pending, results, strict=True):
            truth.tried.append(result)
        pending = [
            truth
            for truth in pending
            if not truth.scores and truth.tried[-1].seconds < executor.timeout and len(truth.tried) < len(truth.ways)
        ]


def _report_never(source: str, grader: Grader, truths: Sequence[_Truth], report: Report) -> None:
    never = [truth for truth in truths if truth.tried and not truth.scores]
    known = grader in BUILT_IN.values() or hasattr(grader, "answer") or any(truth.scores for truth in truths)
    if never and not known and all(result.error is None for truth in never for result in truth.tried):
        report.notes.append(
            f"{source}: no ground truth scores in any of the usual ways, such as {never[0].ways[0]!r:.60}; to have it "
            "checked, say how a right answer is written: your_function.answer = lambda ground_truth, extra_info: ..."
        )
        return
    cases = []
    for truth in never:
        error = next((result.error for result in truth.tried if result.error), None)
        reason = error or f"graded wrong: {_short(truth.ways[len(truth.tried) - 1])}"
        cases.append((truth.row, f"ground truth {_short(truth.row.ground_truth)}: {reason}"))
    _problem(report, f"{source}: {len(never)} of {len(truths)} rows can never score", cases)


def _graded(executor: RewardExecutor, answers: Iterable[tuple[DataRow, str]]) -> list[RewardResult]:
    """Results of these responses to these rows."""
    return executor.score([Sample(r.data_source, text, r.ground_truth, r.extra_info) for r, text in answers])


def _problem(report: Report, title: str, cases: Sequence[tuple[DataRow, str]]) -> None:
    """Report a problem of some rows, each with the reason there; nothing if there is none."""
    if not cases:
        return
    lines = [title, *(f"{row.place}: {reason}" for row, reason in cases[:_EXAMPLES])]
    if len(cases) > _EXAMPLES:
        names = ", ".join(row.place for row, _ in cases[:_NAMES])
        lines.append(f"all of them: {names}{', …' if len(cases) > _NAMES else ''}")
    report.problems.append("\n    ".join(lines))


def _aligned(table: Sequence[Sequence[Any]]) -> str:
    names, *columns = [list(map(str, column)) for column in zip(*table, strict=True)]
    aligned = [[cell.ljust(max(map(len, names))) for cell in names]]
    aligned += [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(["", *row]) for row in zip(*aligned, strict=True))


def _short(value: Any) -> str:
    """A value for a message: in one line, its beginning if it is long."""
    return f"{value!r:.80}"
