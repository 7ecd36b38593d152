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

    `run` plays given tasks to their end. Where further tasks may come, `serve` plays until `pause`, as often as it is
    called; meanwhile tools go on, and what was being generated goes on from its tokens.

    Args:
        most: episodes under way at once.
        max_tokens: longest prompt plus response.
        deterministic: hand requests to the engine only when every episode under way waits for its turn, so that what
            is generated together does not depend on the speed of tools.
        one_turn: every episode makes one request. `run` hands all of them to the engine as one batch, and tells it
            that no more will come.
    """

    def __init__(
        self, play: Play, *, most: int, max_tokens: int, deterministic: bool = False, one_turn: bool = False
    ) -> None:
        self._play, self._deterministic, self._one_turn = play, deterministic, one_turn
        self.max_requests, self.max_tokens = most, max_tokens
        self.everywhere = False
        self._to_come: int | None = None  # requests; None: unknown
        self._changed = Condition()
        self._requests: list[Request] = []  # that the engine has not been handed yet
        self._names = count()  # of requests
        self._in_engine: dict[str, Request] = {}
        self._fates: dict[str, str] = {}  # of these: "discarded", or "interrupted", which go on after their abort
        self._under_way: dict[EpisodeKey, int] = {}  # the attempt at each episode that has not ended
        self._finished: list[tuple[Episode, int]] = []  # episodes that the sink has not received yet
        self._stopped: BaseException | None = None
        self._sink: Callable[[Episode, int], None]
        self._listen: Callable[[], None]
        self._paused = False
        self._aborts: list[Abort] = []
        self.idle_seconds = 0.0  # in which the engine had nothing to do
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run_loop, name="episodes", daemon=True)
        self._playing: dict[EpisodeKey, asyncio.Task[None]] = {}

    def run(self, engine: RolloutEngine, tasks: Sequence[Task], sink: Sink | None = None) -> list[Episode]:
        """The episodes in the order of the tasks. `sink` gets each when it has ended, in the calling thread."""
        ended: dict[EpisodeKey, Episode] = {}

        def collect(episode: Episode, attempt: int) -> None:
            ended[episode.key] = episode
            if sink is not None:
                sink(episode)
            report_progress(len(ended), len(tasks))

        def listen() -> None:
            if len(ended) == len(tasks) and not self._paused:
                self.pause()

        self._sink, self._listen, self.max_requests = collect, listen, min(self.max_requests, len(tasks))
        if self._one_turn:
            self._deterministic = self.everywhere = True
            self.max_requests = self._to_come = len(tasks)
            self.max_tokens = max((len(task.prompt_ids) + task.params.max_tokens for task in tasks), default=0)
        self._start()
        self.add(tasks)
        try:
            engine.serve(self)
            while len(ended) < len(tasks):  # the last outputs are on their way to their episodes
                self._deliver(wait=True)
        finally:
            self.close()
        return [ended[task.key] for task in tasks]

    def serve(self, engine: RolloutEngine, sink: Callable[[Episode, int], None], listen: Callable[[], None]) -> None:
        """Play what `add` brings, until `pause`. An error drops all of it.

        `sink` gets each episode when it has ended, with the number of the attempt at it. `listen` is called again and
        again, and may call `add`, `drop`, `pause`. Both are called in the calling thread.
        """
        self._sink, self._listen, self._paused = sink, listen, False
        if not self._thread.is_alive():
            self._start()
        try:
            engine.serve(self)
        except BaseException:  # what the engine had is lost
            with self._changed:
                for lost in (self._in_engine, self._fates, self._aborts, self._finished):
                    lost.clear()
            self.drop([*self._under_way])
            raise

    def add(self, tasks: Sequence[Task], attempt: int = 0) -> None:
        """Begin episodes. One that was dropped may be begun anew, as another attempt."""
        with self._changed:
            self._under_way |= {task.key: attempt for task in tasks}
        with suppress(RuntimeError):  # an episode has failed the run, which the next poll tells
            self._loop.call_soon_threadsafe(self._begin, tasks, attempt)

    def drop(self, keys: Collection[EpisodeKey]) -> None:
        """End these episodes; the sink gets none of them."""
        with self._changed:
            for key in keys:
                self._under_way.pop(key, None)
            names = [name for name, request in self._in_engine.items() if _episode(request) in keys]
            self._fates |= dict.fromkeys(names, "discarded")
            self._aborts += map(Abort, names)
            self._requests = [request for request in self._requests if _episode(request) not in keys]
            self._finished = [(episode, at) for episode, at in self._finished if episode.key not in keys]
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel_episodes, keys)

    def pause(self) -> None:
        """Let `serve` return as soon as the engine has given back what it is generating."""
        with self._changed:
            self._fates = dict.fromkeys(self._in_engine, "interrupted") | self._fates
            self._aborts = [Abort(name) for name in self._in_engine]
        self._paused = True

    def close(self) -> None:
        """End all episodes, and the thread."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop is closed
                self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join()

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        since = time.monotonic()
        while True:
            self._deliver()
            self._listen()
            with self._changed:
                if (news := self._next()) is None or news or not wait:
                    break
                if not self._finished and self._stopped is None:
                    self._changed.wait(_LISTEN_SECONDS)
        self.idle_seconds += time.monotonic() - since if wait else 0.0
        return news

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: EpisodeKey, images: str = ""
    ) -> Output:
        """One turn; for the episodes. `seed` decides its random numbers, and begins with the episode's key."""
        done: asyncio.Future[Output] = self._loop.create_future()
        name = f"{'-'.join(map(str, seed))}#{next(self._names)}"
        request = Request(name, prompt_ids, params, seed, images=images)

        def finish(output: Output) -> None:
            with self._changed:
                del self._in_engine[request.request_id]
                fate = self._fates.pop(request.request_id, None)
                if fate == "discarded":
                    return
                if fate == "interrupted" and output.finish_reason == "abort":
                    self._requests.append(replace(request, so_far=output, on_finish=finish))
                    return
            with suppress(RuntimeError):  # the episodes have ended by an error, which `_deliver` raises
                self._loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(output))
            if self._to_come == 0:  # an engine that knows this need not poll again
                self._deliver()

        with self._changed:
            self._requests.append(replace(request, on_finish=finish))
            self._changed.notify()
        return await done

    # ---- inside

    def _start(self) -> None:
        self._main = self._loop.create_task(self._play_all())  # before all that is asked of the thread meanwhile
        self._thread.start()

    def _deliver(self, *, wait: bool = False) -> None:
        """Pass the episodes that have ended to the sink; `wait`: for one to end. Raises what one has failed with."""
        with self._changed:
            if wait and not self._finished and self._stopped is None:
                self._changed.wait(_LISTEN_SECONDS)
            finished, self._finished = self._finished, []
        for ended in finished:
            self._sink(*ended)
        if self._stopped is not None:
            raise self._stopped

    def _next(self) -> Sequence[Request | Abort] | None:
        aborts, self._aborts = self._aborts, []
        if self._paused:
            return aborts if aborts or self._in_engine else None
        if self._to_come == 0:
            return None
        if aborts or not self._ready:
            return aborts
        requests, self._requests = sorted(self._requests, key=lambda request: request.seed), []
        self._in_engine |= {request.request_id: request for request in requests}
        if self._to_come is not None:
            self._to_come -= len(requests)
        return requests

    @property
    def _ready(self) -> bool:
        if not self._deterministic:
            return bool(self._requests)
        episodes = min(self.max_requests, len(self._under_way))
        if self._in_engine or len(self._requests) < episodes:
            return False
        # A program that has ended its episode may have left a request behind.
        return len(self._under_way.keys() & map(_episode, self._requests)) == episodes

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main)
        except BaseException as error:
            with self._changed:
                self._stopped = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
                self._changed.notify()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _play_all(self) -> None:
        self._places = asyncio.Semaphore(self.max_requests)
        async with asyncio.TaskGroup() as self._group:
            await asyncio.Event().wait()  # until `close`

    def _begin(self, tasks: Sequence[Task], attempt: int) -> None:
        self._playing |= {task.key: self._group.create_task(self._play_one(task, attempt)) for task in tasks}

    async def _play_one(self, task: Task, attempt: int) -> None:
        async with self._places:
            episode = await self._play(task, self)
            with self._changed:
                if self._under_way.get(task.key) == attempt:  # else it was dropped a moment ago, and perhaps begun anew
                    self._finished.append((episode, attempt))
                    del self._under_way[task.key], self._playing[task.key]
                self._changed.notify()

    def _cancel_episodes(self, keys: Collection[EpisodeKey]) -> None:
        for key in keys:
            if (playing := self._playing.pop(key, None)) is not None:
                playing.cancel()


def _episode(request: Request) -> tuple[int, ...]:
    return request.seed[:3]
