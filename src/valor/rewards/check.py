"""Do graders and ground truths fit together? A right answer must score, an empty one must not; labels should agree.

How a right answer is written follows from the ground truth (`right_answers`). A grader whose answers look otherwise
says so in an attribute: `grader.answer = function(ground_truth, extra_info)` returns the text, or None where a right
answer cannot be made of a ground truth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from valor.rewards.executor import RewardExecutor
from valor.rewards.registry import BUILT_IN, Grader, grader_for
from valor.rewards.worker import RewardResult, Sample

WRONG = {"an empty response": "", '"I don\'t know."': "I don't know."}
_WAYS = ("The answer is \\boxed{%s}.", "#### %s", "Answer: %s", "<answer>%s</answer>", "%s")
_EXAMPLES, _NAMES = 3, 20  # rows of a problem that are shown, and that are named
_FEWEST_OUTPUTS = 8  # of fewer, equal scores may be chance
_END = 60  # characters of an output that a message shows
_SLOW = 2.0  # s


class CheckedRow(NamedTuple):
    """A row to be graded (its sample's response is not looked at) and the words that say where it is."""

    place: str
    sample: Sample


class Output(NamedTuple):
    """A response to a row, and what its file says of it: whether it is right, which score it got."""

    row: CheckedRow
    response: str
    label: bool | None = None
    score: float | None = None

    def __str__(self) -> str:
        truth = short(self.row.sample.ground_truth)
        return f"ground truth {truth}; the output ends {self.response.strip()[-_END:]!r}"


@dataclass
class GradingReport:
    """What was found: a table by data source, problems that would spoil a run, and notes.

    `unfit` holds the places of rows that can never score or always do.
    """

    table: list[Sequence[Any]]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)

    def problem(self, title: str, cases: Sequence[tuple[str, str]]) -> None:
        """One that these rows have: each case is a row's place and the reason there."""
        lines = [title, *(f"{place}: {reason}" for place, reason in cases[:_EXAMPLES])]
        if len(cases) > _EXAMPLES:
            names = ", ".join(place for place, _ in cases[:_NAMES])
            lines.append(f"all of them: {names}{', …' if len(cases) > _NAMES else ''}")
        self.problems.append("\n    ".join(lines))

    def __str__(self) -> str:
        """The table, its columns aligned."""
        names, *columns = [list(map(str, column)) for column in zip(*self.table, strict=True)]
        aligned = [[cell.ljust(max(map(len, names))) for cell in names]]
        aligned += [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
        return "\n".join("  ".join(["", *row]) for row in zip(*aligned, strict=True))


def right_answers(sample: Sample, grader: Grader) -> list[str]:
    """Responses of which one should be graded as right, in the order to try; none where nothing can be said.

    What the grader's own `answer` says. Without it the ground truth (of several, each of the first three; of a
    dictionary, its `target`) in each of the usual ways.
    """
    own, truth = getattr(grader, "answer", None), sample.ground_truth
    if own is not None:
        text = own(truth, sample.extra_info or {})
        return [] if text is None else [str(text)]
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    several = truth if isinstance(truth, list | tuple) else [truth]
    texts = [str(one).strip() for one in several if one is not None and str(one).strip()][:3]
    return [way.replace("%s", text) for text in texts for way in _WAYS]


def check_truths(rows: Sequence[CheckedRow], executor: RewardExecutor) -> GradingReport:
    """Grade right answers until one of them scores, and wrong ones, for every row.

    UserError when a data source has no grader, unless the executor has a custom one.
    """
    custom = executor.custom.load() if executor.custom else None
    report = GradingReport(
        [("data source", "rows", "right answer scores", "not checked", "wrong answer scores", "slowest")]
    )
    sources: dict[str, list[CheckedRow]] = defaultdict(list)
    for row in rows:
        sources[row.sample.data_source].append(row)
    for source, members in sources.items():
        grader = custom or grader_for(source)
        ways = [right_answers(row.sample, grader) for row in members]
        tries = _tries(members, ways, executor)
        wrong = [score(executor, members, [text] * len(members)) for text in WRONG.values()]
        seconds = [max(r.seconds for r in (*a, *b)) for a, b in zip(tries, zip(*wrong, strict=True), strict=True)]
        right = sum(bool(tried) and tried[-1].correct for tried in tries)
        fooled = sum(any(result.correct for result in results) for results in zip(*wrong, strict=True))
        unchecked = sum(not tried for tried in tries)
        report.table.append((source, len(members), right, unchecked, fooled, f"{max(seconds) * 1000:.1f} ms"))
        if unchecked:
            report.notes.append(
                f"{source}: {unchecked} of {len(members)} rows do not say how a right answer is written, so whether it "
                "scores was not checked"
            )
        if max(seconds) > _SLOW:
            slowest = members[seconds.index(max(seconds))].place
            report.notes.append(f"{source}: one grading takes up to {max(seconds):.1f} s ({slowest})")
        _report_never(report, source, grader, members, ways, tries)
        for name, results in zip(WRONG, wrong, strict=True):
            cases = [
                (row.place, f"score {result.score:g} for ground truth {short(row.sample.ground_truth)}")
                for row, result in zip(members, results, strict=True)
                if result.correct
            ]
            if cases:
                title = f"{source}: {len(cases)} of {len(members)} rows always score: {name} is graded as right"
                report.problem(title, cases)
                report.unfit |= {place for place, _ in cases}
    return report


def _tries(
    rows: Sequence[CheckedRow], ways: Sequence[Sequence[str]], executor: RewardExecutor
) -> list[list[RewardResult]]:
    """For every row the results of its ways, up to the first that scores or runs into the time limit."""
    tries: list[list[RewardResult]] = [[] for _ in rows]
    pending = [i for i, some in enumerate(ways) if some]
    while pending:
        texts = [ways[i][len(tries[i])] for i in pending]
        for i, result in zip(pending, score(executor, [rows[i] for i in pending], texts), strict=True):
            tries[i].append(result)
        pending = [
            i
            for i in pending
            if not tries[i][-1].correct and tries[i][-1].seconds < executor.timeout and len(tries[i]) < len(ways[i])
        ]
    return tries


def _report_never(
    report: GradingReport,
    source: str,
    grader: Grader,
    rows: Sequence[CheckedRow],
    ways: Sequence[Sequence[str]],
    tries: Sequence[Sequence[RewardResult]],
) -> None:
    never = [i for i, tried in enumerate(tries) if tried and not tried[-1].correct]
    if not never:
        return
    known = grader in BUILT_IN.values() or hasattr(grader, "answer") or any(t and t[-1].correct for t in tries)
    if not known and all(result.error is None for i in never for result in tries[i]):
        report.notes.append(
            f"{source}: no ground truth scores in any of the usual ways, such as {ways[never[0]][0]!r:.60}; to have it "
            "checked, say how a right answer is written: your_function.answer = lambda ground_truth, extra_info: ..."
        )
        return
    cases = []
    for i in never:
        error = next((result.error for result in tries[i] if result.error), None)
        reason = error or f"graded wrong: {short(ways[i][len(tries[i]) - 1])}"
        cases.append((rows[i].place, f"ground truth {short(rows[i].sample.ground_truth)}: {reason}"))
    report.problem(f"{source}: {len(never)} of {len(rows)} rows can never score", cases)
    report.unfit |= {place for place, _ in cases}


def check_outputs(outputs: Sequence[Output], executor: RewardExecutor) -> GradingReport:
    """Grade responses. That many of one source all get one score, or that a grader fails on one, is a problem.

    UserError when a data source has no grader, unless the executor has a custom one.
    """
    report = GradingReport(
        [("data source", "outputs", "correct", "mean score", "no answer found", "errors", "slowest")]
    )
    results = score(executor, [output.row for output in outputs], [output.response for output in outputs])
    sources: dict[str, list[tuple[Output, RewardResult]]] = defaultdict(list)
    for output, result in zip(outputs, results, strict=True):
        sources[output.row.sample.data_source].append((output, result))
    for source, graded in sources.items():
        count, found = len(graded), [result for _, result in graded]
        mean, right = sum(r.score for r in found) / count, sum(r.correct for r in found) / count
        failed = [(o.row.place, f"{r.error}; {o}") for o, r in graded if r.error is not None]
        unread = sum(result.components.get("pred") == "" for result in found)
        slowest = f"{max(r.seconds for r in found) * 1000:.1f} ms"
        report.table.append((source, count, f"{right:.1%}", f"{mean:.3f}", unread, len(failed), slowest))
        if failed:
            report.problem(f"{source}: the grader fails on {len(failed)} of {count} outputs", failed)
        elif count >= _FEWEST_OUTPUTS and len({result.score for result in found}) == 1:
            title = f"{source}: all {count} outputs get the score {mean:g}: nothing can be learned from that"
            report.problem(title, [(o.row.place, str(o)) for o, _ in graded])
        report.notes += _disagreements(source, graded) + _without_contrast(source, graded)
    return report


def _disagreements(source: str, graded: Sequence[tuple[Output, RewardResult]]) -> list[str]:
    """Where the file says another thing of an output than the grader does now."""
    notes = []
    labelled = [(output, result) for output, result in graded if output.label is not None]
    wrong = [(output, result) for output, result in labelled if output.label != result.correct]
    if labelled:
        agreement = f"{len(labelled) - len(wrong)} of {len(labelled)} ({1 - len(wrong) / len(labelled):.1%})"
        lines = [f"{source}: the grader agrees with {agreement} labels"]
        for output, result in wrong[:_EXAMPLES]:
            said = "right" if output.label else "wrong"
            lines.append(f"{output.row.place}: labelled {said}, graded {result.score:g}; {output}")
        notes.append("\n    ".join(lines))
    changed = sum(output.score is not None and abs(output.score - result.score) > 1e-6 for output, result in graded)
    if changed:
        notes.append(f"{source}: {changed} of {len(graded)} outputs had another score in their file")
    return notes


def _without_contrast(source: str, graded: Sequence[tuple[Output, RewardResult]]) -> list[str]:
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


def score(executor: RewardExecutor, rows: Sequence[CheckedRow], responses: Sequence[str]) -> list[RewardResult]:
    """Results of these responses to these rows."""
    pairs = zip(rows, responses, strict=True)
    return executor.score([row.sample._replace(solution_str=response) for row, response in pairs])


def short(value: Any) -> str:
    """A value for a message: in one line, its beginning if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
