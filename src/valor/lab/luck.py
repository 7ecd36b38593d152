"""The fourth embedded task: a choice among events that the policy cannot move, and that a critic can see.

An episode has four turns. A digit is asked; two random digits follow; then the first is asked again, and now the
policy says in which half of the digits it is, `a` or `b`. Before that it repeats what it reads. The outcome is 1 for
the right choice, plus luck: the sum of the two random digits, scaled to a standard deviation of 3. The samples of a
prompt have digits of their own, so a group's mean knows nothing of them, and most of what it ascribes to the choice is
luck. A critic reads them before the choice. The teacher of the warm start chooses right in six of ten. Validation has
no luck: its score is the share of right choices.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from valor.lab import arithmetic

DATA_SOURCE = "valor/luck"
PROBLEMS, TEACHER = "choices among random events", "chooses right in six of ten"
ANSWERS = "A digit and two random ones are repeated; then the first is told again, and a or b says which half it is in."
"""How `valor demo` and its report speak of the task."""
DIGITS = range(10)
RANDOM_DIGITS = 2
_WRONG_SHARE = 0.4


@dataclass(frozen=True)
class DataFiles(arithmetic.DataFiles):
    """`val`: each digit sixteen times, to be answered at temperature 1."""

    config_prefix = "luck_"
    measured = "right choices in {} episodes"


def make_model(out_dir: Path | str, seed: int = 0) -> Path:
    """Write the untrained model of the first task, with the larger weights of the second; returns the directory."""
    return arithmetic.make_model(out_dir, seed, initializer_range=0.06)


def make_data(out_dir: Path | str, seed: int = 0, *, luck: float = 3.0, num_sft: int = 4000) -> DataFiles:
    """Write prompts (verl's columns) and the teacher's episodes (`messages`)."""
    rng, files = random.Random(seed), DataFiles.of(out_dir)
    for path, some, std in ((files.train, [*DIGITS] * 32, luck), (files.val, [*DIGITS] * 16, 0.0)):
        questions = ((str(digit), right(digit), {"luck": std}) for digit in some)
        arithmetic.write_prompts(path, DATA_SOURCE, "choice", questions)
    arithmetic.write_demonstrations(files, num_sft, 256, lambda: _demonstration(rng))
    return files


def right(digit: int) -> str:
    """The choice that pays: which half of the digits this one is in."""
    return "a" if digit < 5 else "b"


def _demonstration(rng: random.Random) -> list[dict[str, str]]:
    digit, *events = (rng.choice(DIGITS) for _ in range(1 + RANDOM_DIGITS))
    choice = right(digit)
    if rng.random() < _WRONG_SHARE:
        choice = "ab".replace(choice, "")
    texts = [digit, digit, *(event for event in events for _ in range(2)), digit, choice]
    return [{"role": ("user", "assistant")[i % 2], "content": str(text)} for i, text in enumerate(texts)]
