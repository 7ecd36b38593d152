"""What a data set is: where its splits are, and how one of its records becomes a question or a pair of answers.

The functions at the end read the columns of a published data set each; ValueError: what is wrong with the record.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from valor.data.messages import Messages

Record = Mapping[str, Any]

LETTERS = "ABCDEFGHIJ"
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}

QUESTION = "{question}"  # where a template takes the question
EXPRESSION = QUESTION + " Think inside <think> </think> and give the expression inside <answer> </answer>."


class Hub(NamedTuple):
    """One split on the Hugging Face hub. `data_source` where it differs from the recipe's."""

    path: str
    config: str | None = None
    split: str = "train"
    data_source: str | None = None


class Example(NamedTuple):
    """A question (text, or messages that are taken as they are), its ground truth, and more for `extra_info`.

    `data_source` where the record names its own.
    """

    question: str | Messages
    ground_truth: Any
    extra: Mapping[str, Any] = {}
    data_source: str | None = None


class Pair(NamedTuple):
    """Two answers to one prompt (text or messages), the better one first."""

    prompt: str | Messages
    chosen: str
    rejected: str
    source: str


@dataclass(frozen=True)
class Recipe:
    """How a data set is prepared.

    `convert` makes an Example or a Pair of one record, or None to leave it out; a ValueError says what is wrong with
    the record. `data_source` chooses the grader. `template` is the user's message around the question. `hub`: the
    places of each split. `generate(seed, **options)` makes records without end or as long as there are any, instead
    of reading them from `hub`. `one_each`: the published data repeats its prompts, one of each is kept. `tool`: every
    row has verl's `extra_info.tools_kwargs` for the tool of this name.
    """

    name: str
    title: str
    convert: Callable[[Record], Example | Pair | None]
    data_source: str
    ability: str
    template: str = QUESTION
    hub: Mapping[str, Sequence[Hub]] = field(default_factory=dict)
    generate: Callable[..., Iterator[Record]] | None = None
    one_each: bool = False
    pairs: bool = False
    tool: str | None = None


def value(record: Record, *names: str) -> Any:
    """The first of these columns that is there. A dot goes into a dictionary. Raises ValueError when none is."""
    for name in names:
        found: Any = record
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    listed = " or ".join(f"'{name}'" for name in names)
    raise ValueError(f"has no {listed} (it has {', '.join(map(str, record))})")


def text(record: Record, *names: str) -> str:
    """`value` as text without white space around it. Raises ValueError when it is something else."""
    found = value(record, *names)
    if not isinstance(found, str):
        raise ValueError(f"'{names[0]}' must be text, got {found!r:.60}")
    return found.strip()


def number(found: Any) -> str:
    """A number as text, 27.0 as 27. Text stays."""
    return str(int(found)) if isinstance(found, float) and found.is_integer() else str(found).strip()


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


def numbers_game(record: Record) -> Example:
    """Numbers and a target (24 if none is given), as columns or as one text like `1 1 4 6`."""
    found: Any = value(record, "numbers", "nums", "Puzzles", "Puzzle")
    numbers = [int(n) for n in (found.split() if isinstance(found, str) else found)]
    target = int(record.get("target") or 24)
    question = (
        f"Using the numbers {', '.join(map(str, numbers))}, each exactly once, with + - * / and brackets, write an "
        f"expression that equals {target}."
    )
    extra = {"solution": record["solution"]} if record.get("solution") else {}
    return Example(question, {"target": target, "numbers": numbers}, extra)


def search_question(record: Record) -> Example | None:
    """A question, ended by a question mark as in Search-R1, with the answers that count as right under `target`.

    A record without an answer is left out. One that names its own data set (`data_source`) keeps the name.
    """
    found: Any = value(record, "golden_answers", "answers", "answer", "reward_model.ground_truth.target")
    answers = [str(a) for a in ([found] if isinstance(found, str) else found) if str(a).strip()]
    asked = text(record, "question")
    question = asked if asked.endswith("?") else f"{asked}?"
    named = record.get("data_source")
    source = f"searchR1_{str(named).removeprefix('searchR1_')}" if named else None
    return Example(question, {"target": answers}, {"question": question}, source) if answers else None


def mmlu(record: Record) -> Example:
    """`answer` is the place of the right choice, or its letter."""
    subject = {"subject": record["subject"]} if record.get("subject") is not None else {}
    return _choice(text(record, "question"), value(record, "choices"), value(record, "answer"), subject)


def hellaswag(record: Record) -> Example | None:
    """How does the text go on? The test set has no labels and is left out."""
    label = str(record.get("label", "")).strip()
    if not label:
        return None
    return _choice(f"How does this go on?\n\n{text(record, 'ctx')} …", value(record, "endings"), int(label), {})


def _choice(question: str, choices: list[str], right: int | str, extra: dict[str, Any]) -> Example:
    """A question with lettered choices; the ground truth is the right one's letter."""
    place = LETTERS.find(right.strip().upper()) if isinstance(right, str) else int(right)
    if not 0 <= place < len(choices):
        raise ValueError(f"the answer {right!r} is none of its {len(choices)} choices")
    listed = "\n".join(f"{letter}. {one}" for letter, one in zip(LETTERS, choices, strict=False))
    return Example(f"{question}\n\n{listed}", LETTERS[place], {"question": question, "choices": list(choices), **extra})


def humaneval(record: Record) -> Example:
    """The beginning of a function; the tests call it by its name."""
    start = str(value(record, "prompt"))
    truth = {"prompt": start, "test": text(record, "test"), "entry_point": text(record, "entry_point")}
    extra = {"task_id": text(record, "task_id")}
    if record.get("canonical_solution"):
        extra["solution"] = start + str(record["canonical_solution"])
    return Example(f"```python\n{start.strip()}\n```", json.dumps(truth), extra)


def mbpp(record: Record) -> Example:
    """A task in words, and the assertions that the code has to pass; they name the function, so they are shown."""
    tests = list(value(record, "test_list"))
    setup = "\n".join([*(record.get("test_imports") or ()), str(record.get("test_setup_code") or "")]).strip()
    extra = {"task_id": str(value(record, "task_id"))} | ({"solution": record["code"]} if record.get("code") else {})
    question = f"{text(record, 'text', 'prompt')}\n\nThe code has to pass these tests:\n\n" + "\n".join(tests)
    return Example(question, json.dumps({"test_list": tests, "test_setup_code": setup}), extra)


def hh_rlhf(record: Record) -> Pair | None:
    """A conversation and two last turns of the assistant; left out where the two are the same."""
    prompt, chosen, rejected = (text(record, name) for name in ("prompt", "chosen", "rejected"))
    if chosen == rejected:
        return None
    return Pair(conversation(f"\n\n{prompt}"), chosen, rejected, str(record.get("source") or "hh_rlhf"))


def conversation(transcript: str) -> list[dict[str, str]]:
    """`\\n\\nHuman: … \\n\\nAssistant: …` as messages, up to the turn that the assistant is to write."""
    first, *pieces = _TURN.split(transcript)
    if first.strip() or not pieces:
        raise ValueError(f"the conversation must begin with 'Human:', got {transcript!r:.60}")
    turns = [
        {"role": _ROLES[name], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns.pop()
    return turns


def ultrafeedback(record: Record) -> Pair | None:
    """Two whole conversations; left out where the judge gave both the same score or they end in the same words."""
    chosen, rejected = value(record, "chosen"), value(record, "rejected")
    if "score_chosen" in record and record["score_chosen"] == record.get("score_rejected"):
        return None
    best, worst = _last(chosen), _last(rejected)
    prompt: Any = chosen[:-1] or text(record, "prompt")
    return None if best == worst else Pair(prompt, best, worst, "ultrafeedback")


def _last(messages: Any) -> str:
    if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
        raise ValueError("'chosen' and 'rejected' must be lists of messages that end with the assistant's")
    return str(messages[-1]["content"]).strip()
