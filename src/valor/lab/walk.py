"""The third embedded task: a chain of choices with one late outcome, whose values are known exactly.

The prompt is a room, `3`; the response a walk, `a5b2…`: a door, the room behind it, the next door (`rewards/walk.py`).
Which door gains what is told to nobody: the score is the mean gain of the whole walk, at its end. Doors that gain much
may lead to rooms that do not. All walks from a room are the task's whole decision process, so the best walk is known by
dynamic programming, and the value of a policy at every state by enumeration (`benchmarks/walk_values.py`). The warm
start comes from a teacher who takes doors at random: he shows where they lead, and not which pays. Horizon, branching
and the map follow from arguments and a seed; `algorithm.reward_noise` adds noise to outcomes. Nothing is downloaded.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from valor.errors import UserError
from valor.lab import arithmetic
from valor.rewards.walk import DOORS, Walk

DATA_SOURCE = "valor/walk"
PROBLEMS, TEACHER = "walks of eight doors", "takes doors at random"
ANSWERS = "3 is a room, a5b2 a door, the room behind it, a door, its room: only what all doors gain is told."
"""How `valor demo` and its report speak of the task."""
_GAINS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DataFiles(arithmetic.DataFiles):
    """`walk`: the map of all rows. Validation asks for each room once: the same rooms as in training."""

    config_prefix = "walk_"
    measured = "score on {} rooms, greedy"

    walk: Walk

    @property
    def yardstick(self) -> str:
        """What the scores of a run lie between."""
        best, chance = (sum(to_go := self.walk.to_go(u)[-1]) / len(to_go) / self.walk.length for u in (False, True))
        return f"the best walks score {best:.3f}, doors taken at random {chance:.3f}"


def make_model(out_dir: Path | str, seed: int = 0) -> Path:
    """Write the untrained model of the first task, with the larger weights of the second; returns the directory."""
    return arithmetic.make_model(out_dir, seed, initializer_range=0.06)


def make_walk(seed: int = 0, *, length: int = 8, doors: int = 2, rooms: int = 8) -> Walk:
    """A map drawn from a seed. UserError: more rooms than digits, more doors than letters."""
    if not (2 <= rooms <= 10 and 2 <= doors <= len(DOORS) and length >= 1):
        raise UserError(f"a walk has 2 to 10 rooms, 2 to {len(DOORS)} doors and a length of at least 1")
    rng = random.Random(seed)
    leads = [rng.sample([r for r in range(rooms) if r != s] * doors, doors) for s in range(rooms)]
    return Walk(leads, [rng.sample(_GAINS * doors, doors) for _ in range(rooms)], length)


def make_data(
    out_dir: Path | str, seed: int = 0, *, length: int = 8, doors: int = 2, num_train: int = 2048, num_sft: int = 12_000
) -> DataFiles:
    """Write prompts (verl's columns) and the teacher's walks (`messages`)."""
    walk, rng = make_walk(seed, length=length, doors=doors), random.Random(seed)
    files = DataFiles.of(out_dir, walk=walk)
    rooms = range(len(walk.leads))
    for path, some in ((files.train, [rng.choice(rooms) for _ in range(num_train)]), (files.val, rooms)):
        questions = ((str(room), json.dumps(asdict(replace(walk, start=room))), {}) for room in some)
        arithmetic.write_prompts(path, DATA_SOURCE, "walk", questions)
    arithmetic.write_demonstrations(files, num_sft, 256, lambda: _demonstration(walk, rng))
    return files


def written(walk: Walk, doors: Sequence[int]) -> str:
    """The response that takes these doors from the walk's start on."""
    text, room = "", walk.start
    for door in doors:
        room = walk.leads[room][door]
        text += f"{DOORS[door]}{room}"
    return text


def _demonstration(walk: Walk, rng: random.Random) -> list[dict[str, str]]:
    walk = replace(walk, start=rng.randrange(len(walk.leads)))
    doors = [rng.randrange(len(walk.leads[0])) for _ in range(walk.length)]
    return [{"role": "user", "content": str(walk.start)}, {"role": "assistant", "content": written(walk, doors)}]
