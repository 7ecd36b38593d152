"""Games of TextArena, for one player, or against opponents who are functions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from valor.agents.environments.base import Step, TextEnvironment, row_number
from valor.errors import UserError, did_you_mean
from valor.rewards.answers import after_thinking
from valor.user_files import load_object

_DRAWING = threading.Lock()


class TextArena(TextEnvironment):
    """`textarena:GAME`. The policy is player number `player` of `num_players`.

    `opponent` plays the others: a function of the text that TextArena shows a player, which returns the action, or a
    class of such objects, as file.py:name. The game is drawn by `extra_info.seed`, or the row's number. Further
    arguments are the game's. UserError: TextArena is not installed, there is no such game, or it takes no such number
    of players.
    """

    def __init__(
        self, game: str, num_players: int = 1, player: int = 0, opponent: str | None = None, **options: Any
    ) -> None:
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise UserError(f"textarena:{game} needs TextArena ({error}): pip install textarena") from None
        if game not in ENV_REGISTRY:
            raise UserError(f"TextArena has no game '{game}'{did_you_mean(game, ENV_REGISTRY)}")
        if (num_players > 1) != (opponent is not None):
            raise UserError(f"textarena:{game}: num_players above 1 and opponent=file.py:name need each other")
        self._game, self._num_players, self._player, self._options = game, num_players, player, options
        self._make, self._own = textarena.make, textarena.ObservationType.PLAYER_ACTION
        self._opponent: Callable[[str], str] | None = None
        if opponent is not None:
            made = load_object(opponent, "environment_kwargs.opponent")
            self._opponent = made() if isinstance(made, type) else made
        self._env: Any = None
        self._random: Any = None

    def open(self, row: Mapping[str, Any]) -> str:
        seed = row_number(row)
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._env = self._make(self._game, **self._options)
            try:
                self._env.reset(num_players=self._num_players, seed=seed)
            except AssertionError as error:
                raise UserError(f"textarena:{self._game}: {error}; set environment_kwargs.num_players") from None
        self._let_others_play(done=False)
        return self._observation()

    def step(self, text: str) -> Step:
        with self._own_random():
            done, _ = self._env.step(action=after_thinking(text).strip())
        done = self._let_others_play(done)
        return Step("" if done else self._observation(), 0.0, done)

    def score(self) -> float:
        """The player's reward; 0 for a game that has not ended."""
        rewards, _ = self._env.close()
        return float((rewards or {}).get(self._player, 0.0))

    def _let_others_play(self, done: bool) -> bool:
        """Whether the game is over before the policy's next turn."""
        while not done and self._env.state.current_player_id != self._player:
            assert self._opponent is not None, "there are several players"
            with self._own_random():
                _, shown = self._env.get_observation()
            action = self._opponent(shown)
            with self._own_random():
                done, _ = self._env.step(action=action)
        return done

    def _observation(self) -> str:
        """What is new to the policy. TextArena's wrappers would repeat the whole game."""
        state = self._env.state
        new = [(who, text) for who, text, kind in state.get_current_player_observation() if not self._said(who, kind)]
        return "\n".join(f"[{state.role_mapping.get(who, f'Player {who}')}] {text}" for who, text in new)

    def _said(self, who: int, kind: Any) -> bool:
        return who == self._player and kind == self._own

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
