"""The data sets that `valor data prepare` knows: where each lies, which function reads its records, how it is asked.

They are on the Hugging Face hub, or reasoning-gym makes them here (`pip install 'valor-rl[reasoning]'`).
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from valor.data.recipes import records
from valor.data.recipes.records import EXPRESSION, QUESTION, Example, Hub, Recipe, Record
from valor.errors import UserError, did_you_mean
from valor.user_files import installed

PREFIX = "reasoning_gym/"
_SIZE = 2**31 - 1  # a task makes any number of puzzles, each from (seed, place); only those asked for are made

_BOXED = QUESTION + "\n\nThink step by step and put the final answer in \\boxed{}."
_CHOOSE = QUESTION + '\n\nThink step by step and end with "Answer: X", where X is the letter of the right choice.'
_GSM8K = QUESTION + ' Think step by step, then write the final answer as a number after "####".'
_COMPLETE = "Complete this Python function. Give the whole function in one ```python block.\n\n" + QUESTION
_PROGRAM = QUESTION + "\n\nGive the code in one ```python block."
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


def _flashrag(config: str, split: str) -> Hub:
    return Hub("RUC-NLPIR/FlashRAG_datasets", config, split, f"searchR1_{config}")


def _splits(path: str, config: str | None = None, *, train: str = "train", test: str = "test") -> dict[str, list[Hub]]:
    """One data set's place for each of our splits; `train` and `test` are its own names of them."""
    return {"train": [Hub(path, config, train)], "test": [Hub(path, config, test)]}


def puzzle(record: Record) -> Example:
    """The puzzle with its whole entry as JSON, by which the task grades: many have more than one right answer."""
    entry = json.dumps(dict(record), default=str)
    return Example(str(record["question"]).strip(), str(record["answer"]), {"entry": entry})


def countdown(record: Record) -> Example:
    """The task's numbers and target in the words and the ground truth of the Countdown grader."""
    made = record.get("metadata")
    return records.numbers_game({**made, "solution": record["answer"]} if made else record)


def puzzles(task: str, seed: int, **settings: Any) -> Iterator[Record]:
    """Puzzles in the order of the task's own seed.

    Raises UserError when reasoning-gym is not installed, has no such task, or the task does not take these settings.
    """
    needs = f"{task} puzzles are made by reasoning-gym"
    factory = installed("reasoning_gym.factory", needs, "'valor-rl[reasoning]'")
    if task not in factory.DATASETS:
        raise UserError(f"reasoning-gym has no task '{task}'; it has {', '.join(sorted(factory.DATASETS))}")
    try:
        made = factory.create_dataset(task, seed=seed, size=_SIZE, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{PREFIX}{task} does not take these --option settings ({error})") from None
    return (made[i] for i in range(_SIZE))


_MATH, _MBPP = "DigitalLearningGmbH/MATH-lighteval", "google-research-datasets/mbpp"
_HH, _ULTRA = "Dahoas/full-hh-rlhf", "HuggingFaceH4/ultrafeedback_binarized"
_DAPO = Hub("BytedTsinghua-SIA/DAPO-Math-17k")
_MATH500 = Hub("HuggingFaceH4/MATH-500", None, "test")
_AMC = Hub("math-ai/amc23", None, "test")
_GAME24 = Hub("test-time-compute/game-of-24")
_HUMANEVAL = Hub("openai/openai_humaneval", None, "test")
_AIME24 = Hub("HuggingFaceH4/aime_2024", None, "train", "aime24")
_AIME25 = Hub("math-ai/aime25", None, "test", "aime25")
_AIME = "problems of the AIME; the answer is an integer from 0 to 999"
_NQ = {"train": [_flashrag("nq", "train")], "test": [_flashrag("nq", "test")]}
_HOTPOTQA = {"train": [_flashrag("hotpotqa", "train")], "test": [_flashrag("hotpotqa", "dev")]}
_NQ_HOTPOTQA = {split: _NQ[split] + _HOTPOTQA[split] for split in _NQ}

# As many and as large numbers as TinyZero's puzzles have.
_COUNTDOWN = partial(puzzles, "countdown", min_numbers=3, max_numbers=4, max_value=99, min_target=10, max_target=100)

# Name and title; the function, data source, ability and template; the places.
# fmt: off
_RECIPES = (
    Recipe("gsm8k", "7,473 + 1,319 grade-school word problems",
           records.gsm8k, "openai/gsm8k", "math", _GSM8K, _splits("openai/gsm8k", "main")),
    Recipe("math", "MATH, 7,500 + 5,000 competition problems (its test set holds MATH-500)",
           records.competition, _MATH, "math", _BOXED, _splits(_MATH)),
    Recipe("math500", "MATH-500, 500 problems of MATH's test set",
           records.competition, _MATH500.path, "math", _BOXED, {"test": [_MATH500]}),
    Recipe("aime24", f"30 (2024) {_AIME}",
           records.competition, "aime24", "math", _BOXED, {"test": [_AIME24]}),
    Recipe("aime25", f"30 (2025) {_AIME}",
           records.competition, "aime25", "math", _BOXED, {"test": [_AIME25]}),
    Recipe("aime", f"60 (2024 and 2025) {_AIME}",
           records.competition, "aime", "math", _BOXED, {"test": [_AIME24, _AIME25]}),
    Recipe("amc", "40 problems of the AMC 12 of 2023",
           records.competition, _AMC.path, "math", _BOXED, {"test": [_AMC]}),
    Recipe("dapo_math", "DAPO-Math-17k: about 17,000 problems with integer answers, published in about 100 copies",
           records.dapo, "math_dapo", "math", QUESTION, {"train": [_DAPO]}, one_each=True),
    Recipe("game24", "Game of 24: the 1,362 solvable hands of four numbers from 1 to 13",
           records.numbers_game, "game24", "math", EXPRESSION, {"train": [_GAME24]}),
    Recipe("nq", "Natural Questions (open), 79,168 + 3,610, as Search-R1 asks them",
           records.search_question, "searchR1_nq", "fact-reasoning", _SEARCH, _NQ, tool="search"),
    Recipe("hotpotqa", "HotpotQA, 90,447 + 7,405 (dev), as Search-R1 asks it",
           records.search_question, "searchR1_hotpotqa", "fact-reasoning", _SEARCH, _HOTPOTQA, tool="search"),
    Recipe("search", "NQ and HotpotQA together, the training data of Search-R1",
           records.search_question, "searchR1_qa", "fact-reasoning", _SEARCH, _NQ_HOTPOTQA, tool="search"),
    Recipe("mmlu", "MMLU: 99,842 auxiliary and 14,042 test questions with four choices, 57 subjects",
           records.mmlu, "cais/mmlu", "knowledge", _CHOOSE, _splits("cais/mmlu", "all", train="auxiliary_train")),
    Recipe("hellaswag", "HellaSwag: 39,905 + 10,042 (validation) texts with four endings",
           records.hellaswag, "Rowan/hellaswag", "commonsense", _CHOOSE, _splits("Rowan/hellaswag", test="validation")),
    Recipe("humaneval", "HumanEval, 164 Python functions to complete",
           records.humaneval, _HUMANEVAL.path, "code", _COMPLETE, {"test": [_HUMANEVAL]}),
    Recipe("mbpp", "MBPP, 374 + 500 short Python tasks with three tests each",
           records.mbpp, _MBPP, "code", _PROGRAM, _splits(_MBPP, "full")),
    Recipe("hh_rlhf", "helpful and harmless conversations, 112,052 + 12,451 pairs",
           records.hh_rlhf, _HH, "alignment", QUESTION, _splits(_HH), pairs=True),
    Recipe("ultrafeedback", "UltraFeedback, 61,135 + 2,000 pairs scored by a judge",
           records.ultrafeedback, _ULTRA, "alignment", QUESTION,
           _splits(_ULTRA, train="train_prefs", test="test_prefs"), pairs=True),
    Recipe("countdown",
           "numbers that make a target: any number of solvable puzzles (--option max_numbers=5 max_target=200 …)",
           countdown, "countdown", "math", EXPRESSION, generate=_COUNTDOWN),
)
# fmt: on
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or of a reasoning-gym task, which grades its puzzles. UserError names the known ones."""
    if name.startswith(PREFIX):
        title = f"puzzles of the reasoning-gym task {name.removeprefix(PREFIX)} (--option KEY=VALUE: its settings)"
        template = QUESTION + "\n\nThink step by step and give the final answer inside <answer> </answer>."
        made = partial(puzzles, name.removeprefix(PREFIX))
        return Recipe(name, title, puzzle, name, "reasoning", template, generate=made)
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or "."
        raise UserError(
            f"no data set '{name}'{hint} There are: {', '.join(RECIPES)}, {PREFIX}TASK, and custom for your own"
        )
    return RECIPES[name]
