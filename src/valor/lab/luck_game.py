"""The environment of the fourth embedded task (`valor.lab.luck`)."""

import random
from collections.abc import Mapping
from typing import Any

from valor.agents.env import Env, Step
from valor.lab.luck import DIGITS, RANDOM_DIGITS

LOST = -1.0
"""The outcome of an episode with a turn of more than one character."""
_MEAN, _STD = 4.5 * RANDOM_DIGITS, 8.25**0.5 * RANDOM_DIGITS**0.5  # of the sum of the random digits


class Luck(Env):
    """One episode. `luck` of the row's extra_info: standard deviation of what the random digits add to the outcome."""

    def reset(self, row: Mapping[str, Any]) -> None:
        draw = random.Random(str(row["episode_key"]))
        digits = [draw.choice(DIGITS) for _ in range(RANDOM_DIGITS)]
        self._messages = [*map(str, digits), row["messages"][-1]["content"]]
        self._right, self.hidden = row["ground_truth"], {"events": "".join(map(str, digits))}
        self._luck = row["extra_info"]["luck"] * (sum(digits) - _MEAN) / _STD

    def step(self, text: str) -> Step:
        if len(text) != 1:
            return Step("", LOST, True)
        if self._messages:
            return Step(self._messages.pop(0))
        return Step("", self._luck + (text == self._right), True)
