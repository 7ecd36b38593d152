"""A time limit on Python code that works in every thread, where signals only reach the main one."""

import _thread
import ctypes
import queue
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_AGAIN = 0.05  # seconds until the next try, for code that swallowed the exception
_PATIENCE = 5  # times the limit, by the clock on the wall


class _Interrupt(BaseException):
    """Raised in the running code from outside. Not an Exception: libraries catch those."""


def run_within(seconds: float, function: Callable[..., _T], *args: object) -> _T:
    """`function(*args)`; raises TimeoutError when it has not returned after `seconds` of this thread's computing.

    Not by the clock on the wall, so that a verdict does not depend on who else uses the cores (unless the system does
    not say what a thread has computed); but five times as long by that one is the end too. The function is interrupted
    between two bytecodes, so a single long call into C (a power of huge integers) runs on. What it was changing stays
    half changed: whoever keeps state across calls has to clean up after a TimeoutError.
    """
    # Queues, because their put and get cannot be torn apart by the interrupt.
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    sent: list[bool] = []
    thread = _thread.get_ident()
    used, end = _clock(thread), time.monotonic() + _PATIENCE * seconds
    limit = used() + seconds

    def watch() -> None:
        while True:
            left = min(limit - used(), end - time.monotonic())
            try:
                done.get(timeout=max(left, _AGAIN if sent else 0.001))
                break
            except queue.Empty:
                if used() >= limit or time.monotonic() >= end:
                    sent.append(True)
                    raise_in(thread, _Interrupt)
        for _ in range(2):  # `finish` may be called twice
            ended.put(None)

    def finish() -> None:
        done.put(None)
        ended.get()
        if sent:  # and has not struck yet; without one, CPython 3.11 is left with a flag on which a profiler loops
            raise_in(thread, None)

    _thread.start_new_thread(watch, ())
    try:
        try:
            result = function(*args)
        finally:
            finish()
    except _Interrupt:
        finish()  # it may have struck inside the first one; the watcher is not left behind
    else:
        if not sent:  # otherwise the function has caught the interrupt and made a result of it
            return result
    raise TimeoutError(f"took longer than {seconds:g} s")


def _clock(thread: int) -> Callable[[], float]:
    """Seconds that a thread has computed."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def raise_in(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in a running thread, between two of its bytecodes. None: take back one that has not struck."""
    value = ctypes.py_object(exception) if exception else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)
