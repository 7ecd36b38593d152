"""Grades samples in processes: a grader that fails, hangs or dies costs its own sample, and nothing else.

Each process has a thread that sends it one sample after another, kills it when it takes too long and starts the next.
Threads are added while graders wait rather than compute.
"""

from __future__ import annotations

import atexit
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from valor.machine import available_cores
from valor.rewards import registry
from valor.rewards.custom import CustomFunction
from valor.rewards.process import GraderProcess
from valor.rewards.worker import RewardResult, Sample, gather

_NUM_WORKERS, _MOST_WORKERS = 8, 64  # at first, and when graders wait or hang
_NUM_CORES = available_cores()
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)  # such as a batch system's to all processes of a job
_MAX_STARTS = 3  # processes in a row that die before they can grade: waiting samples are given up
_CODE_SHARE = 0.8  # of the timeout for running code: a solution without an end is wrong, it is no error
_CLOSED = "graders were shut down before this sample's turn"


class _Job:
    """Samples that one call grades: one, or a batch for a function of batches. `computes`: rather than waits."""

    def __init__(self, samples: Sequence[Sample], computes: bool) -> None:
        self.samples, self.computes = samples, computes
        self.futures: list[Future[RewardResult]] = [Future() for _ in samples]
        for future in self.futures:
            future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def finish(self, results: list[RewardResult] | RewardResult) -> None:
        """One result is an error of all samples."""
        results = results if isinstance(results, list) else [results] * len(self.futures)
        for future, result in zip(self.futures, results, strict=True):
            future.set_result(result)


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
        self._changed = threading.Condition()  # guards what follows
        self._closed = False
        self._pending: dict[bool, deque[_Job]] = {False: deque(), True: deque()}  # by whether they mostly compute
        self._num_computing = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def one_by_one(self) -> bool:
        """Whether a sample can be graded before the others are there."""
        return self.custom is None or not self.custom.whole_batch

    @property
    def grades_everything(self) -> bool:
        """Whether samples of any data source can be graded, by a function of the user's own."""
        return self.custom is not None

    @property
    def needed_columns(self) -> frozenset[str]:
        """The rows' further columns without which a function of the user's own cannot be called."""
        return getattr(self._function, "needs", frozenset())

    @property
    def reads_truth(self) -> bool:
        """Whether a function of the user's own takes ground truths by their name."""
        return getattr(self._function, "reads_truth", True)

    def check(self, data_sources: Iterable[str]) -> None:
        """Before a run: raise a UserError that names the data sources nobody can grade."""
        if not self.grades_everything:
            registry.require_graders(data_sources)

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Grade all samples; results in their order."""
        return gather(self.submit_all(samples))

    def submit(self, sample: Sample) -> Future[RewardResult]:
        """Grade one sample in the background."""
        return self.submit_all([sample])[0]

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        """Grade samples in the background. The futures never fail: errors are in their results.

        A custom function of whole batches gets them in one call, within one `timeout`.
        """
        if self.one_by_one:
            jobs = [_Job([sample], self._computes(sample)) for sample in samples]
        else:
            jobs = [_Job(samples, False)] if samples else []
        with self._changed:
            if self._closed:
                raise RuntimeError("this RewardExecutor is closed")
            for job in jobs:
                self._pending[job.computes].append(job)
            while jobs and len(self._threads) < self.num_workers:
                self._start_thread()
            self._changed.notify(len(jobs))
        return [future for job in jobs for future in job.futures]

    def close(self) -> None:
        """End the processes. Samples that were not graded by then get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._give_up(self._error(_CLOSED))
        atexit.unregister(self.close)

    def _computes(self, sample: Sample) -> bool:
        return getattr(self._function or registry.find_grader(sample.data_source), "cpu_bound", False)

    def _start_thread(self) -> None:
        if not self._threads:
            atexit.register(self.close)
        self._threads.append(threading.Thread(target=self._work, daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        """What a thread does: have jobs done in a process, and in the next one when it has died, until the end."""
        process: GraderProcess | None = None
        while job := self._next_job():
            result, process = self._graded(job, process)
            job.finish(result)
            with self._changed:
                self._num_computing -= job.computes
                self._changed.notify()
        if process is not None:
            process.end()

    def _next_job(self) -> _Job | None:
        """Waits for a job; None when the executor has been closed."""

        def can_compute() -> bool:
            return bool(self._pending[True]) and self._num_computing < _NUM_CORES

        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._pending[False] or can_compute())
            if self._closed:
                return None
            job = self._pending[can_compute()].popleft()
            self._num_computing += job.computes
            return job

    def _graded(
        self, job: _Job, process: GraderProcess | None
    ) -> tuple[RewardResult | list[RewardResult], GraderProcess | None]:
        """The job's results, and the process if another job can be done in it."""
        try:
            pickled = pickle.dumps(job.samples[0] if self.one_by_one else list(job.samples))
        except Exception as error:
            return self._error(f"the sample cannot be sent to a grader: {error}"), process
        was_killed = False
        while True:
            process = process if process and process.is_alive else self._started()
            if process is None:
                error = self._error("grader processes die before they can grade it", "crash")
                self._give_up(error)
                return error, None
            try:
                result = process.grade(pickled, self.timeout, self._while_waiting)
                is_full = isinstance(result, RewardResult) and result.kind == "memory"
                if is_full:  # what the grader has kept would make later samples fail
                    process.end()
                return result, None if is_full else process
            except TimeoutError:
                process.end()
                reason = f"no score within {self.timeout:g} s (reward.timeout)"
                return self._error(reason, "timeout", self.timeout), None
            except EOFError:
                status = process.end()
                if self._closed:
                    return self._error(_CLOSED), None
                if -status not in _FROM_OUTSIDE or was_killed:  # that is not the sample's fault, once
                    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
                    return self._error(f"the grader ended its process ({how})", "crash"), None
                was_killed = True
            except Exception as error:
                process.end()
                return self._error(str(error), "crash"), None

    def _started(self) -> GraderProcess | None:
        """A process that is ready; None when none gets so far."""
        for _ in range(_MAX_STARTS):
            process = GraderProcess(self.custom, self.error_score, self.code_seconds, self.memory_mb)
            try:
                process.wait_until_ready(self._while_starting)
                return process
            except (EOFError, TimeoutError, ValueError):
                process.end()
        return None

    def _while_starting(self, process: GraderProcess) -> None:
        """Ends the wait when the executor is closed."""
        if self._closed:
            raise EOFError

    def _while_waiting(self, process: GraderProcess) -> None:
        """Adds a thread when the process waits, and so do samples; not while one starts, or slow imports would."""
        self._while_starting(process)
        with self._changed:
            if self._pending[False] and len(self._threads) < self.most_workers and not process.computes():
                self._start_thread()

    def _error(self, reason: str, kind: str = "exception", seconds: float = 0.0) -> RewardResult:
        return RewardResult(self.error_score, {}, reason, seconds, kind)

    def _give_up(self, error: RewardResult) -> None:
        """An error for all samples that wait."""
        with self._changed:
            jobs = [*self._pending[False], *self._pending[True]]
            for pending in self._pending.values():
                pending.clear()
        for job in jobs:
            job.finish(error)
