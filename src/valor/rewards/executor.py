"""Grades samples in processes: a grader that fails, hangs or dies costs its own sample, and nothing else.

Samples travel in chunks, so that thousands of cheap gradings are fast; those behind a slow one go to other processes,
and more processes are started while graders wait rather than compute. When a process has to be killed or has died, the
sample it was grading gets the error, and the others are graded again.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pebble import ProcessExpired

from valor.rewards import registry
from valor.rewards.code import CodeSettings
from valor.rewards.custom import CustomFunction, FunctionSource
from valor.rewards.pool import GraderPool, PoolBrokenError
from valor.rewards.worker import CHUNK_SECONDS, OUT_OF_MEMORY, RewardResult, Sample, WorkerSetup
from valor.tracking.progress import report_progress

_NUM_WORKERS, _MOST_WORKERS = 8, 64  # at first, and when graders wait or hang
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_MAX_CHUNK = 64
_LOOK_SECONDS = 0.1  # between two looks at the chunks under way
_IDLE_LOOKS = 2  # in a row, at which most processes waited, and so did samples: more processes are started
_MAX_ATTEMPTS = 3  # of a sample whose process died before any grader was called
_START_SECONDS = 120.0  # a custom function may import a heavy library before the first sample
_CODE_SHARE = 0.8  # of the timeout for running code: a solution without an end is wrong, it is no error
_SPARE_SECONDS = 20.0  # beyond a sample's timeout without any result: the pool has come to a stop


@dataclass(eq=False)
class _Job:
    sample: bytes  # pickled: one that cannot be must not take the pool's messages with it
    computes: bool = False
    future: Future[Any] = field(default_factory=Future)
    attempts: int = 0


@dataclass(eq=False)
class _Chunk:
    pool: GraderPool
    slot: int
    jobs: list[_Job]
    place: int = -1  # the job that was under way at the last looks, first seen at `since`
    since: float = 0.0


_Finished = list[tuple[_Job, RewardResult]]


class RewardExecutor:
    """Grader processes that start with the first sample.

    `timeout` is in seconds and per sample; `num_workers` None means 8, and up to 64 while graders wait rather than
    compute (Linux). Of graders that mostly compute, and say so by an attribute `cpu_bound`, no more run at once than
    there are cores: the neighbours of a sample do not eat its time. `error_score` is the score of a sample whose
    grader raised, hung or died, or (on Linux) found no more memory because its process holds `memory_mb` megabytes.
    With `custom`, that function grades every sample, otherwise the registry does; `code` says where it runs code, with
    the requests of all processes together. Raises UserError when the custom function cannot be loaded.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        error_score: float = 0.0,
        custom: CustomFunction | None = None,
        code: CodeSettings = CodeSettings(),  # noqa: B008
        memory_mb: int | None = None,
    ) -> None:
        self._function: Callable[..., Any] | None = None
        if custom is not None:
            # A mistake in the file is the user's to see now, not a thousand errors later.
            self._function = custom.load()
        self.custom, self.timeout, self.error_score = custom, timeout, error_score
        self.num_workers, self.memory_mb = num_workers or _NUM_WORKERS, memory_mb
        # A server that runs code bears so many requests and no more, whoever waits for them.
        self.most_workers = num_workers or (_MOST_WORKERS if code.sandbox_fusion is None else _NUM_WORKERS)
        requests = max(1, code.max_concurrent // self.num_workers)
        self.code = replace(code, seconds=_CODE_SHARE * timeout, max_concurrent=requests)
        self._lock = threading.RLock()
        self._setup: WorkerSetup | None = None
        self._pools: list[GraderPool] = []
        self._pending: deque[_Job] = deque()
        self._pending_computing: deque[_Job] = deque()  # those that mostly compute
        self._idle_looks = 0
        self._growth: threading.Thread | None = None  # while more processes start
        self._endings: list[threading.Thread] = []  # of pools that were given up
        self._running: set[_Chunk] = set()
        self._num_done = 0
        self._closed = False

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_processes(self) -> int:
        """How many there are by now."""
        return sum(pool.num_slots for pool in self._pools)

    def submit(self, sample: Sample) -> Future[RewardResult]:
        """Grade a sample in the background. The future never fails: errors are in its result."""
        return self.submit_all([sample])[0]

    def gather(self, futures: Sequence[Future[RewardResult]]) -> list[RewardResult]:
        """The results, in order; waits for them and reports progress."""
        results: list[RewardResult] = []
        seen, since = self._num_done, time.monotonic()
        next_look = since + _LOOK_SECONDS
        while len(results) < len(futures):
            with suppress(TimeoutError):
                results.append(futures[len(results)].result(max(next_look - time.monotonic(), 0.0)))
                report_progress(len(results), len(futures))
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + _LOOK_SECONDS
            if self._num_done != seen:
                seen, since = self._num_done, now
            # A process that is killed while it holds the pool's channel leaves it locked for the others.
            stuck = now - since > self._patience()
            self._settle(self._replace_pools() if stuck else self._look())
            since = now if stuck else since
        return results

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Grade all samples; results in their order."""
        return self.gather(self.submit_all(samples))

    def close(self) -> None:
        """End the processes. Samples that were not graded by then get an error."""
        with self._lock:
            self._closed = True
            pools, self._pools, growth = self._pools, [], self._growth
            jobs = [job for chunk in self._running for job in chunk.jobs]
            jobs += [*self._pending, *self._pending_computing]
            self._running.clear()
            self._pending.clear()
            self._pending_computing.clear()
        if growth is not None:
            growth.join()
        for pool in pools:
            pool.end()
        for ending in self._endings:
            ending.join()
        self._settle([(job, self._error("graders were shut down before this sample's turn")) for job in jobs])

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        """`submit` for many: a custom function of whole batches gets them in one call, within one `timeout`."""
        if self.custom is None or not self.custom.whole_batch or not samples:
            return self._enqueue(samples)
        parts: list[Future[RewardResult]] = [Future() for _ in samples]

        def hand_out(whole: Future[Any]) -> None:
            result = whole.result()
            for i, part in enumerate(parts):  # one result: an error, which is everybody's
                part.set_result(result if isinstance(result, RewardResult) else result[i])

        self._enqueue([list(samples)])[0].add_done_callback(hand_out)
        return parts

    def _enqueue(self, samples: Sequence[Sample | list[Sample]]) -> list[Future[Any]]:
        jobs: list[_Job] = []
        finished: _Finished = []
        for sample in samples:
            try:
                jobs.append(_Job(pickle.dumps(sample), self._computes(sample)))
            except Exception as error:
                jobs.append(_Job(b""))
                finished.append((jobs[-1], self._error(f"the sample cannot be sent to a grader: {error}")))
            jobs[-1].future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._lock:
            if self._closed:
                raise RuntimeError("this RewardExecutor is closed")
            self._setup = self._setup or self._describe_graders()
            for job in jobs:
                if job.sample:
                    (self._pending_computing if job.computes else self._pending).append(job)
            finished += self._dispatch()
        self._settle(finished)
        return [job.future for job in jobs]

    def _describe_graders(self) -> WorkerSetup:
        sources = tuple((p, FunctionSource.of(f)) for p, f in registry.registered_graders().items())
        return WorkerSetup(self.custom, sources, self.error_score, self.code, self.memory_mb)

    def _computes(self, sample: Sample | list[Sample]) -> bool:
        if self.code.sandbox_fusion is not None or isinstance(sample, list):
            return False
        return getattr(self._function or registry.find_grader(sample.data_source), "cpu_bound", False)

    def _dispatch(self) -> _Finished:
        """Give pending samples to free slots; under the lock. Returns samples that were given up."""
        given_up: _Finished = []
        while (computes := self._may_compute()) or self._pending:
            assert self._setup is not None
            self._pools = self._pools or [GraderPool(self._setup, self.num_workers, self.timeout)]
            pool = next((pool for pool in self._pools if pool.free_slots), None)
            if pool is None:
                break
            fair_share = -(-len(self._pending) // self.num_processes)
            pending, count = (self._pending_computing, 1) if computes else (self._pending, min(fair_share, _MAX_CHUNK))
            jobs = [pending.popleft() for _ in range(count)]
            chunk = _Chunk(pool, pool.free_slots.pop(), jobs)
            self._running.add(chunk)
            try:
                pool.start(chunk.slot, [job.sample for job in jobs], partial(self._chunk_done, chunk))
            except PoolBrokenError:
                given_up += self._drop(pool)
        return given_up

    def _may_compute(self) -> bool:
        """Whether a sample that mostly computes waits, and a core is left for it."""
        return bool(self._pending_computing) and sum(c.jobs[0].computes for c in self._running) < _NUM_CORES

    def _look(self) -> _Finished:
        """Give samples that wait behind a slow one to other processes; start more when all are busy with waiting."""
        with self._lock:
            now = time.monotonic()
            for chunk in self._running:
                place = chunk.pool.under_way(chunk.slot)
                if place is None:
                    continue
                if place != chunk.place:
                    chunk.place, chunk.since = place, now
                elif now - chunk.since > 1.5 * CHUNK_SECONDS:  # its time is up: the process begins no further sample
                    self._wait_again(chunk.jobs[place + 1 :])
                    del chunk.jobs[place + 1 :]
            given_up = self._dispatch()
            size = self.num_processes
            wait = bool(self._pending) and 2 * sum(pool.num_computing() for pool in self._pools) < size
            self._idle_looks = self._idle_looks + 1 if wait else 0
            if self._idle_looks >= _IDLE_LOOKS and size < self.most_workers and self._growth is None:
                num_more = min(size, self.most_workers - size)
                self._growth = threading.Thread(target=self._grow, args=(num_more,), daemon=True)
                self._growth.start()
        return given_up

    def _grow(self, num_workers: int) -> None:
        """Start more processes: in a thread of its own, as that takes a while."""
        assert self._setup is not None
        pool = GraderPool(self._setup, num_workers, self.timeout)
        pool.start_processes()
        with self._lock:
            self._growth = None
            if not self._closed:
                self._pools.append(pool)
            given_up = self._dispatch()
        if self._closed:
            pool.end()
        self._settle(given_up)

    def _chunk_done(self, chunk: _Chunk, done: Future[list[RewardResult]]) -> None:
        """Runs in the pool's threads when a chunk ended, one way or another."""
        error = done.exception()
        with self._lock:
            if chunk not in self._running:
                return  # its pool was replaced, and its samples were given to the new one
            if isinstance(error, BrokenProcessPool):
                finished = self._drop(chunk.pool) + self._dispatch()
            else:
                self._running.remove(chunk)
                chunk.pool.free_slots.append(chunk.slot)
                chunk.pool.proven = True
                finished = self._outcome(chunk, done.result() if error is None else error) + self._dispatch()
        self._settle(finished)

    def _outcome(self, chunk: _Chunk, outcome: list[RewardResult] | BaseException) -> _Finished:
        """Results of a chunk; puts back those of its samples that have none yet."""
        if isinstance(outcome, list):
            self._wait_again(chunk.jobs[len(outcome) :])
            return list(zip(chunk.jobs, outcome, strict=False))
        place = chunk.pool.under_way(chunk.slot)
        if place is None:
            return self._put_back(chunk.jobs)
        guilty = chunk.jobs[place]
        self._wait_again([job for job in chunk.jobs if job is not guilty])
        return [(guilty, self._error(*self._reason(outcome)))]

    def _put_back(self, jobs: list[_Job]) -> _Finished:
        """Grade these again, as it was not they that ended their process; give up those with bad luck too often."""
        for job in jobs:
            job.attempts += 1
        self._wait_again([job for job in jobs if job.attempts < _MAX_ATTEMPTS])
        given_up = [job for job in jobs if job.attempts >= _MAX_ATTEMPTS]
        return [(job, self._error("grader processes die before they can grade it", "crash")) for job in given_up]

    def _wait_again(self, jobs: list[_Job]) -> None:
        """Before the others; all of one kind."""
        pending = self._pending_computing if jobs and jobs[0].computes else self._pending
        pending.extendleft(reversed(jobs))

    def _drop(self, pool: GraderPool) -> _Finished:
        """Leave a pool, put back what it had; under the lock. Returns samples that were given up."""
        if pool in self._pools:
            self._pools.remove(pool)
            self._endings.append(pool.abandon())
        chunks = [chunk for chunk in self._running if chunk.pool is pool]
        self._running.difference_update(chunks)
        return [one for chunk in chunks for one in self._put_back(chunk.jobs)]

    def _replace_pools(self) -> _Finished:
        with self._lock:
            return [one for pool in list(self._pools) for one in self._drop(pool)] + self._dispatch()

    def _settle(self, finished: _Finished) -> None:
        """Hand results out, without the lock: a future's callbacks may submit more."""
        self._num_done += len(finished)
        for job, result in finished:
            job.future.set_result(result)

    def _patience(self) -> float:
        """Seconds after which a pool that finished nothing at all has come to a stop."""
        proven = any(pool.proven for pool in self._pools)
        return self.timeout + (_SPARE_SECONDS if proven else _START_SECONDS)

    def _reason(self, error: BaseException) -> tuple[str, str, float]:
        """Why a chunk has no results, the kind of that, and how long its last sample took (s; 0: not known)."""
        if isinstance(error, TimeoutError):
            return f"no score within {self.timeout:g} s (reward.timeout)", "timeout", self.timeout
        if isinstance(error, ProcessExpired):
            code = error.exitcode
            if code == OUT_OF_MEMORY:
                return f"needed more than {self.memory_mb} MB (reward.memory_limit_mb)", "memory", 0.0
            status = f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            return f"the grader ended its process ({status})", "crash", 0.0
        return f"{type(error).__name__}: {error}", "exception", 0.0

    def _error(self, reason: str, kind: str = "exception", seconds: float = 0.0) -> RewardResult:
        return RewardResult(self.error_score, {}, reason, seconds, kind)
