"""Commands as jobs: their order, what they wait for, their errors, and one process at a time in a folder."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from valor.controller.jobs import LOG_FILE, Job, device_slots, run_jobs

pytestmark = pytest.mark.slow


def job(folder: Path, name: str, code: str = "", after: str = "") -> Job:
    return Job(name, (sys.executable, "-c", code), folder / name, frozenset(after.split()))


def test_jobs_run_in_order_and_after_what_they_need(tmp_path):
    jobs = [job(tmp_path, "c", after="b"), job(tmp_path, "a", "print('hello')"), job(tmp_path, "b", after="a")]
    started: list[str] = []
    ended = [(one.name, error) for one, error in run_jobs(jobs, started=lambda one: started.append(one.name))]
    assert started == ["a", "b", "c"]
    assert ended == [("a", None), ("b", None), ("c", None)]
    assert (tmp_path / "a" / LOG_FILE).read_text() == "hello\n"


def test_a_failure_is_its_last_line_and_stops_only_what_needs_it(tmp_path):
    jobs = [
        job(tmp_path, "bad", "raise SystemExit('no data\\n')"),
        job(tmp_path, "needs", after="bad"),
        job(tmp_path, "other"),
        job(tmp_path, "killed", "import os; os.kill(os.getpid(), 9)"),
    ]
    assert {one.name: error for one, error in run_jobs(jobs)} == {
        "bad": "exit code 1: no data",
        "needs": "not run: it needs bad, which failed",
        "other": None,
        "killed": "killed by signal 9: nothing was written",
    }


def test_a_folder_holds_one_process_at_a_time(tmp_path):
    """The parent of the first is killed alone, and the first with it; only then the second starts."""
    slow = "import time; print('began', flush=True); time.sleep(1000); print('ended')"
    parent = f"""
from pathlib import Path
from valor.controller.jobs import Job, run_jobs
list(run_jobs([Job("one", ({sys.executable!r}, "-c", {slow!r}), Path({str(tmp_path)!r}))]))
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    log = tmp_path / LOG_FILE
    while not log.exists() or "began" not in log.read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = Job("one", (sys.executable, "-c", "print('again')"), tmp_path)
    assert [error for _, error in run_jobs([again])] == [None]
    assert log.read_text().split() == ["began", "again"]


def test_a_request_to_stop_reaches_the_running_job(tmp_path):
    handler = "import signal, sys, time; signal.signal(15, lambda *a: sys.exit('stopped'))"
    handler += "; print(1, flush=True); time.sleep(60)"
    asked: list[int] = []

    def stopping() -> int | None:
        log = tmp_path / "a" / LOG_FILE
        if log.exists() and log.read_text():
            asked.append(1)
        return signal.SIGTERM if asked else None

    jobs = [job(tmp_path, "a", handler), job(tmp_path, "b")]
    ended = [(one.name, error) for one, error in run_jobs(jobs, stopping=stopping)]
    assert ended == [("a", "exit code 1: stopped")]


COUNTS = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: print("signal", flush=True))
print("began", flush=True)
end = time.monotonic() + 4
while time.monotonic() < end:
    time.sleep(0.1)
"""
SWEEPS = """
import sys
from pathlib import Path
from valor.controller.jobs import Job, run_jobs
from valor.trainer.signals import StopRequest
with StopRequest() as stop:
    jobs = [Job("one", (sys.executable, "-c", sys.argv[2]), Path(sys.argv[1]))]
    list(run_jobs(jobs, stopping=lambda: stop.signum))
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_each_ctrl_c_reaches_the_running_job_once(terminal, tmp_path):
    """A run that gets one more than its user has typed gives up saving."""
    command = [sys.executable, "-X", "faulthandler", "-c", SWEEPS, str(tmp_path), COUNTS]
    process = subprocess.Popen(command, start_new_session=True)
    log = tmp_path / LOG_FILE
    for count in range(2):
        while not log.exists() or len(log.read_text().split()) <= count:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(1.2)  # two within a second are one
        (os.killpg if terminal else os.kill)(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # says where it hangs
        process.wait()
        raise
    assert log.read_text().split() == ["began", "signal", "signal"]


@pytest.mark.timeout(30)
def test_a_job_whose_folder_is_in_use_when_it_is_to_stop_does_not_run(tmp_path):
    (tmp_path / "a").mkdir()
    end = time.monotonic() + 1.0
    with open(tmp_path / "a" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stopping = lambda: signal.SIGINT if time.monotonic() > end else None  # noqa: E731
        assert list(run_jobs([job(tmp_path, "a")], stopping=stopping)) == []


def test_what_runs_is_stopped_when_nobody_waits_for_it_any_more(tmp_path):
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", "import time; time.sleep(1000)")]
    ends = run_jobs(jobs, parallel=2)
    assert next(ends) == (jobs[0], None)
    ends.close()
    assert list(run_jobs([job(tmp_path, "b")])) == [(job(tmp_path, "b"), None)]


def test_side_by_side(tmp_path, monkeypatch):
    """Each waits for a file of the other's, so neither ends alone; each sees its own share of the GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    meet = (
        "import os, time, pathlib as p; p.Path({mine!r}).touch(); print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "while not p.Path({other!r}).exists(): time.sleep(0.05)"
    )
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    jobs = [
        job(tmp_path, "a", meet.format(mine=a, other=b)),
        job(tmp_path, "b", meet.format(mine=b, other=a)),
        job(tmp_path, "c", "raise SystemExit('wrong')", after="a b"),
    ]
    assert {one.name: error for one, error in run_jobs(jobs, parallel=2)} == {
        "a": None,
        "b": None,
        "c": "exit code 1: wrong",
    }
    assert {(tmp_path / name / LOG_FILE).read_text().strip() for name in "ab"} == {"4,6", "5,7"}


@pytest.mark.parametrize(("gpus", "shares"), [("3", ["3", "3"]), ("", [None, None]), ("1,2,3", ["1,3", "2"])])
def test_shares_of_gpus(gpus, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in device_slots(2)] == shares
