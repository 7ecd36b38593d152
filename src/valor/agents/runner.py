"""Many episodes at once beside one generation engine.

The engine runs in the calling thread and generates what is asked of it. The episodes are coroutines in a thread of
their own: each waits for its turns and for its tools, and holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import Generic, TypeVar

from valor.agents.episode import Episode, EpisodeKey
from valor.rollout.base import Output, Request, RolloutEngine, SamplingParams
from valor.tracking.progress import report_progress

T = TypeVar("T")
Play = Callable[[T, "EpisodeRunner[T]"], Awaitable[Episode]]
Sink = Callable[[Episode], None]


class EpisodeRunner(Generic[T]):
    """Plays an episode for each of `tasks`, and is the source of the requests that they make (`RequestSource`).

    Args:
        play: plays one task's episode.
        most: episodes under way at once.
        max_tokens: longest prompt plus response.
        deterministic: hand requests to the engine only when every episode under way waits for its turn, so that what
            is generated together does not depend on the speed of tools.
    """

    everywhere = False

    def __init__(
        self, tasks: Sequence[T], play: Play[T], *, most: int, max_tokens: int, deterministic: bool = False
    ) -> None:
        self._tasks, self._play, self._deterministic = tasks, play, deterministic
        self.max_requests, self.max_tokens = min(most, len(tasks)), max_tokens
        self._changed = Condition()
        self._asked: list[Request] = []
        self._in_engine = self._ended = 0
        self._over: set[tuple[int, ...]] = set()  # episodes that have ended
        self._finished: list[Episode] = []  # and not told yet
        self._stopped: BaseException | None = None
        self._loop = asyncio.new_event_loop()

    def run(self, engine: RolloutEngine, sink: Sink | None = None) -> list[Episode]:
        """The episodes in the order of the tasks. `sink` gets each when it has ended, in the calling thread."""
        self._sink, self._told = sink, 0
        thread = Thread(target=self._run_loop, name="episodes", daemon=True)
        thread.start()
        try:
            engine.serve(self)
        except BaseException:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(lambda: self._main.cancel())
            raise
        finally:
            thread.join()
        self._tell()
        return self._episodes

    def poll(self, *, wait: bool) -> Sequence[Request] | None:
        while True:
            self._tell()
            with self._changed:
                if self._stopped is not None:
                    raise self._stopped
                if self._ended == len(self._tasks):
                    return None
                # A program that has ended its episode may have left a request behind, for whose answer nobody waits.
                self._asked = [one for one in self._asked if _episode(one) not in self._over]
                if self._ready:
                    requests, self._asked = sorted(self._asked, key=lambda one: one.seed), []
                    self._in_engine += len(requests)
                    return requests
                if not wait:
                    return []
                if not self._finished:
                    self._changed.wait()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: EpisodeKey) -> Output:
        """One turn; for the episodes. `seed` decides its random numbers, and begins with the episode's key."""
        done: asyncio.Future[Output] = self._loop.create_future()

        def finish(output: Output) -> None:
            with self._changed:
                self._in_engine -= 1
            with suppress(RuntimeError):  # the episodes have ended by an error, which the next poll raises
                self._loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(output))

        with self._changed:
            self._asked.append(Request("-".join(map(str, seed)), prompt_ids, params, seed, finish))
            self._changed.notify()
        return await done

    @property
    def _ready(self) -> bool:
        if not self._deterministic:
            return bool(self._asked)
        under_way = min(self.max_requests, len(self._tasks) - self._ended)
        return self._in_engine == 0 and len({_episode(one) for one in self._asked}) == under_way

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._play_all())
        try:
            self._episodes = self._loop.run_until_complete(self._main)
        except BaseException as error:
            with self._changed:
                self._stopped = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
                self._changed.notify()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _play_all(self) -> list[Episode]:
        places = asyncio.Semaphore(self.max_requests)

        async def one(task: T) -> Episode:
            async with places:
                episode = await self._play(task, self)
                with self._changed:
                    self._ended += 1
                    self._over.add(episode.key)
                    self._finished.append(episode)
                    self._changed.notify()
                return episode

        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(one(task)) for task in self._tasks]
        return [task.result() for task in playing]

    def _tell(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
        for episode in finished:
            self._told += 1
            if self._sink is not None:
                self._sink(episode)
            report_progress(self._told, len(self._tasks))


def _episode(request: Request) -> tuple[int, ...]:
    """The key of the episode that asks."""
    return request.seed[:3]
