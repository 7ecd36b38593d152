"""Puzzles that reasoning-gym makes here (`pip install 'valor-rl[reasoning]'`): any of its tasks, and Countdown."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from valor.data.recipes.convert import numbers_game
from valor.data.recipes.recipe import EXPRESSION, QUESTION, Example, Recipe, Record
from valor.errors import UserError
from valor.user_files import installed

PREFIX = "reasoning_gym/"
_SIZE = 2**31 - 1  # a task makes any number of puzzles, each from (seed, place); only those asked for are made


def recipe(task: str) -> Recipe:
    """Puzzles of one task, graded by the task itself."""
    return Recipe(
        PREFIX + task,
        f"puzzles of the reasoning-gym task {task} (--option KEY=VALUE: its settings)",
        example,
        PREFIX + task,
        "reasoning",
        QUESTION + "\n\nThink step by step and give the final answer inside <answer> </answer>.",
        generate=partial(puzzles, task),
    )


def example(record: Record) -> Example:
    """The puzzle with its whole entry as JSON, by which the task grades: many have more than one right answer."""
    entry = json.dumps(dict(record), default=str)
    return Example(str(record["question"]).strip(), str(record["answer"]), {"entry": entry})


def countdown(record: Record) -> Example:
    """The task's numbers and target in the words and the ground truth of the Countdown grader."""
    made = record.get("metadata")
    return numbers_game({**made, "solution": record["answer"]} if made else record)


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


COUNTDOWN = Recipe(
    "countdown",
    "numbers that make a target: any number of solvable puzzles (--option max_numbers=5 max_target=200 …)",
    countdown,
    "countdown",
    "math",
    EXPRESSION,
    # As many and as large numbers as TinyZero's puzzles have.
    generate=partial(puzzles, "countdown", min_numbers=3, max_numbers=4, max_value=99, min_target=10, max_target=100),
)
