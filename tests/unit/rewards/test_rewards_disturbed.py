"""Graders that disturb their process: no score of another sample changes, no run hangs, nothing is left behind."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor, RewardResult, Sample

pytestmark = pytest.mark.slow

BEHAVIOURS = """
import ctypes, os, stat, subprocess, sys, time

def pipes():
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): yield fd
        except OSError: pass

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    what = data_source
    if what == "fork returns": os.fork()
    if what == "fork raises" and os.fork() == 0: raise ValueError("in the child")
    if what == "fork of C returns": ctypes.CDLL(None).fork()
    if what == "fork writes" and os.fork() == 0:
        for fd in pipes(): os.write(fd, bytes(100))
        os._exit(0)
    if what == "stray bytes":
        for fd in pipes(): os.write(fd, b"\\0\\0\\0\\4")
    if what == "many stray bytes":
        for fd in pipes(): os.write(fd, bytes(range(200)))
    if what == "exit": os._exit(3)
    if what == "child keeps the pipe" and ctypes.CDLL(None).fork(): os._exit(3)
    if what == "child keeps the pipe": time.sleep(1000)
    if what == "popen" or what == "popen in a session":
        process = subprocess.Popen(["sleep", "1000"], start_new_session="session" in what)
        return {"score": float(solution_str), "pid": process.pid}
    if what == "popen and hang":
        with open(ground_truth, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)
    return float(solution_str)
"""
DISTURBING = (
    "fork returns", "fork raises", "fork of C returns", "fork writes", "stray bytes", "many stray bytes",
    "exit", "child keeps the pipe",
)  # fmt: skip
HARMLESS = {"fork returns", "fork raises", "fork of C returns", "fork writes"}


@pytest.fixture
def pool(tmp_path: Path) -> RewardExecutor:
    (tmp_path / "behaviours.py").write_text(BEHAVIOURS)
    custom = CustomFunction(str(tmp_path / "behaviours.py"))
    return RewardExecutor(num_workers=2, timeout=20.0, error_score=-1.0, custom=custom)


def graded_within(seconds: float, pool: RewardExecutor, samples: list[Sample]) -> list[RewardResult]:
    futures, end = pool.submit_all(samples), time.monotonic() + seconds
    return [future.result(timeout=max(end - time.monotonic(), 0.0)) for future in futures]


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("what", DISTURBING)
def test_every_other_sample_gets_its_own_score(pool: RewardExecutor, what: str) -> None:
    samples = [Sample(what if i % 16 == 5 else "good", str(i), "") for i in range(128)]
    with pool:
        for _ in range(2):
            results = graded_within(120.0, pool, samples)
            for i, (sample, result) in enumerate(zip(samples, results, strict=True)):
                if sample.data_source == "good" or what in HARMLESS:
                    assert (result.score, result.error) == (float(i), None)
                else:
                    assert result.score == -1.0 and result.kind == "crash"


@pytest.mark.parametrize("what", ["popen", "popen in a session"])
def test_what_a_grader_has_started_dies_with_its_process(pool: RewardExecutor, what: str) -> None:
    with pool:
        results = graded_within(60.0, pool, [Sample(what, "1", "")])
        started = int(results[0].components["pid"])
        assert psutil.pid_exists(started)
    assert wait_until(lambda: not psutil.pid_exists(started))


def test_what_a_hung_grader_has_started_dies_with_it(tmp_path: Path, pool: RewardExecutor) -> None:
    pool.timeout = 1.0
    with pool:
        results = graded_within(60.0, pool, [Sample("popen and hang", "1", str(tmp_path / "pid"))])
        assert results[0].kind == "timeout"
        assert wait_until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
