"""Runs the code of tools and environments with a time limit: coroutines on the event loop, all else in threads."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from valor.agents.episode import EpisodeFailed
from valor.errors import UserError
from valor.machine import available_cores
from valor.rewards.deadline import raise_in

_log = logging.getLogger(__name__)
_NUM_CORES = available_cores()

_CORES = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

Outcome = tuple[Any, BaseException | None]
"""What a function returned, or what it raised."""
Call = asyncio.Future[Outcome]


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
    call: Call | None = None
    cores = _CORES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_NUM_CORES))
    try:
        async with cores if getattr(function, "cpu_bound", False) else nullcontext():
            start = _in_task if inspect.iscoroutinefunction(function) else _in_thread
            call, give_up = start(partial(function, **arguments))
            value, error = await _outcome(call, give_up, seconds, name)
    finally:
        if lock is not None and call is None:
            lock.release()
        if lock is not None and call is not None:
            call.add_done_callback(lambda _: lock.release())
    if error is not None and not isinstance(error, UserError):
        raise ToolFailed("exception", f"{name} raised {exception_text(error)}") from error
    if error is not None:
        raise error
    return value


async def _outcome(call: Call, give_up: Callable[[], object], seconds: float, name: str) -> Outcome:
    try:
        await asyncio.wait({call}, timeout=seconds)
    finally:  # also when the episode is cancelled
        if not call.done():
            give_up()
    if not call.done():
        raise _late(name, seconds)
    return call.result()


def _in_task(function: Callable[[], Any]) -> tuple[Call, Callable[[], object]]:
    """The call of a coroutine function, and what cancels it."""

    async def work() -> Outcome:
        try:
            return await function(), None
        except BaseException as error:
            return None, error

    task = asyncio.ensure_future(work())
    return task, task.cancel


class _Interrupt(BaseException):
    """Raised in a thread whose result nobody awaits. Not an Exception: tools catch those."""


def _in_thread(function: Callable[[], Any]) -> tuple[Call, Callable[[], object]]:
    """The call of a blocking function, done when it has really ended, and what interrupts it.

    The thread is a daemon: a process ends without it.
    """
    loop, at_work, guard = asyncio.get_running_loop(), [True], threading.Lock()
    call: Call = loop.create_future()

    def work() -> None:
        outcome: Outcome = None, TimeoutError()
        with suppress(_Interrupt):  # it may strike behind the function
            try:
                value = function()
                if inspect.iscoroutine(value):
                    value.close()
                    raise TypeError("it returned a coroutine: define it with `async def`")
                if inspect.isgenerator(value) or inspect.isasyncgen(value):
                    raise TypeError("it has a `yield`: return the answer")
                outcome = value, None
            except BaseException as error:
                outcome = None, error
            with guard:
                at_work.clear()
            for _ in range(100):  # where an interrupt strikes that was sent before
                pass
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call.set_result, outcome)

    thread = threading.Thread(target=work, name="tool", daemon=True)

    def interrupt() -> None:
        with guard:  # else the number of an ended thread may already be that of another
            if at_work and thread.ident is not None:
                raise_in(thread.ident, _Interrupt)

    thread.start()
    return call, interrupt


def _late(name: str, seconds: float) -> ToolFailed:
    return ToolFailed("timeout", f"{name} gave no answer within {seconds:g} s")


async def release(work: Awaitable[Any]) -> None:
    """Wait for the end of a tool or environment; its failure is logged."""
    try:
        await work
    except ToolFailed as failure:
        _log.warning("%s", failure)


def exception_text(error: BaseException) -> str:
    """An exception's type and message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
