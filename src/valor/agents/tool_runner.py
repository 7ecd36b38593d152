"""Runs what tools consist of: coroutines on the episodes' loop, everything else in threads, each with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from valor.errors import TrainingStopped
from valor.rewards.deadline import raise_in

_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ToolFailed(Exception):
    """A tool gave no answer in time, or raised what is the `__cause__`. The text goes on from the tool's name."""

    def __init__(self, kind: Literal["timeout", "exception"], text: str) -> None:
        super().__init__(text)
        self.kind: Literal["timeout", "exception"] = kind


class ToolRunner:
    """Runs the tools of one process.

    A blocking function gets a thread of its own, at most `max_threads` at once on behalf of an event loop; no more than
    there are cores of functions that mostly compute, and say so by an attribute `cpu_bound`, as graders do. After the
    time limit nobody waits for a function any longer: it is interrupted, which ends Python code but no single call into
    C, its place is free again, and it counts as hanging for as long as its thread lives. More than `max_hanging` of
    them end the run.
    """

    def __init__(self, max_threads: int = 256, max_hanging: int = 256) -> None:
        self.max_threads, self.max_hanging = max_threads, max_hanging
        self._hanging: set[_Thread] = set()
        self._places = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, asyncio.Semaphore]]()

    async def run(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        seconds: float,
        lock: asyncio.Lock | None = None,
    ) -> Any:
        """The result of `function(**arguments)`, which may be a coroutine function.

        Under a lock, it waits until the one before it has really ended, even if nobody waited for that one any longer;
        this is part of its time. The wait for a free thread is not. Raises ToolFailed, and TrainingStopped when too
        many functions hang.
        """
        work = None
        if lock is not None:
            try:
                async with asyncio.timeout(seconds):
                    await lock.acquire()
            except TimeoutError:
                raise _late(seconds) from None
        try:
            if inspect.iscoroutinefunction(function):
                work = asyncio.ensure_future(_ended(function, arguments))
                ended = await _wait(work, seconds, work.cancel)
            else:
                async with self._place(function):
                    thread = _Thread(function, arguments)
                    work = thread.over
                    ended = await _wait(work, seconds, lambda: self._abandon(thread))
        finally:
            if work is not None:
                work.add_done_callback(lambda _: lock and lock.release())
            elif lock is not None:
                lock.release()
        if ended.error is not None:
            raise ToolFailed("exception", f"raised {exception_text(ended.error)}") from ended.error
        return ended.value

    def _place(self, function: Callable[..., Any]) -> asyncio.Semaphore:
        if len(self._hanging) > self.max_hanging:
            name = next(iter(self._hanging)).name
            raise TrainingStopped(
                f"{len(self._hanging)} calls of tools hang, one of them of {name}(), and each holds a thread: give a "
                "time limit to what it waits for, or raise rollout.multi_turn.tool_timeout"
            )
        computes = getattr(function, "cpu_bound", False)
        places = self._places.setdefault(asyncio.get_running_loop(), {})
        return places.setdefault(computes, asyncio.Semaphore(_NUM_CORES if computes else self.max_threads))

    def _abandon(self, thread: _Thread) -> None:
        self._hanging.add(thread)
        thread.over.add_done_callback(lambda _: self._hanging.discard(thread))
        thread.interrupt()


class _Ended(NamedTuple):
    """What a function returned, or raised."""

    value: Any = None
    error: BaseException | None = None


class _Abandoned(BaseException):
    """Raised in a thread for which nobody waits any longer. Not an Exception: tools catch those."""


class _Thread:
    """A function at work in a daemon thread, which the end of the process does not wait for.

    `over` is done when the function has really ended.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.over: asyncio.Future[_Ended] = asyncio.get_running_loop().create_future()
        self._guard, self._finished, self._interrupted = threading.Lock(), False, False
        self._thread = threading.Thread(target=self._main, args=(function, arguments), name=self.name, daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        with self._guard:  # or the number of an ended thread might already be that of another
            if not self._finished and self._thread.ident is not None:
                self._interrupted = True
                raise_in(self._thread.ident, _Abandoned)

    def _main(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        ended = _Ended(error=TimeoutError())
        with suppress(_Abandoned):  # it may strike just after the function
            ended = self._call(function, arguments)
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self.over.get_loop().call_soon_threadsafe(self._settle, ended)

    def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> _Ended:
        try:
            value = function(**arguments)
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError("it returned a coroutine: define it with `async def`")
            ended = _Ended(value)
        except BaseException as error:
            ended = _Ended(error=error)
        with self._guard:
            self._finished = True
        if self._interrupted:
            for _ in range(100):  # it strikes here, if the function was faster
                pass
        return ended

    def _settle(self, ended: _Ended) -> None:
        if not self.over.done():
            self.over.set_result(ended)


def _late(seconds: float) -> ToolFailed:
    return ToolFailed("timeout", f"gave no answer within {seconds:g} s")


async def _wait(work: asyncio.Future[_Ended], seconds: float, give_up: Callable[[], object]) -> _Ended:
    try:
        await asyncio.wait({work}, timeout=seconds)
    finally:  # also when the episode is cancelled
        if not work.done():
            give_up()
    if not work.done():
        raise _late(seconds)
    return work.result()


async def _ended(function: Callable[..., Any], arguments: Mapping[str, Any]) -> _Ended:
    try:
        return _Ended(await function(**arguments))
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        return _Ended(error=error)


def exception_text(error: BaseException) -> str:
    """An exception's type, and what it says."""
    try:
        message = str(error)
    except Exception:  # a user's own exception
        message = ""
    return f"{type(error).__name__}: {message}".removesuffix(": ")
