"""Ctrl-C, SIGTERM and SIGHUP: the first lets the step end and saves, the second ends with a line, as does one at the
start; and what a killed process has started ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fault_settings import PARITY
from killing import assert_same_results

from valor.controller.watchdog import Watchdog

pytestmark = pytest.mark.slow


def start(command: list[str], prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "valor", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, process, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = [line for line in process.stderr.read().splitlines() if line and not line.startswith("note:")]
    assert len(lines) <= 1, lines
    return lines[0] if lines else ""


@pytest.fixture(scope="module")
def undisturbed(ppo, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run([sys.executable, "-m", "valor", *ppo(run_dir, PARITY)], check=True, stdout=subprocess.DEVNULL)
    return run_dir


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("controller", ["local", "ray"])
def test_the_first_one_lets_the_step_end(name, controller, undisturbed, ppo, tmp_path, counts):
    if controller == "ray" and name == "SIGINT":
        pytest.skip("as SIGTERM")
    counts("signals that ask to stop")
    number, run_dir = signal.Signals[name], tmp_path / "run"
    command = ppo(run_dir, PARITY, "trainer.save_freq=-1", f"trainer.controller={controller}")
    process = start(command)
    wait_for((run_dir / "samples" / "step_1.jsonl").exists, process)
    process.send_signal(number)
    assert process.wait(120) == 128 + number and line_of(process) == ""
    assert len(list(run_dir.glob("global_step_*/trainer.json"))) == 1
    subprocess.run([sys.executable, "-m", "valor", *command], check=True, stdout=subprocess.DEVNULL)
    assert_same_results(undisturbed, run_dir)


@pytest.mark.faults
def test_under_nohup_a_hangup_is_ignored(undisturbed, ppo, tmp_path, counts):
    counts("signals that ask to stop")
    process = start(ppo(tmp_path / "run", PARITY), ("nohup",))
    wait_for((tmp_path / "run" / "samples" / "step_1.jsonl").exists, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0
    assert_same_results(undisturbed, tmp_path / "run")


SLOW = "import time\ndef compute_score(**_):\n    time.sleep(1000)\n"


@pytest.mark.faults
@pytest.mark.parametrize("names", ["SIGINT SIGINT", "SIGTERM SIGINT", "SIGHUP SIGHUP"])
def test_the_second_one_ends_with_a_line(names, ppo, tmp_path, counts):
    counts("signals that end a run at once")
    (tmp_path / "slow.py").write_text(SLOW)
    own = f"reward.custom_reward_function.path={tmp_path / 'slow.py'}", "reward.timeout=500"
    process = start(ppo(tmp_path / "run", *own))
    wait_for(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 2, process)
    first, second = (signal.Signals[name] for name in names.split())
    process.send_signal(first)
    time.sleep(1.2)  # within a second they are one
    process.send_signal(second)
    assert process.wait(30) == 128 + second
    assert line_of(process).startswith(f"{second.name}: stopped at once")


@pytest.mark.faults
@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.8, 1.1, 1.3, 1.4, 1.5, 1.7, 2.0, 2.6, 3.3, 4.0])
def test_ctrl_c_during_the_start_ends_with_a_line(seconds, ppo, tmp_path, counts):
    counts("signals that end a run at once")
    process = start(ppo(tmp_path / "run", "trainer.total_training_steps=1000"))
    begun = time.monotonic()
    wait_for(lambda: catches(process.pid, signal.SIGINT), process)  # Python itself has started
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    if (tmp_path / "run" / "samples").exists():
        process.kill()
        pytest.skip("it had started by then")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 128 + signal.SIGINT
    if (tmp_path / "run" / "samples").exists():
        pytest.skip("it was in its first step by then, which it ends")
    assert line_of(process).startswith("SIGINT: stopped")


SWALLOWS = """
import sys
from valor.errors import exit_code
def command():
    import swallows
    return 0
sys.exit(exit_code(command))
"""


def test_ctrl_c_that_an_import_swallows_ends_the_process(tmp_path, counts):
    """Torch goes on without NumPy, whose half then fails in other libraries."""
    counts("signals that end a run at once")
    module = "import os, signal\ntry:\n  os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / "swallows.py").write_text(module)
    ended = subprocess.run([sys.executable, "-c", SWALLOWS], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "SIGINT: stopped\n")


def test_a_watchdog_ends_what_its_process_has_started(tmp_path, counts):
    """Of a process that is killed: children, their children, and those that have a session of their own."""
    counts("killed processes with children")
    code = (
        "import os, subprocess, sys, time\nfrom valor.controller.watchdog import Watchdog\n"
        "env = os.environ | Watchdog().mark\n"
        "sleep = [sys.executable, '-c', 'import os, time; os.fork(); time.sleep(1000)']\n"
        "pids = [subprocess.Popen(sleep, env=env, start_new_session=new).pid for new in (False, True)]\n"
        "time.sleep(0.5)\nprint(*pids, flush=True)\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    both = [one for pid in pids for one in (psutil.Process(pid), *psutil.Process(pid).children())]
    assert len(both) == 4
    process.kill()
    process.wait()
    assert not psutil.wait_procs(both, timeout=10)[1]


def test_a_watchdog_leaves_others_alone(counts):
    dog, other = Watchdog(), Watchdog()
    mine, theirs = (subprocess.Popen(["sleep", "1000"], env=os.environ | one.mark) for one in (dog, other))
    dog.close()
    assert mine.wait(10) == -signal.SIGKILL and theirs.poll() is None
    other.close()
    assert theirs.wait(10) == -signal.SIGKILL
