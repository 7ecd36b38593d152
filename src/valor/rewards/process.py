"""One grader process, as the thread that feeds it sees it."""

import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, Self

import psutil

from valor.rewards.worker import HEADER, serve

_MAX_REPLY = 1 << 28  # bytes; what says it is longer is no reply
_START_SECONDS = 120.0  # a custom function may import a heavy library before the first sample
_POLL_SECONDS = 0.1
_starting = threading.Lock()


class GraderProcess:
    """Grades one sample after another.

    Every sample is sent with a random number, which its reply must carry. Graders are code of others: whatever they
    write into the pipe or leave running, nobody waits for it and no sample gets the result of another.
    """

    def __init__(self, *setup: Any) -> None:
        """`setup`: arguments of `worker.serve`."""
        # Forks from a clean server process: this one's threads, locks and sockets are not the graders'.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # with all that a process needs: it starts at once
        self._channel, theirs = socket.socketpair()
        # No daemon, as far as multiprocessing knows: that may have no processes of its own, and graders start pools.
        self._process: Any = context.Process(target=serve, args=(theirs, *setup))
        # Python would run this process's main module again in the new one: seconds and hundreds of megabytes when it
        # imports torch or ray, and an endless recursion when it is a script without a `__main__` guard.
        with _starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # no __spec__, no __file__: nothing to import
            try:
                self._process.start()
            finally:
                sys.modules["__main__"] = main
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_until_ready(self, while_waiting: Callable[[Self], None]) -> None:
        """Raises as `grade`."""
        self._receive(0, _START_SECONDS, while_waiting)

    def grade(self, sample: bytes, seconds: float, while_waiting: Callable[[Self], None]) -> Any:
        """The result of a pickled sample, or the list for several. `while_waiting` is called again and again.

        Raises TimeoutError after `seconds`, EOFError when the process has ended, ValueError for anything that is no
        reply to this sample. After each of them the process is to be ended.
        """
        number = secrets.randbits(62)
        self._channel.settimeout(seconds)
        with suppress(OSError):  # it has died or does not read
            self._channel.sendall(pickle.dumps((number, sample)))
        return self._receive(number, seconds, while_waiting)

    def _receive(self, number: int, seconds: float, while_waiting: Callable[[Self], None]) -> Any:
        received, end = b"", time.monotonic() + seconds
        while True:
            # A child of the process may keep its end of the channel open: the end of the process is watched, too.
            ready = wait([self._channel, self._process.sentinel], min(_POLL_SECONDS, max(end - time.monotonic(), 0.0)))
            if self._channel in ready:
                with suppress(OSError):
                    received += self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
            size, answered = HEADER.unpack_from(received) if len(received) >= HEADER.size else (1, number)
            reply = received[HEADER.size :]
            if size > _MAX_REPLY or answered != number or len(reply) > size:
                raise ValueError("the grader wrote into the pipe of its process")
            if len(reply) == size:
                return pickle.loads(reply)
            if self._process.sentinel in ready:
                raise EOFError
            if time.monotonic() >= end:
                raise TimeoutError
            while_waiting(self)

    def computes(self) -> bool:
        """Whether it has a processor or waits for one; True where the system does not say."""
        try:
            return psutil.Process(self._process.pid).status() == psutil.STATUS_RUNNING
        except psutil.Error:
            return True

    def end(self) -> int:
        """Kill it, if it still runs, and what its graders have started.

        Returns the exit status, or minus the signal that ended it.
        """
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in started:  # those with a process group of their own
            with suppress(psutil.Error):
                process.kill()
        self._process.kill()
        self._process.join()
        self._channel.close()
        return self._process.exitcode
