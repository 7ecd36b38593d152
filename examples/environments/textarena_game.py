"""Games of TextArena for one player. Needs `pip install textarena`."""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from valor.agents.env import Env, Step, row_number
from valor.errors import UserError, did_you_mean
from valor.rewards.answers import after_thinking
from valor.user_files import installed

_DRAWING = threading.Lock()


class TextArena(Env):
    """The game `game`, such as Wordle-v0, drawn by `extra_info.seed`, or the row's number.

    Further arguments are the game's. UserError: TextArena is not installed, there is no such game, or it is not one for
    a single player.
    """

    def __init__(self, game: str, **options: Any) -> None:
        textarena = installed("textarena", f"{game} needs TextArena", "textarena")
        registry = textarena.envs.registration.ENV_REGISTRY
        if game not in registry:
            raise UserError(f"TextArena has no game '{game}'{did_you_mean(game, registry)}")
        self._game, self._options = game, options
        self._make, self._own = textarena.make, textarena.ObservationType.PLAYER_ACTION
        self._env: Any = None
        self._random: Any = None

    def reset(self, row: Mapping[str, Any]) -> str:
        seed = row_number(row)
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._env = self._make(self._game, **self._options)
            try:
                self._env.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise UserError(f"{self._game}: {error}: take a game for one player") from None
        return self._observation()

    def step(self, text: str) -> Step:
        with self._own_random():
            done, _ = self._env.step(action=after_thinking(text).strip())
        return Step("" if done else self._observation(), 0.0, done)

    def score(self) -> float:
        """The player's reward; 0 for a game that has not ended."""
        rewards, _ = self._env.close()
        return float((rewards or {}).get(0, 0.0))

    def _observation(self) -> str:
        """What is new to the policy. TextArena's wrappers would repeat the whole game."""
        state = self._env.state
        seen = state.get_current_player_observation()
        new = [(who, text) for who, text, kind in seen if (who, kind) != (0, self._own)]
        return "\n".join(f"[{state.role_mapping.get(who, f'Player {who}')}] {text}" for who, text in new)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Games draw from Python's one generator: each gets a state of its own, and nobody else's is moved."""
        with _DRAWING:
            others = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(others)
