"""Questions with short answers, to be found by search, and multiple choice."""

from __future__ import annotations

from typing import Any

from valor.data.recipes.recipe import QUESTION, Example, Hub, Recipe, Record, published, text, value

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


def _search(name: str, title: str, train: tuple[str, ...], test: tuple[str, ...]) -> Recipe:
    """Questions of FlashRAG; `train` and `test` say which splits of which of its data sets: `nq/train`."""
    places = {"train": [one.split("/") for one in train], "test": [one.split("/") for one in test]}
    hub = {
        split: tuple(Hub("RUC-NLPIR/FlashRAG_datasets", config, its, f"searchR1_{config}") for config, its in found)
        for split, found in places.items()
    }
    columns = ("question", "golden_answers", "answers", "answer", "reward_model")
    return Recipe(name, title, open_question, f"searchR1_{name}", "fact-reasoning", columns, hub, template=_SEARCH)


RECIPES = (
    _search(
        "nq", "Natural Questions (open), 79,168 + 3,610, asked in the manner of Search-R1", ("nq/train",), ("nq/test",)
    ),
    _search(
        "hotpotqa",
        "HotpotQA, 90,447 + 7,405 (dev), asked in the manner of Search-R1",
        ("hotpotqa/train",),
        ("hotpotqa/dev",),
    ),
    _search(
        "nq_hotpotqa",
        "NQ and HotpotQA together, the training data of Search-R1",
        ("nq/train", "hotpotqa/train"),
        ("nq/test", "hotpotqa/dev"),
    ),
    published(
        "mmlu",
        "MMLU: 99,842 auxiliary and 14,042 test questions with four choices, 57 subjects",
        multiple_choice,
        "cais/mmlu",
        "all",
        train="auxiliary_train",
        ability="knowledge",
        columns=("question", "choices", "answer", "subject"),
        template=_CHOOSE,
    ),
    published(
        "hellaswag",
        "HellaSwag: 39,905 + 10,042 (validation) texts with four endings",
        hellaswag,
        "Rowan/hellaswag",
        test="validation",
        ability="commonsense",
        columns=("ctx", "endings", "label"),
        template=_CHOOSE,
    ),
)
