"""One grader process, as the process that has started it sees it."""

import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

import psutil

from valor.rewards.worker import HEADER, RewardResult, WorkerSetup, serve

_MAX_REPLY = 1 << 28  # bytes; what says it is longer is no reply
_SEND_SECONDS = 5  # for a process that does not read what it is sent
_one_at_a_time = threading.Lock()  # executors start processes in threads of their own


@dataclass(eq=False)
class GradingJob:
    """A sample (or a batch of them, for a function of batches) and the future of its result."""

    sample: bytes  # pickled here: one that cannot be is nobody else's trouble
    computes: bool = False
    again: bool = False  # its process was killed from outside, and it is graded a second time
    future: Future[Any] = field(default_factory=Future)


class GraderProcess:
    """Grades one job after another; it is `ready` when it has said so, and busy while it has a `job`.

    Every job has a number of its own, drawn at random, which its reply must carry. Graders are code of others: whatever
    they write into the pipe or leave running, nobody waits for it and no sample gets the result of another.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        context = _GraderContext()
        context.set_forkserver_preload([__name__])  # with all that a process needs: it starts at once
        self.ready = False
        self.job: GradingJob | None = None
        self._number, self._since, self._received = 0, time.monotonic(), b""
        self._begun = context.RawValue("q", 0)  # memory that it shares with this process: the number of its last job
        self._channel, theirs = socket.socketpair()
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._process: Any = context.Process(target=serve, args=(setup, self._begun, theirs), daemon=True)
        self._process.start()
        theirs.close()
        # One can be read when something came, the other when it has ended (a child of its may keep the first one open).
        self.files = self._channel.fileno(), self._process.sentinel

    @property
    def seconds(self) -> float:
        """Since it was started or has got its job."""
        return time.monotonic() - self._since

    @property
    def has_begun(self) -> bool:
        """Whether its grader has been called for its job."""
        return self.job is not None and self._begun.value == self._number

    def send(self, job: GradingJob) -> None:
        self.job, self._number, self._since = job, secrets.randbits(62), time.monotonic()
        with suppress(OSError):  # it has died or does not read; `receive` or the time limit will say so
            self._channel.sendall(pickle.dumps((self._number, job.sample)))

    def receive(self) -> tuple[RewardResult | list[RewardResult] | None] | None:
        """Its reply: the job's result, or None when it has just become ready. None while the reply is incomplete.

        To be called when one of `files` can be read. Raises EOFError when it has ended, ValueError for anything that is
        no reply to its job.
        """
        with suppress(OSError):
            self._received += self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
        size, number = HEADER.unpack_from(self._received) if len(self._received) >= HEADER.size else (1, self._number)
        reply = self._received[HEADER.size :]
        if size > _MAX_REPLY or number != self._number or len(reply) > size:
            raise ValueError("the grader wrote into the pipe of its process")
        if len(reply) < size:
            if not self._process.is_alive():
                raise EOFError
            return None
        self._received = b""
        return (pickle.loads(reply),)

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


class _GraderProcess(ForkServerProcess):
    """A process that does not import the parent's main module.

    Python would run it again in every child: seconds and hundreds of megabytes when it imports torch or ray, and an
    endless recursion when it is a script without a `__main__` guard. Graders are found by CustomFunction instead.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _one_at_a_time:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # no __spec__, no __file__: nothing to import
            try:
                return ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]
            finally:
                sys.modules["__main__"] = main


class _GraderContext(ForkServerContext):
    """Forks from a clean server process: the parent's threads, locks and sockets are not the graders'."""

    Process = _GraderProcess  # type: ignore[assignment]
