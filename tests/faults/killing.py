"""Runs that are killed at random moments until they have been killed often enough, and what is left of them."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from forked import Forked, Forks

MARK = "VALOR_FAULT_TEST"
CODE = f"import os, sys\nos.environ['{MARK}'], *words = sys.argv[1:]\nfrom valor.cli import main\nsys.exit(main(words))"
_CLOCK = (
    "timing",
    "perf/",
    "reward/grading_seconds",
    "trainer/idle_ratio",
    "rollouter/",
)  # metrics that differ between two runs of the same mathematics
_SECONDS = 10.0  # in which nothing of a killed run may be left


@dataclass
class Runner:
    """Starts commands; all processes of one are known by a mark in their environment."""

    forks: Forks
    log: Path
    mark: str

    def start(self, command: list[str]) -> Forked:
        return self.forks.start(CODE, self.mark, *command, log=self.log)

    def finish(self, command: list[str]) -> float:
        """Run to the end; the seconds it took."""
        began = time.monotonic()
        assert self.start(command).wait(600) == 0, self.log.read_text()[-3000:]
        return time.monotonic() - began

    def processes(self) -> list[psutil.Process]:
        """All that a command has started and that still runs."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_left(self) -> None:
        """At most ten seconds after a run has ended."""
        end = time.monotonic() + _SECONDS
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, [" ".join(process.cmdline())[:200] for process in left]


def kill_often(
    kill: Callable[[list[str], int], int],
    command: Callable[[Path], list[str]],
    folder: Path,
    count: int,
    same: Callable[[Path], None],
) -> None:
    """Run the command in one folder after the other until `count` kills have hit, at most ten a run.

    `kill(command, count)` is a function of those below with its first arguments; `same(run_dir)` compares a finished
    run with an undisturbed one.
    """
    for attempt in range(60):
        run_dir, most = folder / f"run_{attempt}", min(count, 10)
        count -= most - kill(command(run_dir), most)
        same(run_dir)
        if not count:
            return
    raise AssertionError(f"{count} kills have hit nothing")


def kill_drivers(runner: Runner, seconds: float, draw: random.Random, command: list[str], count: int) -> int:
    """Kill the command's own process `count` times, each time after a part of `seconds`; then let it finish.

    Returns how many are still to be killed: the run may end before.
    """
    while count:
        process = runner.start(command)
        end = time.monotonic() + draw.uniform(0.0, seconds)
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.005)
        if (code := process.poll()) is not None:
            assert code == 0, runner.log.read_text()[-3000:]
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        count -= 1
        runner.assert_nothing_left()
    runner.finish(command)
    runner.assert_nothing_left()
    return count


def kill_helpers(
    runner: Runner,
    pause: float,
    draw: random.Random,
    which: Callable[[psutil.Process], bool],
    command: list[str],
    count: int,
) -> int:
    """Kill `count` processes that the command has started and that `which` chooses, about every `pause` seconds.

    A run that ends because of it is started again. Returns how many are still to be killed: the run may end before.
    """
    process, restarts = runner.start(command), 0
    while count:
        time.sleep(draw.uniform(0.0, 2 * pause))
        if (code := process.poll()) is not None:
            if code == 0:  # it was faster: count what is left in a new one
                break
            process, restarts = runner.start(command), restarts + 1
        with suppress(psutil.Error):  # one of them has just ended
            if helpers := [one for one in runner.processes() if which(one)]:
                draw.choice(helpers).kill()
                count -= 1
    while process.wait(600) != 0:
        restarts += 1
        assert restarts < 100, runner.log.read_text()[-3000:]
        process = runner.start(command)
    runner.assert_nothing_left()
    return count


def is_grader(process: psutil.Process) -> bool:
    """A child of multiprocessing's server of processes."""
    parent = process.parent()
    return parent is not None and "forkserver" in " ".join(parent.cmdline())


def is_ray_worker(process: psutil.Process) -> bool:
    """A process that hosts roles."""
    return "_RayHost" in " ".join(process.cmdline())


def assert_same_results(a: Path, b: Path) -> None:
    """Equal metrics and exported weights, to the last bit."""
    assert _metrics(a) == _metrics(b)
    weights = sorted(path.relative_to(a) for path in a.glob("huggingface/*/*.safetensors"))
    assert weights and weights == sorted(path.relative_to(b) for path in b.glob("huggingface/*/*.safetensors"))
    for path in weights:
        assert (a / path).read_bytes() == (b / path).read_bytes(), path


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(_CLOCK)} for row in rows]


def a_mark() -> str:
    """Of this test process and this moment."""
    return f"{os.getpid()}-{time.monotonic_ns()}-{sys.hexversion}"
