"""A time limit on Python code that works in every thread, where signals only reach the main one."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_AGAIN = 0.05  # seconds until the next try, for code that swallowed the exception
_PATIENCE = 5  # times the limit, by the clock on the wall


def run_within(seconds: float, function: Callable[..., _T], *args: object) -> _T:
    """`function(*args)` in a thread; raises TimeoutError when it has not returned after `seconds` of computing.

    Not by the clock on the wall, so that a verdict does not depend on who else uses the cores (unless the system does
    not say what a thread has computed); but five times as long by that one is the end too. The function is interrupted
    between two bytecodes, so a single long call into C (a power of huge integers) runs on. What it was changing stays
    half changed: whoever keeps state across calls has to clean up after a TimeoutError.
    """
    results: list[_T] = []
    errors: list[BaseException] = []
    spent: list[Callable[[], float]] = []
    guard, has_ended = threading.Lock(), threading.Event()

    def work() -> None:
        try:
            spent.append(_clock())
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)
        with guard:
            has_ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    end, is_late = time.monotonic() + _PATIENCE * seconds, False
    while thread.is_alive():
        left = min(seconds - (spent[0]() if spent else 0.0), end - time.monotonic())
        if is_late := is_late or left <= 0:
            with guard:  # or the number of an ended thread might already be that of another
                if not has_ended.is_set():
                    raise_in(thread.ident, SystemExit)  # of all exceptions the one that threads end with silently
        thread.join(_AGAIN if is_late else max(left, 0.001))
    if is_late:  # even if the function has caught the interrupt and made a result of it
        raise TimeoutError(f"took longer than {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _clock() -> Callable[[], float]:
    """Seconds that this thread has computed from now on, to be read by another one."""
    if not hasattr(time, "pthread_getcpuclockid"):
        began = time.monotonic()
        return lambda: time.monotonic() - began
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def spent() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:  # the thread has ended
            return 0.0

    return spent


def raise_in(thread: int | None, exception: type[BaseException]) -> None:
    """Raise an exception in a running thread, between two of its bytecodes."""
    value: Any = ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), value)
