"""Grades samples in processes: a grader that fails, hangs or dies costs its own sample, and nothing else.

A process that hangs is killed and replaced, as is one that has died. More are started while graders wait rather than
compute.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from valor.rewards import registry
from valor.rewards.custom import CustomFunction
from valor.rewards.process import GraderProcess, GradingJob
from valor.rewards.worker import OUT_OF_MEMORY, RewardResult, Sample, WorkerSetup, gather

_NUM_WORKERS, _MOST_WORKERS = 8, 64  # at first, and when graders wait or hang
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_POLL_SECONDS = 0.1
_TOGETHER_SECONDS = 0.2  # for which a single sample waits for others: each start disturbs who generates beside it
_IDLE_POLLS = 2  # in a row, at which most processes waited, and so did samples: more processes are started
_MAX_VAIN = 3  # processes in a row that die before they have graded anything: waiting samples are given up
_START_SECONDS = 120.0  # a custom function may import a heavy library before the first sample
_CODE_SHARE = 0.8  # of the timeout for running code: a solution without an end is wrong, it is no error


class RewardExecutor:
    """Grader processes, started as samples come.

    `timeout` is in seconds and per sample; `num_workers` None means 8, and up to 64 while graders wait rather than
    compute (Linux). Of graders that mostly compute, and say so by an attribute `cpu_bound`, no more run at once than
    there are cores: the neighbours of a sample do not eat its time. `error_score` is the score of a sample whose
    grader raised, hung or died, or (on Linux) found no more memory because its process holds `memory_mb` megabytes.
    With `custom`, that function grades every sample, otherwise the registry does. Raises UserError when
    the custom function cannot be loaded.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        error_score: float = 0.0,
        custom: CustomFunction | None = None,
        memory_mb: int | None = None,
    ) -> None:
        # A mistake in the file is the user's to see now, not a thousand errors later.
        self._function: Callable[..., Any] | None = custom.load() if custom else None
        self.custom, self.timeout, self.error_score = custom, timeout, error_score
        self.num_workers, self.memory_mb = num_workers or _NUM_WORKERS, memory_mb
        self.most_workers = num_workers or _MOST_WORKERS
        self.code_seconds = _CODE_SHARE * timeout
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._come: list[GradingJob] = []  # for the thread to take
        self._closed = False
        # The thread starts, feeds and ends the processes: what is below here, and all private methods from `_take` on,
        # are its own.
        self._processes: list[GraderProcess] = []
        self._limit = self.num_workers  # on the number of processes, for now
        self._pending: dict[bool, deque[GradingJob]] = {False: deque(), True: deque()}  # by whether they mostly compute
        self._idle_polls = self._num_vain = 0

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    @property
    def one_by_one(self) -> bool:
        """Whether a sample can be graded before the others are there."""
        return self.custom is None or not self.custom.whole_batch

    @property
    def grades_everything(self) -> bool:
        """Whether samples of any data source can be graded, by a function of the user's own."""
        return self.custom is not None

    def check(self, data_sources: Iterable[str]) -> None:
        """Before a run: raise a UserError that names the data sources nobody can grade."""
        if not self.grades_everything:
            registry.require_graders(data_sources)

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Grade all samples; results in their order."""
        return gather(self.submit_all(samples))

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        """Grade samples in the background. The futures never fail: errors are in their results.

        A custom function of whole batches gets them in one call, within one `timeout`.
        """
        if self.one_by_one or not samples:
            return self._submit(samples)
        parts: list[Future[RewardResult]] = [Future() for _ in samples]

        def hand_out(whole: Future[Any]) -> None:
            result = whole.result()
            for i, part in enumerate(parts):  # one result: an error, which is everybody's
                part.set_result(result if isinstance(result, RewardResult) else result[i])

        self._submit([list(samples)])[0].add_done_callback(hand_out)
        return parts

    def submit(self, sample: Sample) -> Future[RewardResult]:
        """Grade a sample that others follow: with those that come within a moment, or at the next `submit_all`."""
        return self._submit([sample], _TOGETHER_SECONDS)[0]

    def close(self) -> None:
        """End the processes. Samples that were not graded by then get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join()
            self._loop.close()
            atexit.unregister(self.close)

    def _submit(self, samples: Sequence[Sample | list[Sample]], delay: float = 0.0) -> list[Future[Any]]:
        jobs: list[GradingJob] = []
        for sample in samples:
            try:
                jobs.append(GradingJob(pickle.dumps(sample), self._is_computed(sample)))
            except Exception as error:
                jobs.append(GradingJob(b""))
                jobs[-1].future.set_result(self._error(f"the sample cannot be sent to a grader: {error}"))
        waiting = [job for job in jobs if job.sample]
        for job in waiting:
            job.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._lock:
            if self._closed:
                raise RuntimeError("this RewardExecutor is closed")
            if self._thread is None and waiting:
                self._start()
            first = not self._come
            self._come += waiting
            if self._come and not delay:
                self._loop.call_soon_threadsafe(self._take)
            elif self._come and first:
                self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._take)
        return [job.future for job in jobs]

    def _start(self) -> None:
        self._setup = WorkerSetup(self.custom, self.error_score, self.code_seconds, self.memory_mb)
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._poll)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _is_computed(self, sample: Sample | list[Sample]) -> bool:
        if isinstance(sample, list):
            return False
        return bool(getattr(self._function or registry.find_grader(sample.data_source), "cpu_bound", False))

    def _error(self, reason: str, kind: str = "exception", seconds: float = 0.0) -> RewardResult:
        return RewardResult(self.error_score, {}, reason, seconds, kind)

    def _take(self) -> None:
        with self._lock:
            jobs, self._come = self._come, []
        for job in jobs:
            self._pending[job.computes].append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give pending samples to processes that have none; start as many as there is work for."""
        free = [process for process in self._processes if process.ready and not process.job]
        while free and ((computes := bool(self._pending[True]) and self._cores_left() > 0) or self._pending[False]):
            free.pop().send(self._pending[computes].popleft())
        num_wanted = len(self._pending[False]) + min(len(self._pending[True]), self._cores_left())
        if num_wanted > sum(not process.ready for process in self._processes) and self.num_processes < self._limit:
            process = GraderProcess(self._setup)
            self._processes.append(process)
            for file in process.files:
                self._loop.add_reader(file, self._receive, process)
            self._loop.call_soon(self._dispatch)  # one at a time: others may be free by then

    def _cores_left(self) -> int:
        return _NUM_CORES - sum(process.job.computes for process in self._processes if process.job)

    def _receive(self, process: GraderProcess) -> None:
        """Something came from a process: it is ready, a result, nonsense, or its end."""
        try:
            reply = process.receive()
        except EOFError:
            self._drop(process)
        except Exception as error:
            self._drop(process, self._error(str(error), "crash"))
        else:
            if reply is None:
                return
            job, process.job, process.ready = process.job, None, True
            if job:
                self._num_vain = 0
                job.future.set_result(reply[0])
        self._dispatch()

    def _poll(self) -> None:
        """End processes that take too long, let more be started while the others wait."""
        self._loop.call_later(_POLL_SECONDS, self._poll)
        for process in list(self._processes):
            if process.job and process.seconds > self.timeout:
                reason = f"no score within {self.timeout:g} s (reward.timeout)"
                self._drop(process, self._error(reason, "timeout", self.timeout))
            elif not process.ready and process.seconds > _START_SECONDS:
                self._drop(process)
        size = len(self._processes)
        wait = bool(self._pending[False]) and 2 * sum(process.computes() for process in self._processes) < size
        self._idle_polls = self._idle_polls + 1 if wait and size == self._limit else 0
        if self._idle_polls >= _IDLE_POLLS:
            self._limit = min(2 * self._limit, self.most_workers)
        self._dispatch()

    def _drop(self, process: GraderProcess, error: RewardResult | None = None) -> None:
        """End a process: its sample gets the error (None: it has ended by itself, how will be seen)."""
        self._processes.remove(process)
        job, status = process.job, self._end_process(process)
        if job and not error and status == -signal.SIGKILL and not job.again:
            job.again = True  # not the sample's fault, unless it happens twice
            self._pending[job.computes].appendleft(job)
            return
        if job and (error or process.has_begun):
            job.future.set_result(error or self._death(status))
            return
        if job:
            self._pending[job.computes].appendleft(job)
        self._num_vain += bool(job) or not process.ready
        if self._num_vain >= _MAX_VAIN:
            self._give_up("grader processes die before they can grade it", "crash")

    def _end_process(self, process: GraderProcess) -> int:
        for file in process.files:
            self._loop.remove_reader(file)
        return process.end()

    def _death(self, status: int) -> RewardResult:
        if status == OUT_OF_MEMORY:
            return self._error(f"needed more than {self.memory_mb} MB (reward.memory_limit_mb)", "memory")
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return self._error(f"the grader ended its process ({how})", "crash")

    def _give_up(self, reason: str, kind: str = "exception") -> None:
        """An error for all samples that wait."""
        self._num_vain = 0
        for jobs in self._pending.values():
            while jobs:
                jobs.popleft().future.set_result(self._error(reason, kind))

    def _end(self) -> None:
        for process in self._processes:
            self._end_process(process)
            if process.job:
                self._pending[process.job.computes].appendleft(process.job)
        self._processes.clear()
        for job in self._come:
            self._pending[job.computes].append(job)
        self._give_up("graders were shut down before this sample's turn")
        self._loop.stop()
