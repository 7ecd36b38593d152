"""Runs the code of tools and environments with a time limit: coroutines on the event loop, all else in threads."""

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from valor.agents.episode import EpisodeFailed
from valor.errors import UserError
from valor.rewards.deadline import run_within

_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_CORES = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

Outcome = tuple[Any, BaseException | None]
"""What a function returned, or what it raised."""


class ToolFailed(EpisodeFailed):
    """A call gave no answer in time, or raised its `__cause__`."""

    def __init__(self, kind: Literal["timeout", "exception"], text: str) -> None:
        super().__init__(text)
        self.kind: Literal["timeout", "exception"] = kind


async def run_tool(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    seconds: float,
    name: str,
    lock: asyncio.Lock | None = None,
) -> Any:
    """The result of `function(**arguments)`, or of the coroutine function. `name` stands for it in errors.

    A blocking function gets a thread of its own; of functions with a true attribute `cpu_bound`, an event loop runs as
    many at once as there are cores, and waiting for one is not part of the time. A function that exceeds its time is
    interrupted, which ends Python code but no single call into C. Under a `lock`, a call first waits, at most
    `seconds`, until the one before has really ended. Raises ToolFailed; a UserError of the function passes.
    """
    if lock is not None:
        try:
            await asyncio.wait_for(lock.acquire(), seconds)
        except TimeoutError:
            raise _late(name, seconds) from None
    call: asyncio.Future[Outcome] | None = None
    cores = _CORES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_NUM_CORES))
    try:
        async with cores if getattr(function, "cpu_bound", False) else nullcontext():
            start = _in_task if inspect.iscoroutinefunction(function) else partial(_in_thread, seconds)
            call = start(partial(function, **arguments))
            value, error = await _outcome(call, seconds, name)
    finally:
        if lock is not None:
            lock.release() if call is None else call.add_done_callback(lambda _: lock.release())
    if error is not None and not isinstance(error, UserError):
        raise ToolFailed("exception", f"{name} raised {exception_text(error)}") from error
    if error is not None:
        raise error
    return value


async def _outcome(call: asyncio.Future[Outcome], seconds: float, name: str) -> Outcome:
    try:
        await asyncio.wait({call}, timeout=seconds)
    finally:  # also when the episode is cancelled
        if not call.done() and isinstance(call, asyncio.Task):
            call.cancel()
    if not call.done():
        raise _late(name, seconds)
    return call.result()


def _in_task(function: Callable[[], Any]) -> asyncio.Future[Outcome]:
    async def work() -> Outcome:
        try:
            return await function(), None
        except BaseException as error:
            return None, error

    return asyncio.ensure_future(work())


def _in_thread(seconds: float, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
    """The future is done when the function has really ended. The thread is a daemon: a process ends without it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Outcome] = loop.create_future()

    def work() -> None:
        try:
            value = run_within(seconds + 1, function)  # later than the caller gives up
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError("it returned a coroutine: define it with `async def`")
            outcome = value, None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set_result, outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return ended


def _late(name: str, seconds: float) -> ToolFailed:
    return ToolFailed("timeout", f"{name} gave no answer within {seconds:g} s")


def exception_text(error: BaseException) -> str:
    """An exception's type and message."""
    try:
        message = str(error)
    except Exception:  # a user's own exception
        message = ""
    return f"{type(error).__name__}: {message}".removesuffix(": ")
