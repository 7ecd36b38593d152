"""The data sets of `valor data prepare`: where each lies, and how a record becomes a question or a pair of answers.

They are on the Hugging Face hub, or reasoning-gym makes them here. A converter raises ValueError on a record of another
layout, and returns None for one without a usable answer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from valor.data.messages import Messages, transcript_turns
from valor.errors import UserError, did_you_mean
from valor.user_files import installed

Record = Mapping[str, Any]

PREFIX = "reasoning_gym/"
QUESTION = "{question}"  # where a template takes the question
_LETTERS = "ABCDEFGHIJ"
_SIZE = 2**31 - 1  # a task makes any number of puzzles, each from (seed, index), when it is read


class Hub(NamedTuple):
    """One split on the Hugging Face hub. `data_source` is set on its records, where a recipe joins several places."""

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

    `convert` makes an Example or a Pair of one record. `data_source` chooses the grader. `template` is the user's
    message around the question. `hub`: the places of each split. `generate(seed, **options)` makes records instead of
    reading them from `hub`. `one_each`: of repeated prompts, one is kept. `tool`: every row has verl's
    `extra_info.tools_kwargs` for the tool of this name.
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
    """The first of these columns that is there; a dot goes into a dictionary. ValueError: none is."""
    for name in names:
        entry: Any = record
        for part in name.split("."):
            entry = entry.get(part) if isinstance(entry, Mapping) else None
        if entry is not None:
            return entry
    if null := next((name for name in names if name in record), None):
        raise ValueError(f"has nothing in '{null}' (null): fill it in, or leave the row out")
    listed = " or ".join(f"'{name}'" for name in names)
    raise ValueError(f"has no {listed} (it has {', '.join(map(str, record))})")


def text(record: Record, *names: str) -> str:
    """`value` as text without white space around it. ValueError: it is something else."""
    entry = value(record, *names)
    if not isinstance(entry, str):
        raise ValueError(f"'{names[0]}' must be text, got {entry!r:.60}")
    return entry.strip()


def number(answer: Any) -> str:
    """A number as text, 27.0 as 27. Text stays."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()


def _gsm8k(record: Record) -> Example:
    """The ground truth is the number after `####` in the reference answer, without commas."""
    solution, mark, answer = text(record, "answer").rpartition("####")
    if not mark:
        raise ValueError("'answer' has no '####' before its final number; is this GSM8K?")
    question = text(record, "question")
    return Example(question, answer.strip().replace(",", ""), {"question": question, "answer": solution.strip()})


def _competition(record: Record) -> Example:
    """A problem with its answer, or with a solution whose last box holds it."""
    answer = record.get("answer", record.get("Answer"))
    truth = last_boxed(text(record, "solution")) if answer is None else number(answer)
    extra = {name: str(record[name]) for name in ("level", "type", "subject", "year") if record.get(name) is not None}
    return Example(text(record, "problem", "question", "Problem"), truth, extra)


def last_boxed(solution: str) -> str:
    """What the last \\boxed{…} or \\fbox{…} holds, or `5` of `\\boxed 5`. ValueError: there is none."""
    *_, rest = re.split(r"\\boxed|\\fbox", solution)
    if rest == solution:
        raise ValueError("'solution' has no \\boxed answer")
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()
    depth = 0
    for i, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:i].strip()
    raise ValueError("'solution' ends inside its last \\boxed")


def _dapo(record: Record) -> Example:
    """The instruction to end in `Answer: …` is a part of the published prompt."""
    return Example(value(record, "prompt"), number(value(record, "reward_model.ground_truth", "solution")))


def _numbers_game(record: Record) -> Example:
    """Numbers and a target (24 without one): columns, one text like `1 1 4 6`, or reasoning-gym's metadata."""
    puzzle = record.get("metadata") or record
    entry: Any = value(puzzle, "numbers", "nums", "Puzzles", "Puzzle")
    numbers = [int(n) for n in (entry.split() if isinstance(entry, str) else entry)]
    target = int(puzzle.get("target") or 24)
    question = (
        f"Using the numbers {', '.join(map(str, numbers))}, each exactly once, with + - * / and brackets, write an "
        f"expression that equals {target}."
    )
    solution = record.get("answer") if puzzle is not record else record.get("solution")
    return Example(question, {"target": target, "numbers": numbers}, {"solution": solution} if solution else {})


def _puzzle(record: Record) -> Example:
    """The task grades by its whole entry, kept as JSON: many puzzles have more than one right answer."""
    entry = json.dumps(dict(record), default=str)
    return Example(str(record["question"]).strip(), str(record["answer"]), {"entry": entry})


def _search_question(record: Record) -> Example | None:
    """A question, ended by a question mark as in Search-R1; `target` lists the answers that count as right."""
    entry: Any = value(record, "golden_answers", "answers", "answer", "reward_model.ground_truth.target")
    answers = [str(a) for a in ([entry] if isinstance(entry, str) else entry) if str(a).strip()]
    question = text(record, "question").removesuffix("?") + "?"
    name = record.get("data_source")
    source = f"searchR1_{str(name).removeprefix('searchR1_')}" if name else None
    return Example(question, {"target": answers}, {"question": question}, source) if answers else None


def _mmlu(record: Record) -> Example:
    """Lettered choices; the ground truth is the right one's letter. `answer` is its index, or the letter."""
    choices, answer = list(value(record, "choices")), value(record, "answer")
    index = _LETTERS.find(answer.strip().upper()) if isinstance(answer, str) else int(answer)
    if not 0 <= index < len(choices):
        raise ValueError(f"the answer {answer!r} is none of its {len(choices)} choices")
    lettered = "\n".join(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False))
    question, subject = text(record, "question"), record.get("subject")
    extra = {"question": question, "choices": choices, **({} if subject is None else {"subject": subject})}
    return Example(f"{question}\n\n{lettered}", _LETTERS[index], extra)


def _humaneval(record: Record) -> Example:
    """The beginning of a function; the tests call it by its name."""
    start = str(value(record, "prompt"))
    truth = {"prompt": start, "test": text(record, "test"), "entry_point": text(record, "entry_point")}
    extra = {"task_id": text(record, "task_id"), "solution": start + str(record.get("canonical_solution") or "")}
    return Example(f"```python\n{start.strip()}\n```", json.dumps(truth), extra)


def _mbpp(record: Record) -> Example:
    """A task in words, and the assertions that the code has to pass; they name the function, so they are shown."""
    tests = list(value(record, "test_list"))
    setup = "\n".join([*(record.get("test_imports") or ()), str(record.get("test_setup_code") or "")]).strip()
    question = f"{text(record, 'text', 'prompt')}\n\nThe code has to pass these tests:\n\n" + "\n".join(tests)
    extra = {"task_id": str(value(record, "task_id")), "solution": record.get("code") or ""}
    return Example(question, json.dumps({"test_list": tests, "test_setup_code": setup}), extra)


def _hh_rlhf(record: Record) -> Pair | None:
    """A conversation and two last turns of the assistant; left out where the two are the same."""
    prompt, chosen, rejected = (text(record, name) for name in ("prompt", "chosen", "rejected"))
    source = str(record.get("source") or "hh_rlhf")
    return Pair(conversation(f"\n\n{prompt}"), chosen, rejected, source) if chosen != rejected else None


def conversation(transcript: str) -> list[dict[str, str]]:
    """`\\n\\nHuman: … \\n\\nAssistant: …` as messages, up to the turn that the assistant is to write."""
    if not (turns := transcript_turns(transcript)):
        raise ValueError(f"the conversation must begin with 'Human:', got {transcript!r:.60}")
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _ultrafeedback(record: Record) -> Pair | None:
    """Two conversations; left out where the judge scored both alike or they end in the same words."""
    chosen, rejected = value(record, "chosen"), value(record, "rejected")
    for messages in (chosen, rejected):
        if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
            raise ValueError("'chosen' and 'rejected' must be lists of messages that end with the assistant's")
    best, worst = (str(messages[-1]["content"]).strip() for messages in (chosen, rejected))
    is_tie = "score_chosen" in record and record["score_chosen"] == record.get("score_rejected")
    prompt: Any = chosen[:-1] or text(record, "prompt")
    return None if is_tie or best == worst else Pair(prompt, best, worst, "ultrafeedback")


def puzzles(task: str, seed: int, **settings: Any) -> Iterator[Record]:
    """Puzzles of a reasoning-gym task in the order of its seed. UserError: no such package, task or settings."""
    needs = f"{task} puzzles are made by reasoning-gym"
    factory = installed("reasoning_gym.factory", needs, "'valor-rl[reasoning]'")
    if task not in factory.DATASETS:
        raise UserError(f"reasoning-gym has no task '{task}'; it has {', '.join(sorted(factory.DATASETS))}")
    try:
        dataset = factory.create_dataset(task, seed=seed, size=_SIZE, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{PREFIX}{task} does not take these --option settings ({error})") from None
    return (dataset[i] for i in range(_SIZE))


def _splits(
    path: str, config: str | None = None, train: str = "train", test: str = "test", source: str | None = None
) -> dict[str, list[Hub]]:
    """One data set's place for each of our splits; `train` and `test` are its own names of them."""
    return {"train": [Hub(path, config, train, source)], "test": [Hub(path, config, test, source)]}


_BOXED = QUESTION + "\n\nThink step by step and put the final answer in \\boxed{}."
_GSM8K = QUESTION + ' Think step by step, then write the final answer as a number after "####".'
_EXPRESSION = QUESTION + " Think inside <think> </think> and give the expression inside <answer> </answer>."
_CHOOSE = QUESTION + '\n\nThink step by step and end with "Answer: X", where X is the letter of the right choice.'
_COMPLETE = "Complete this Python function. Give the whole function in one ```python block.\n\n" + QUESTION
_PROGRAM = QUESTION + "\n\nGive the code in one ```python block."
_TAGGED = QUESTION + "\n\nThink step by step and give the final answer inside <answer> </answer>."
# Search-R1's words, to the letter (scripts/data_process/nq_search.py of https://github.com/PeterGriffinJin/Search-R1).
_SEARCH = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
    + QUESTION
    + "\n"
)
_MATH, _MATH500 = "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"
_HUMANEVAL, _MBPP = "openai/openai_humaneval", "google-research-datasets/mbpp"
_HH, _ULTRA = "Dahoas/full-hh-rlhf", "HuggingFaceH4/ultrafeedback_binarized"
_NQ = _splits("RUC-NLPIR/FlashRAG_datasets", "nq", source="searchR1_nq")
_HOTPOTQA = _splits("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", test="dev", source="searchR1_hotpotqa")
# As many and as large numbers as TinyZero's puzzles have.
_COUNTDOWN = partial(puzzles, "countdown", min_numbers=3, max_numbers=4, max_value=99, min_target=10, max_target=100)

# Name and title; converter, data source, ability and template; places.
# fmt: off
_RECIPES = (
    Recipe("gsm8k", "7,473 + 1,319 grade-school word problems",
           _gsm8k, "openai/gsm8k", "math", _GSM8K, _splits("openai/gsm8k", "main")),
    Recipe("math", "MATH, 7,500 + 5,000 competition problems (its test set holds MATH-500)",
           _competition, _MATH, "math", _BOXED, _splits(_MATH)),
    Recipe("math500", "MATH-500, 500 problems of MATH's test set",
           _competition, _MATH500, "math", _BOXED, {"test": [Hub(_MATH500, None, "test")]}),
    Recipe("aime24", "30 problems of the AIME 2024; the answer is an integer from 0 to 999",
           _competition, "aime24", "math", _BOXED, {"test": [Hub("HuggingFaceH4/aime_2024")]}),
    Recipe("aime25", "30 problems of the AIME 2025",
           _competition, "aime25", "math", _BOXED, {"test": [Hub("math-ai/aime25", None, "test")]}),
    Recipe("dapo_math", "DAPO-Math-17k: about 17,000 problems with integer answers, published in about 100 copies",
           _dapo, "math_dapo", "math", QUESTION, {"train": [Hub("BytedTsinghua-SIA/DAPO-Math-17k")]}, one_each=True),
    Recipe("game24", "Game of 24: the 1,362 solvable hands of four numbers from 1 to 13",
           _numbers_game, "game24", "math", _EXPRESSION, {"train": [Hub("test-time-compute/game-of-24")]}),
    Recipe("countdown", "numbers that make a target, generated (--option max_numbers=5 max_target=200 …)",
           _numbers_game, "countdown", "math", _EXPRESSION, generate=_COUNTDOWN),
    Recipe("nq", "Natural Questions (open), 79,168 + 3,610, as Search-R1 asks them",
           _search_question, "searchR1_nq", "fact-reasoning", _SEARCH, _NQ, tool="search"),
    Recipe("hotpotqa", "HotpotQA, 90,447 + 7,405 (dev), as Search-R1 asks it",
           _search_question, "searchR1_hotpotqa", "fact-reasoning", _SEARCH, _HOTPOTQA, tool="search"),
    Recipe("search", "NQ and HotpotQA together, the training data of Search-R1",
           _search_question, "searchR1_qa", "fact-reasoning", _SEARCH,
           {split: _NQ[split] + _HOTPOTQA[split] for split in _NQ}, tool="search"),
    Recipe("mmlu", "MMLU: 99,842 auxiliary and 14,042 test questions with four choices, 57 subjects",
           _mmlu, "cais/mmlu", "knowledge", _CHOOSE, _splits("cais/mmlu", "all", train="auxiliary_train")),
    Recipe("humaneval", "HumanEval, 164 Python functions to complete",
           _humaneval, _HUMANEVAL, "code", _COMPLETE, {"test": [Hub(_HUMANEVAL, None, "test")]}),
    Recipe("mbpp", "MBPP, 374 + 500 short Python tasks with three tests each",
           _mbpp, _MBPP, "code", _PROGRAM, _splits(_MBPP, "full")),
    Recipe("hh_rlhf", "helpful and harmless conversations, 112,052 + 12,451 pairs",
           _hh_rlhf, _HH, "alignment", QUESTION, _splits(_HH), pairs=True),
    Recipe("ultrafeedback", "UltraFeedback, 61,135 + 2,000 pairs scored by a judge",
           _ultrafeedback, _ULTRA, "alignment", QUESTION,
           _splits(_ULTRA, train="train_prefs", test="test_prefs"), pairs=True),
)
# fmt: on
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or of a reasoning-gym task, which grades its puzzles. UserError names the known ones."""
    if name.startswith(PREFIX):
        generate = partial(puzzles, name.removeprefix(PREFIX))
        return Recipe(name, f"reasoning-gym's {name}", _puzzle, name, "reasoning", _TAGGED, generate=generate)
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or "."
        raise UserError(
            f"no data set '{name}'{hint} There are: {', '.join(RECIPES)}, {PREFIX}TASK, and custom for your own"
        )
    return RECIPES[name]
