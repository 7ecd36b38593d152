"""Which grader scores which `data_source`. A grader is any function with compute_score's four arguments."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from valor.errors import UserError
from valor.rewards import choice, code, countdown, format, gsm8k, mathematics, qa, reasoning_gym

# Called by keyword: data_source, solution_str, ground_truth, extra_info. Returns a number, or a dict with "score".
Grader = Callable[..., Any]
_G = TypeVar("_G", bound=Grader)

_MATHEMATICS = (
    "math", "math_*", "math500", "test-math-*", "lighteval/MATH*", "DigitalLearningGmbH/MATH-lighteval",
    "EleutherAI/hendrycks_math", "HuggingFaceH4/MATH-500", "math-ai/*", "dapo_math*", "BytedTsinghua-SIA/*", "*aime*",
    "*AIME*", "amc*", "*AMC*", "numina*", "AI-MO/*", "minerva*", "olympiad*", "Hothan/OlympiadBench", "bigmath*",
    "deepscaler*", "agentica-org/DeepScaleR*", "gsm8k*",
)  # fmt: skip
_CHOICE = ("mmlu*", "*/mmlu*", "*/MMLU*", "gpqa*", "*/gpqa*", "*hellaswag", "ai2_arc*", "*/ai2_arc", "*/openbookqa")
_QUESTIONS = (
    "nq", "nq_*", "*/nq_open", "triviaqa", "*/trivia_qa", "hotpotqa", "hotpot", "*/hotpot_qa", "2wiki*", "musique",
    "popqa", "bamboogle", "squad*",
)  # fmt: skip
_COUNTDOWN = ("countdown*", "*/Countdown*", "game24*", "game_of_24*")
_CODE = (
    "codecontests*", "*/code_contests*", "apps", "*/apps", "codeforces*", "*/codeforces*", "taco*", "*/TACO*",
    "humaneval*", "*/*humaneval*", "*/*HumanEval*", "mbpp*", "*/mbpp*", "livecodebench*", "*/*livecodebench*",
    "*/*LiveCodeBench*",
)  # fmt: skip

# Names and globs; a name goes before globs, and of two globs that match, the first one counts.
BUILT_IN: dict[str, Grader] = {
    "openai/gsm8k": gsm8k.grade_strict,
    "openai/gsm8k-flexible": gsm8k.grade_flexible,
    "valor/arithmetic": gsm8k.grade_flexible,
    **dict.fromkeys(_MATHEMATICS, mathematics.grade),
    "hiyouga/geometry3k": format.combine(
        mathematics.grade, {"think_and_box": format.has_think_and_box}, {"acc": 0.9, "think_and_box": 0.1}
    ),
    **dict.fromkeys(_CHOICE, choice.grade),
    "searchR1_*": qa.grade_exact,
    **dict.fromkeys(_QUESTIONS, qa.grade),
    **dict.fromkeys(_COUNTDOWN, countdown.grade),
    **dict.fromkeys(_CODE, code.grade),
    reasoning_gym.PREFIX + "*": reasoning_gym.grade,
}

_registered: dict[str, Grader] = {}


def register_reward(pattern: str) -> Callable[[_G], _G]:
    """Make the decorated function the grader of data sources that match `pattern` (a name, or a glob like "math_*").

    An exact name goes before patterns, a later registration before an earlier one, and all before the built-in
    graders. Grader processes import the function by its module, so it must stand at the top level of a module or
    script, and be registered before the first sample is scored.
    """

    def register(grader: _G) -> _G:
        _registered.pop(pattern, None)  # the new one goes to the end: later before earlier
        _registered[pattern] = grader
        return grader

    return register


def registered_graders() -> dict[str, Grader]:
    """What register_reward was given in this process, by pattern."""
    return dict(_registered)


def has_grader(data_source: str) -> bool:
    """Whether samples of this source can be scored without a custom function."""
    return find_grader(data_source) is not None


def grader_for(data_source: str) -> Grader:
    """The grader of a data source. Raises UserError that names the known ones."""
    grader = find_grader(data_source)
    if grader is None:
        raise UserError(_no_grader([data_source]))
    return grader


def require_graders(data_sources: Iterable[str]) -> None:
    """Raise a UserError that names every source without a grader; to be called before a run begins."""
    missing = [source for source in dict.fromkeys(data_sources) if find_grader(source) is None]
    if missing:
        raise UserError(_no_grader(missing))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """Score of one response: a number, or a dict with `score` and named components.

    Raises UserError when the source has no grader, and whatever the grader raises.
    """
    return grader_for(data_source)(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


def find_grader(data_source: str) -> Grader | None:
    """The grader of a data source, None when it has none."""
    for table, patterns in ((_registered, reversed(_registered)), (BUILT_IN, iter(BUILT_IN))):
        if data_source in table:
            return table[data_source]
        for pattern in patterns:
            if fnmatch.fnmatchcase(data_source, pattern):
                return table[pattern]
    return None


def needs_truth(data_source: str) -> bool:
    """Whether samples of this source cannot be scored without a ground truth; of your own graders nobody knows."""
    grader = find_grader(data_source)
    return grader in BUILT_IN.values() and grader is not reasoning_gym.grade


def _no_grader(missing: list[str]) -> str:
    near = difflib.get_close_matches(missing[0], {*BUILT_IN, *_registered}, n=1)
    names = ", ".join(f"'{m}'" for m in missing)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return (
        f"no grader for data_source {names}.{hint} `valor rewards list` shows those that have one: rename the "
        "data_source, or set reward.custom_reward_function.path to a Python file with your compute_score"
    )
