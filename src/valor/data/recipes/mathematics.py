"""Mathematics: the answer is a number or a formula."""

from __future__ import annotations

from valor.data.recipes.recipe import BOXED, QUESTION, Example, Hub, Recipe, Record, number, published, text, value


def gsm8k(record: Record) -> Example:
    """The number after `####` in the reference answer, without commas."""
    solution, mark, answer = text(record, "answer").rpartition("####")
    if not mark:
        raise ValueError("'answer' has no '####' before its final number; is this GSM8K?")
    question = text(record, "question")
    return Example(question, answer.strip().replace(",", ""), {"question": question, "answer": solution.strip()})


def competition(record: Record) -> Example:
    """A problem with its answer, or with a solution whose last box holds it."""
    if record.get("answer", record.get("Answer")) is None:
        truth = last_boxed(text(record, "solution"))
    else:
        truth = number(value(record, "answer", "Answer"))
    extra = {name: str(record[name]) for name in ("level", "type", "subject", "year") if record.get(name) is not None}
    return Example(text(record, "problem", "question", "Problem"), truth, extra)


def last_boxed(solution: str) -> str:
    """What the last \\boxed{…} or \\fbox{…} holds. Raises ValueError when there is none."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        raise ValueError("'solution' has no \\boxed answer")
    rest = solution[start:].partition("box" if solution[start + 1] == "f" else "boxed")[2]
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()  # \boxed 5
    depth = 0
    for i, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:i].strip()
    raise ValueError("'solution' ends inside its last \\boxed")


def dapo(record: Record) -> Example:
    """The problem as DAPO asks it: the instruction to end in `Answer: …` is a part of the prompt."""
    return Example(value(record, "prompt"), number(value(record, "reward_model.ground_truth", "solution")))


_COMPETITION = {
    "convert": competition,
    "ability": "math",
    "columns": ("problem", "question", "Problem", "answer", "Answer", "solution", "level", "type", "subject", "year"),
    "template": BOXED,
}
_AIME24 = Hub("HuggingFaceH4/aime_2024", None, "train", "aime24")
_AIME25 = Hub("math-ai/aime25", None, "test", "aime25")
_AIME = "problems of the AIME; the answer is an integer from 0 to 999"

RECIPES = (
    published(
        "gsm8k",
        "7,473 + 1,319 grade-school word problems",
        gsm8k,
        "openai/gsm8k",
        "main",
        ability="math",
        columns=("question", "answer"),
        template=QUESTION + ' Think step by step, then write the final answer as a number after "####".',
    ),
    published(
        "math",
        "MATH, 7,500 + 5,000 competition problems (its test set holds MATH-500)",
        path="DigitalLearningGmbH/MATH-lighteval",
        **_COMPETITION,
    ),
    published(
        "math500",
        "MATH-500, 500 problems of MATH's test set",
        path="HuggingFaceH4/MATH-500",
        train="",
        **_COMPETITION,
    ),
    Recipe("aime24", f"30 (2024) {_AIME}", data_source="aime24", hub={"test": (_AIME24,)}, **_COMPETITION),
    Recipe("aime25", f"30 (2025) {_AIME}", data_source="aime25", hub={"test": (_AIME25,)}, **_COMPETITION),
    Recipe("aime", f"60 (2024 and 2025) {_AIME}", data_source="aime", hub={"test": (_AIME24, _AIME25)}, **_COMPETITION),
    published("amc", "40 problems of the AMC 12 of 2023", path="math-ai/amc23", train="", **_COMPETITION),
    published(
        "dapo_math",
        "DAPO-Math-17k: about 17,000 problems with integer answers, published with about 100 copies of each",
        dapo,
        "BytedTsinghua-SIA/DAPO-Math-17k",
        test="",
        data_source="math_dapo",
        ability="math",
        columns=("prompt", "reward_model", "solution"),
        one_each=True,
    ),
)
