"""Whole runs as commands in processes of their own: one after another, or side by side with a share of the GPUs."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from valor.controller.watchdog import Watchdog

LOG_FILE = "console.log"
_LOCK_FILE = ".lock"
_POLL_SECONDS = 0.2
J = TypeVar("J", bound="Job")


@dataclass(frozen=True)
class Job:
    """`command`, its output appended to `folder`/console.log; it starts when the jobs named in `after` have ended."""

    name: str
    command: tuple[str, ...]
    folder: Path
    after: frozenset[str] = frozenset()


def run_jobs(
    jobs: Sequence[J],
    parallel: int = 1,
    *,
    started: Callable[[J], None] = lambda job: None,
    stopping: Callable[[], int | None] = lambda: None,
) -> Iterator[tuple[J, str | None]]:
    """Run every job, `parallel` at a time, the first ready one first; yields each when it has ended: None or its error.

    The error is the last line that the command wrote. A job that comes after a failed one is not run. Once `stopping`
    names a signal, nothing more is started, and running jobs are asked to stop too. Of jobs side by side each sees an
    equal share of this machine's GPUs; where there are fewer GPUs than jobs they share them.
    """
    waiting, failed, slots = list(jobs), set[str](), device_slots(parallel)
    running: dict[J, tuple[subprocess.Popen[bytes], dict[str, str]]] = {}
    stopped: int | None = None
    with closing(Watchdog()) as watchdog:
        try:
            while running or (waiting and not stopped):
                if not stopped and (stopped := stopping()):
                    _stop(process for process, _ in running.values())
                unfinished = {job.name for job in [*waiting, *running]}
                for job in [] if stopped else list(waiting):
                    if job.after & failed:
                        waiting.remove(job)
                        failed.add(job.name)
                        yield job, f"not run: it needs {min(job.after & failed)}, which failed"
                    elif slots and not job.after & unfinished and (process := _start(job, slots[0] | watchdog.mark)):
                        waiting.remove(job)
                        running[job] = process, slots.pop(0)
                        started(job)
                time.sleep(_POLL_SECONDS)
                for job, (process, slot) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[job]
                        slots.append(slot)
                        failed |= {job.name} if code else set()
                        yield job, _error(code, job)
        finally:
            _stop(process for process, _ in running.values())
            for process, _ in running.values():
                process.wait()


def device_slots(parallel: int) -> list[dict[str, str]]:
    """What each of `parallel` jobs at a time has in its environment: the GPUs that it sees."""
    from torch.cuda import device_count

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(i) for i in range(device_count())] if seen is None else []
    if not gpus or parallel == 1:
        return [{} for _ in range(parallel)]
    shares = [gpus[slot::parallel] or [gpus[slot % len(gpus)]] for slot in range(parallel)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _error(code: int, job: Job) -> str | None:
    """What went wrong with an ended job, in a line."""
    if code == 0:
        return None
    lines = (job.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was written")
    return f"{f'killed by signal {-code}' if code < 0 else f'exit code {code}'}: {last}"


def _stop(processes: Iterator[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)


def _start(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """The job's process; None while another one works in its folder: it holds a lock there for as long as it lives."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / _LOCK_FILE, "w") as lock, open(job.folder / LOG_FILE, "ab") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C is this process's to pass on, else it would count twice
        )
