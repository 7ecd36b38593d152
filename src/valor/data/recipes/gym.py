"""Any task of reasoning-gym (`pip install 'valor-rl[reasoning]'`): made here, graded by the task itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from valor.data.recipes.recipe import QUESTION, Example, Recipe, Record
from valor.errors import UserError

PREFIX = "reasoning_gym/"
_SIZE = 2**31 - 1  # a task makes any number of puzzles, each from (seed, place); only those asked for are made


def recipe(task: str) -> Recipe:
    """Puzzles of one task. Raises UserError when reasoning-gym is not installed or has no such task."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(f"{PREFIX}{task} needs reasoning-gym: pip install 'valor-rl[reasoning]'") from None
    if task not in DATASETS:
        raise UserError(f"reasoning-gym has no task '{task}'; it has {', '.join(sorted(DATASETS))}")
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


def puzzles(task: str, seed: int, **settings: Any) -> Iterator[Record]:
    """Puzzles in the order of the task's own seed. Raises UserError for settings that it does not take."""
    import reasoning_gym

    try:
        made = reasoning_gym.create_dataset(task, seed=seed, size=_SIZE, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{PREFIX}{task} does not take these --option settings ({error})") from None
    return (made[i] for i in range(_SIZE))
