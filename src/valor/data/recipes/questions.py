"""Questions with short answers, to be found by search, and multiple choice."""

from __future__ import annotations

from typing import Any

from valor.data.recipes.recipe import QUESTION, Example, Hub, Recipe, Record, text, value

LETTERS = "ABCDEFGHIJ"

_SEARCH = (
    "Answer the question. Think inside <think> and </think> first. If you lack some knowledge, you can search with "
    "<search> query </search>; results come back between <information> and </information>, and you can search as "
    "often as you like. Give the short answer inside <answer> and </answer>, for example <answer> Beijing </answer>."
    "\n\nQuestion: " + QUESTION
)
_CHOOSE = QUESTION + '\n\nThink step by step and end with "Answer: X", where X is the letter of the right choice.'


def open_question(record: Record) -> Example | None:
    """A question with the answers that count as right; without one the record is left out."""
    found: Any = value(record, "golden_answers", "answers", "answer", "reward_model.ground_truth.target")
    answers = [str(a) for a in ([found] if isinstance(found, str) else found) if str(a).strip()]
    question = text(record, "question")
    return Example(question, answers, {"question": question}) if answers else None


def multiple_choice(record: Record) -> Example:
    """MMLU: `answer` is the place of the right choice, or its letter."""
    right = value(record, "answer")
    return choice(text(record, "question"), value(record, "choices"), right, subject=record.get("subject"))


def hellaswag(record: Record) -> Example | None:
    """How does the text go on? The test set has no labels and is left out."""
    label = str(record.get("label", "")).strip()
    if not label:
        return None
    return choice(f"How does this go on?\n\n{text(record, 'ctx')} …", value(record, "endings"), int(label))


def choice(question: str, choices: list[str], right: int | str, **extra: Any) -> Example:
    """A question with lettered choices; the ground truth is the right one's letter."""
    place = LETTERS.find(right.strip().upper()) if isinstance(right, str) else int(right)
    if not 0 <= place < len(choices):
        raise ValueError(f"the answer {right!r} is none of its {len(choices)} choices")
    listed = "\n".join(f"{letter}. {one}" for letter, one in zip(LETTERS, choices, strict=False))
    known = {name: found for name, found in extra.items() if found is not None}
    return Example(f"{question}\n\n{listed}", LETTERS[place], {"question": question, "choices": list(choices), **known})


def _search(name: str, title: str, **hub: tuple[Hub, ...]) -> Recipe:
    return Recipe(
        name,
        title,
        open_question,
        data_source=f"searchR1_{name}",
        ability="fact-reasoning",
        columns=("question", "golden_answers", "answers", "answer", "reward_model"),
        hub=hub,
        template=_SEARCH,
    )


def _flashrag(name: str, split: str) -> Hub:
    return Hub("RUC-NLPIR/FlashRAG_datasets", name, split, f"searchR1_{name}")


RECIPES = (
    _search(
        "nq",
        "Natural Questions (open), 79,168 + 3,610, asked in the manner of Search-R1",
        train=(_flashrag("nq", "train"),),
        test=(_flashrag("nq", "test"),),
    ),
    _search(
        "hotpotqa",
        "HotpotQA, 90,447 + 7,405 (dev), asked in the manner of Search-R1",
        train=(_flashrag("hotpotqa", "train"),),
        test=(_flashrag("hotpotqa", "dev"),),
    ),
    _search(
        "nq_hotpotqa",
        "NQ and HotpotQA together, the training data of Search-R1",
        train=(_flashrag("nq", "train"), _flashrag("hotpotqa", "train")),
        test=(_flashrag("nq", "test"), _flashrag("hotpotqa", "dev")),
    ),
    Recipe(
        "mmlu",
        "MMLU: 99,842 auxiliary and 14,042 test questions with four choices, 57 subjects",
        multiple_choice,
        data_source="cais/mmlu",
        ability="knowledge",
        columns=("question", "choices", "answer", "subject"),
        hub={"train": (Hub("cais/mmlu", "all", "auxiliary_train"),), "test": (Hub("cais/mmlu", "all", "test"),)},
        template=_CHOOSE,
    ),
    Recipe(
        "hellaswag",
        "HellaSwag: 39,905 + 10,042 (validation) texts with four endings",
        hellaswag,
        data_source="Rowan/hellaswag",
        ability="commonsense",
        columns=("ctx", "endings", "label"),
        hub={
            "train": (Hub("Rowan/hellaswag", None, "train"),),
            "test": (Hub("Rowan/hellaswag", None, "validation"),),
        },
        template=_CHOOSE,
    ),
)
