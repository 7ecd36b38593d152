"""Whole runs as commands in processes of their own: one after another, or side by side with a share of the GPUs."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from torch.cuda import device_count

from valor.controller.watchdog import Watchdog

LOG_FILE = "console.log"
_LOCK_FILE = ".lock"
_POLL_SECONDS = 0.2


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

    The error is the last line that the command wrote. A job that comes after a failed one is not run. Once `stopping`
    names a signal, nothing more is started, and running jobs are asked to stop too. Of jobs side by side each sees an
    equal share of this machine's GPUs; where there are fewer GPUs than jobs they share them.
    """
    waiting, failed, processes = list(jobs), set[str](), list[subprocess.Popen[bytes]]()
    running: dict[Future[int], Job] = {}
    stopped, slots = False, device_slots(parallel)

    def run(job: Job) -> int:
        slot = slots.get()
        try:
            return _run_command(job, slot, began)
        finally:
            slots.put(slot)

    def began(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        if stopped:  # while it waited for its folder
            process.terminate()

    def stop(signum: int | None = None) -> None:
        nonlocal stopped
        stopped = True
        if signum != signal.SIGINT:  # that one a terminal has sent to the commands as well
            for process in processes:
                if process.poll() is None:
                    process.terminate()

    with ThreadPoolExecutor(parallel) as threads, ExitStack() as at_an_error:
        at_an_error.push(lambda kind, *_: stop() if kind else None)
        while running or (waiting and not stopped):
            if not stopped and (signum := stopping()):
                stop(signum)
            unfinished = {job.name for job in [*waiting, *running.values()]}
            for job in [] if stopped else list(waiting):
                if job.after & failed:
                    waiting.remove(job)
                    failed.add(job.name)
                    yield job, f"not run: it needs {min(job.after & failed)}, which failed"
                elif len(running) < parallel and not job.after & unfinished:
                    waiting.remove(job)
                    running[threads.submit(run, job)] = job
                    started(job)
            for future in wait(running, _POLL_SECONDS, FIRST_COMPLETED).done:
                job = running.pop(future)
                error = _error(future, job)
                if error:
                    failed.add(job.name)
                yield job, error


def device_slots(parallel: int) -> SimpleQueue[dict[str, str]]:
    """What each of `parallel` jobs at a time has in its environment: the GPUs that it sees."""
    slots: SimpleQueue[dict[str, str]] = SimpleQueue()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(i) for i in range(device_count())] if seen is None else []
    for slot in range(parallel):
        share = gpus[slot::parallel] or gpus[slot % len(gpus) :][:1] if gpus else []
        slots.put({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share and parallel > 1 else {})
    return slots


def _error(future: Future[int], job: Job) -> str | None:
    """What went wrong with an ended job, in a line."""
    code = future.result()
    if code == 0:
        return None
    lines = (job.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was written")
    return f"{f'killed by signal {-code}' if code < 0 else f'exit code {code}'}: {last}"


def _run_command(job: Job, env: dict[str, str], began: Callable[[subprocess.Popen[bytes]], None]) -> int:
    """Run to the end; the exit code, negative for a signal.

    It ends with this process. Two never work in one folder: the command holds a lock there for as long as it lives, so
    a second one waits for the first.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with (
        open(job.folder / _LOCK_FILE, "w") as lock,
        open(job.folder / LOG_FILE, "ab") as log,
        closing(Watchdog()) as dog,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | env | dog.mark,
            pass_fds=[lock.fileno()],
        )
        began(process)
        return process.wait()
