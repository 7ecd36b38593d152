"""Many episodes at once beside one generation engine.

The engine runs in the calling thread and generates what is asked of it. The episodes are coroutines in a thread of
their own: each waits for its turns and for its tools, and holds up nobody else.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from threading import Condition, Thread

from valor.agents.episode import Episode, EpisodeKey
from valor.agents.loops import Task
from valor.rollout.base import Abort, Output, Request, RolloutEngine, SamplingParams
from valor.tracking.progress import report_progress

Play = Callable[[Task, "EpisodeRunner"], Awaitable[Episode]]
Sink = Callable[[Episode], None]

_LISTEN_SECONDS = 0.01  # between two questions for news, where nothing else happens


class EpisodeRunner:
    """Plays episodes, and is the source of the requests that they make (`RequestSource`).

    `run` plays those of `tasks`. Where further tasks may come, `serve` plays until `pause`, as often as it is called;
    meanwhile tools go on, and what was being generated goes on from its tokens.

    Args:
        most: episodes under way at once.
        max_tokens: longest prompt plus response.
        deterministic: hand requests to the engine only when every episode under way waits for its turn, so that what
            is generated together does not depend on the speed of tools.
    """

    everywhere = False

    def __init__(
        self, tasks: Sequence[Task], play: Play, *, most: int, max_tokens: int, deterministic: bool = False
    ) -> None:
        self._play, self._deterministic = play, deterministic
        self.max_requests, self.max_tokens = most, max_tokens
        self._changed = Condition()
        self._asked: list[Request] = []
        self._names = count()  # of requests
        self._in_engine: dict[str, Request] = {}
        self._fates: dict[str, str] = {}  # of these: "discarded", or "interrupted", which go on after their abort
        self._under_way: dict[EpisodeKey, int] = {}  # episodes that have not ended, by the number of their play
        self._plays = count(1)  # an episode that was dropped may be played again
        self._over: set[EpisodeKey] = set()  # and those of `run` that have
        self._finished: list[Episode] = []  # that have, and nobody was told yet
        self._stopped: BaseException | None = None
        self._told = 0
        self._sink: Sink | None = None
        self._listen: Callable[[], None] | None = None
        self._paused = False
        self._aborts: list[Abort] = []
        self.idle_seconds = 0.0  # in which the engine had nothing to do
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run_loop, name="episodes", daemon=True)
        self._tasks = tasks
        self._playing: dict[EpisodeKey, asyncio.Task[Episode]] = {}

    def run(self, engine: RolloutEngine, sink: Sink | None = None) -> list[Episode]:
        """The episodes in the order of the tasks. `sink` gets each when it has ended, in the calling thread."""
        self._sink, self.max_requests = sink, min(self.max_requests, len(self._tasks))
        self._closed, self._under_way = True, {task.key: 0 for task in self._tasks}
        self._thread.start()
        try:
            engine.serve(self)
        except BaseException:
            self._cancel()
            raise
        finally:
            self._thread.join()
        self._tell()
        return self._episodes

    def serve(self, engine: RolloutEngine, sink: Sink, listen: Callable[[], None]) -> None:
        """Play what `add` brings, until `pause`. `sink` gets episodes when they have ended; an error drops all of them.

        `listen` is called again and again, and may call `add`, `drop`, `pause` or change the engine's weights. All is
        called in the calling thread.
        """
        self._sink, self._listen, self._closed, self._paused = sink, listen, False, False
        if not self._thread.is_alive():
            self._thread.start()
        try:
            engine.serve(self)
        except BaseException:  # what the engine had is lost
            with self._changed:
                for lost in (self._in_engine, self._fates, self._aborts, self._finished):
                    lost.clear()
            self.drop([*self._under_way])
            raise

    def add(self, tasks: Sequence[Task]) -> None:
        number = next(self._plays)
        with self._changed:
            self._under_way |= {task.key: number for task in tasks}
        with suppress(RuntimeError):  # an episode has failed the run, which the next poll tells
            self._loop.call_soon_threadsafe(self._begin, tasks, number)

    def drop(self, keys: Collection[EpisodeKey]) -> None:
        """End these episodes; nobody is told of them."""
        with self._changed:
            for key in keys:
                self._under_way.pop(key, None)
            names = [name for name, one in self._in_engine.items() if _episode(one) in keys]
            self._fates |= dict.fromkeys(names, "discarded")
            self._aborts += map(Abort, names)
            self._asked = [one for one in self._asked if _episode(one) not in keys]
            self._finished = [one for one in self._finished if one.key not in keys]
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel_episodes, keys)

    def interrupt(self) -> None:
        """Have the engine begin anew with what it is generating: its keys and values are those of old weights."""
        with self._changed:
            self._fates = dict.fromkeys(self._in_engine, "interrupted") | self._fates
            self._aborts = [Abort(name) for name in self._in_engine]

    def pause(self) -> None:
        """Let `serve` return as soon as the engine has given back what it is generating."""
        self.interrupt()
        self._paused = True

    def close(self) -> None:
        self._cancel()
        if self._thread.is_alive():
            self._thread.join()

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        since = time.monotonic()
        while True:
            self._tell()
            if self._listen is not None:
                self._listen()
            with self._changed:
                if self._stopped is not None:
                    raise self._stopped
                if (found := self._next()) is None or found or not wait:
                    break
                if not self._finished:
                    self._changed.wait(None if self._listen is None else _LISTEN_SECONDS)
        self.idle_seconds += time.monotonic() - since if wait else 0.0
        return found

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: EpisodeKey) -> Output:
        """One turn; for the episodes. `seed` decides its random numbers, and begins with the episode's key."""
        done: asyncio.Future[Output] = self._loop.create_future()
        request = Request(f"{'-'.join(map(str, seed))}#{next(self._names)}", prompt_ids, params, seed)

        def finish(output: Output) -> None:
            with self._changed:
                del self._in_engine[request.request_id]
                fate = self._fates.pop(request.request_id, None)
                if fate == "discarded":
                    return
                if fate == "interrupted" and output.finish_reason == "abort":
                    self._asked.append(replace(request, so_far=output, on_finish=finish))
                    return
            with suppress(RuntimeError):  # the episodes have ended by an error, which the next poll raises
                self._loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(output))

        with self._changed:
            self._asked.append(replace(request, on_finish=finish))
            self._changed.notify()
        return await done

    # ---- inside

    def _next(self) -> Sequence[Request | Abort] | None:
        aborts, self._aborts = self._aborts, []
        if self._closed and not self._under_way:
            return None
        if self._paused:
            return aborts if aborts or self._in_engine else None
        # A program that has ended its episode may have left a request behind, for whose answer nobody waits.
        self._asked = [one for one in self._asked if not self._is_over(_episode(one))]
        if aborts or not self._ready:
            return aborts
        requests, self._asked = sorted(self._asked, key=lambda one: one.seed), []
        self._in_engine |= {one.request_id: one for one in requests}
        return requests

    def _is_over(self, key: EpisodeKey) -> bool:
        return key in self._over if self._closed else key not in self._under_way

    @property
    def _ready(self) -> bool:
        if not self._deterministic:
            return bool(self._asked)
        under_way = min(self.max_requests, len(self._under_way))
        return not self._in_engine and len({_episode(one) for one in self._asked}) == under_way

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
        self._places = asyncio.Semaphore(self.max_requests)
        async with asyncio.TaskGroup() as self._group:
            playing = self._begin(self._tasks, 0)
            if not self._closed:
                await asyncio.Event().wait()  # until `close`
        return [task.result() for task in playing]

    def _begin(self, tasks: Sequence[Task], number: int) -> list[asyncio.Task[Episode]]:
        playing = [self._group.create_task(self._play_one(task, number)) for task in tasks]
        self._playing |= {task.key: one for task, one in zip(tasks, playing, strict=True)}
        return playing

    async def _play_one(self, task: Task, number: int) -> Episode:
        async with self._places:
            episode = await self._play(task, self)
            with self._changed:
                if self._under_way.get(task.key) == number:  # else it was dropped a moment ago, and perhaps begun anew
                    self._finished.append(episode)
                    del self._under_way[task.key]
                if self._closed:
                    self._over.add(task.key)
                self._changed.notify()
            del self._playing[task.key]
            return episode

    def _cancel_episodes(self, keys: Collection[EpisodeKey]) -> None:
        for key in keys:
            if (playing := self._playing.pop(key, None)) is not None:
                playing.cancel()

    def _cancel(self) -> None:
        with suppress(RuntimeError, AttributeError):  # it has ended, or never begun
            self._loop.call_soon_threadsafe(lambda: self._main.cancel())

    def _tell(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
        for episode in finished:
            self._told += 1
            if self._sink is not None:
                self._sink(episode)
            if self._closed:
                report_progress(self._told, len(self._tasks))


def _episode(request: Request) -> tuple[int, ...]:
    return request.seed[:3]
