"""Which grader scores which `data_source`. A grader is any function with compute_score's four arguments."""

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from valor.arguments import command
from valor.errors import UserError, did_you_mean
from valor.rewards import choice, code, countdown, geometry, gsm8k, mathematics, qa, reasoning_gym, search_r1, walk

# Called by keyword: data_source, solution_str, ground_truth, extra_info. Returns a number, or a dict with "score".
Grader = Callable[..., Any]

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
    "kodcode*", "*/KodCode*", "leetcode*", "*/LeetCode*", "*/verifiable-coding-problems*",
    "*humaneval*", "*/*HumanEval*", "mbpp*", "*/mbpp*", "livecodebench*", "*/*livecodebench*",
    "*/*LiveCodeBench*",
)  # fmt: skip

_COMPONENTS = re.compile(r"Components?: (.*?)(?:\n\n|\Z)", re.DOTALL)  # in a grader's docstring

# Names and globs; a name goes before globs, and of two globs that match, the first one counts.
BUILT_IN: dict[str, Grader] = {
    "openai/gsm8k": gsm8k.grade_strict,
    "openai/gsm8k-flexible": gsm8k.grade_flexible,
    "valor/arithmetic": gsm8k.grade_flexible,
    "valor/walk": walk.grade,
    **dict.fromkeys(_MATHEMATICS, mathematics.grade),
    **dict.fromkeys(("*geometry3k*", "geo3k*"), geometry.grade),
    **dict.fromkeys(_CHOICE, choice.grade),
    "searchR1_*": search_r1.grade,
    **dict.fromkeys(_QUESTIONS, qa.grade),
    **dict.fromkeys(_COUNTDOWN, countdown.grade),
    **dict.fromkeys(_CODE, code.grade),
    reasoning_gym.PREFIX + "*": reasoning_gym.grade,
}


def require_graders(data_sources: Iterable[str]) -> None:
    """Raise a UserError that names every source without a grader; to be called before a run begins."""
    missing = [source for source in dict.fromkeys(data_sources) if find_grader(source) is None]
    if missing:
        names = ", ".join(f"'{m}'" for m in missing)
        hint = did_you_mean(missing[0], BUILT_IN) or "."
        raise UserError(
            f"no grader for data_source {names}{hint} `valor rewards list` shows those that have one: rename the "
            "data_source, or set reward.custom_reward_function.path to a Python file with your compute_score"
        )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    turns: Sequence[str] | None = None,
) -> float | dict[str, Any]:
    """Score of one response: a number, or a dict with `score` and named components.

    Of an episode the last of the policy's `turns` is graded. Raises UserError when the source has no grader, and
    whatever the grader raises.
    """
    require_graders([data_source])
    grader: Any = find_grader(data_source)
    text = turns[-1] if turns else solution_str
    return grader(data_source=data_source, solution_str=text, ground_truth=ground_truth, extra_info=extra_info)


def find_grader(data_source: str) -> Grader | None:
    """The grader of a data source, None when it has none."""
    if data_source in BUILT_IN:
        return BUILT_IN[data_source]
    return next((grader for pattern, grader in BUILT_IN.items() if fnmatch.fnmatchcase(data_source, pattern)), None)


def needs_truth(data_source: str) -> bool:
    """Whether samples of this source cannot be scored without a ground truth; of your own graders nobody knows."""
    grader = find_grader(data_source)
    return grader in BUILT_IN.values() and grader is not reasoning_gym.grade


def describe(grader: Grader) -> tuple[str, list[str]]:
    """First line of the grader's docstring, and the names that its `Components:` list has in backticks."""
    text = inspect.getdoc(grader) or "(not documented)"
    listed = _COMPONENTS.search(text)
    # Names in brackets are explanations.
    names = re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", listed[1])) if listed else []
    return text.partition("\n\n")[0].replace("\n", " "), names


def listing() -> str:
    """Every built-in grader: its data sources (names and patterns), what it scores, its components."""
    sources: dict[Grader, list[str]] = {}
    for pattern, grader in BUILT_IN.items():
        sources.setdefault(grader, []).append(pattern)
    blocks = []
    for grader, patterns in sources.items():
        summary, names = describe(grader)
        blocks.append(f"{', '.join(patterns)}\n    {summary}\n    components: {', '.join(names) or 'none'}")
    return "\n\n".join(blocks)


@command("rewards list", "valor rewards list", "rewards")
def main() -> int:
    """Say which grader scores which data_source (* stands for anything), what it scores, and its components."""
    print(listing())
    return 0
