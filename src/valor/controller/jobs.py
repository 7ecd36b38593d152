"""Whole runs as commands in processes of their own: one after another here, or side by side as Ray tasks."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valor.controller import watchdog
from valor.controller.watchdog import Watchdog, start_ray

LOG_FILE = "console.log"
_LOCK_FILE = ".lock"
_POLL_SECONDS = 0.2

Submit = Callable[["Job"], Future[int]]
Stop = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """`command`, its output appended to `folder`/console.log; it starts when the jobs named in `after` have ended."""

    name: str
    command: tuple[str, ...]
    folder: Path
    after: frozenset[str] = frozenset()


def run_jobs(
    jobs: Sequence[Job],
    parallel: int = 1,
    *,
    started: Callable[[Job], None] = lambda job: None,
    stopping: Callable[[], int | None] = lambda: None,
) -> Iterator[tuple[Job, str | None]]:
    """Run every job, `parallel` at a time, the first ready one first; yields each when it has ended: None or its error.

    The error is the last line that the command wrote. A job that comes after a failed one is not run. `stopping` is
    asked all the time: once it names a signal, nothing more is started, and running jobs are asked to stop too.
    """
    waiting, failed = list(jobs), set[str]()
    running: dict[Future[int], Job] = {}
    stopped = False
    with _here() if parallel == 1 else _on_ray(parallel) as (submit, stop):
        while running or (waiting and not stopped):
            if not stopped and (signum := stopping()):
                stopped = True
                stop(signum)
            unfinished = {job.name for job in [*waiting, *running.values()]}
            for job in [] if stopped else list(waiting):
                if job.after & failed:
                    waiting.remove(job)
                    failed.add(job.name)
                    yield job, f"not run: it needs {min(job.after & failed)}, which failed"
                elif len(running) < parallel and not job.after & unfinished:
                    waiting.remove(job)
                    running[submit(job)] = job
                    started(job)
            for future in wait(running, _POLL_SECONDS, FIRST_COMPLETED).done:
                job = running.pop(future)
                error = _error(future, job)
                if error:
                    failed.add(job.name)
                yield job, error


def _error(future: Future[int], job: Job) -> str | None:
    """What went wrong with an ended job, in a line."""
    try:
        code = future.result()
    except Exception as error:  # the Ray worker died, or was told to stop
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if code == 0:
        return None
    lines = (job.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was written")
    return f"{f'killed by signal {-code}' if code < 0 else f'exit code {code}'}: {said}"


def run_command(
    command: Sequence[str], folder: str, cwd: str, env: dict[str, str], began: Callable[[Any], None] | None = None
) -> int:
    """Run to the end, with the output in `folder`/console.log; the exit code, negative for a signal.

    It ends with this process. Two never work in one folder: the command holds a lock there for as long as it lives, so
    a second one waits for the first.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (
        open(f"{folder}/{_LOCK_FILE}", "w") as lock,
        open(f"{folder}/{LOG_FILE}", "ab") as log,
        closing(Watchdog()) as dog,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env | dog.mark,
            pass_fds=[lock.fileno()],
        )
        if began:
            began(process)
        try:
            return process.wait()
        except KeyboardInterrupt:  # a cancelled Ray task
            process.terminate()
            return process.wait()


@contextmanager
def _here() -> Iterator[tuple[Submit, Stop]]:
    """A thread that waits for one command at a time."""
    running: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(1) as thread:

        def submit(job: Job) -> Future[int]:
            where = str(job.folder), os.getcwd(), dict(os.environ)
            return thread.submit(run_command, job.command, *where, running.append)

        def stop(signum: int) -> None:
            if running and signum != signal.SIGINT:  # that one a terminal has sent to the command as well
                running[-1].terminate()

        try:
            yield submit, stop
        except BaseException:  # told a second time
            stop(signal.SIGTERM)
            raise


@contextmanager
def _on_ray(parallel: int) -> Iterator[tuple[Submit, Stop]]:
    """Ray tasks, each with one `parallel`-th of the CPUs and GPUs of this machine, or of the cluster at RAY_ADDRESS."""
    import ray
    from ray import cloudpickle

    env, own = dict(os.environ), None
    if not ray.is_initialized():
        own = start_ray(address=env.get("RAY_ADDRESS", "local"), include_dashboard=False)
    # By value, so that a Ray worker need not import torch to start a command.
    for module in (sys.modules[__name__], watchdog):
        cloudpickle.register_pickle_by_value(module)
    # Of a cluster that others use too, what they have left: a task that wants more would wait for ever.
    resources = ray.cluster_resources() if own else ray.available_resources()
    shares = {kind: resources.get(kind, 0.0) / parallel for kind in ("CPU", "GPU")}
    cpus, gpus = (float(int(n)) if n >= 1 else int(n * 1000) / 1000 for n in shares.values())
    refs: list[Any] = []
    task = ray.remote(_run_on_ray).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)  # type: ignore[attr-defined]

    def submit(job: Job) -> Future[int]:
        refs.append(task.remote(job.command, str(job.folder), os.getcwd(), env))
        return refs[-1].future()

    def stop(signum: int) -> None:
        for ref in refs:
            ray.cancel(ref)

    try:
        yield submit, stop
    finally:
        if own:
            ray.shutdown()
            own.close()


def _run_on_ray(command: Sequence[str], folder: str, cwd: str, env: dict[str, str]) -> int:
    """The driver's environment, and the GPUs that Ray gave to this task."""
    given = {key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ}
    return run_command(command, folder, cwd, env | given)
