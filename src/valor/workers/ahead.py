"""Generation that runs ahead of training: what a generator is told while it generates, and what it answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from valor.agents.episode import Episode, EpisodeKey
from valor.agents.loops import Task
from valor.agents.runner import EpisodeRunner
from valor.rollout.base import Abort, Elsewhere, Request, RolloutEngine

_LISTEN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Begin:
    """Play these tasks' episodes. `attempt`: how often that was asked for before; the answers name it."""

    tasks: Sequence[Task]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """End these episodes."""

    keys: frozenset[EpisodeKey]


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Take the weights that the actor sends at the same time, between two tokens, and keep what is cached."""

    address: tuple[str, int]
    version: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Return as soon as the engine has given back what it is generating."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that has ended."""

    episode: Episode
    attempt: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the last one: seconds of a generator, and those of them in which its engine had nothing to do."""

    seconds: float
    idle: float


class AheadPlayer:
    """Episodes of one process that outlive the calls in which they are generated.

    `take_weights(address, version)` gives the engine the weights that the actor is sending.
    """

    def __init__(self, runner: EpisodeRunner, take_weights: Callable[[Any, int], None]) -> None:
        self.runner, self._take_weights = runner, take_weights
        self._since = self._left = time.monotonic()
        self._idle = 0.0

    def serve(self, engine: RolloutEngine, sink: Callable[[Any], None], feed: Callable[[], Sequence[Any]]) -> None:
        """Play what `feed` brings, until it brings a `Pause`; `sink` gets `Played` and `Usage`."""

        def listen() -> None:
            for message in feed():
                self._obey(message)
                if isinstance(message, Pause | TakeWeights):
                    sink(self._usage())

        self._idle -= time.monotonic() - self._left  # nothing was generated since then
        try:
            self.runner.serve(engine, lambda *ended: sink(Played(*ended)), listen)
        finally:
            self._left = time.monotonic()

    def _obey(self, message: Any) -> None:
        match message:
            case Begin(tasks, attempt):
                self.runner.add(tasks, attempt)
            case Drop(keys):
                self.runner.drop(keys)
            case TakeWeights(address, version):
                self._take_weights(address, version)
            case Pause():
                self.runner.pause()

    def _usage(self) -> Usage:
        now, idle = time.monotonic(), self.runner.idle_seconds
        usage = Usage(now - self._since, idle - self._idle)
        self._since, self._idle = now, idle
        return usage


class FollowedSource(Elsewhere):
    """In the other processes of those that generate together: they take weights when the first one does."""

    def __init__(self, feed: Callable[[], Sequence[Any]], take_weights: Callable[[Any, int], None]) -> None:
        self._feed, self._take_weights = feed, take_weights

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        """Called when the first process is given weights, which this one is told as well."""
        while True:
            for message in self._feed():
                if isinstance(message, TakeWeights):
                    self._take_weights(message.address, message.version)
                    return []
            time.sleep(_LISTEN_SECONDS)


async def answer(task: Task, runner: EpisodeRunner) -> Episode:
    """An episode of one answer."""
    return Episode.of_one_turn(task.key, await runner.generate(task.prompt_ids, task.params, task.key))
