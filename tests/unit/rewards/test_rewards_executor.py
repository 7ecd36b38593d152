"""The grader pool under graders that fail, hang, die, lie about their type, and load late."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from valor.algorithms import load_custom
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor, RewardResult, Sample
from valor.rewards.manager import summarize
from valor.rewards.worker import LIMITS_MEMORY, gather
from valor.user_files import load_object

pytestmark = [pytest.mark.alone, pytest.mark.slow]

TIMEOUT = 1.5

BEHAVIOURS = """
import asyncio, multiprocessing, os, signal, sys, time
import sibling_of_rewards

HELD = []

def square(n):
    return n * n

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    what = solution_str
    if what == "sleep": time.sleep(1000)
    if what == "spin": return sum(range(10**13))  # one C call: no Python code runs until it ends
    if what == "eat":
        signal.signal(signal.SIGTERM, lambda *_: None)
        while True:
            try: time.sleep(0.05); raise KeyboardInterrupt
            except BaseException: pass
    if what.startswith("exit"): os._exit(int(what[4:]))
    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if what == "sys.exit": sys.exit(0)
    if what == "raise": raise ValueError("no such unit\\nreally")
    if what == "nan": return float("nan")
    if what == "none": return None
    if what == "text": return "1.0"
    if what == "huge": return {"score": 1.0, "pred": 10**400}
    if what == "pool":
        with multiprocessing.Pool(2) as pool: return sum(pool.map(square, [1, 2]))
    if what == "no score": return {"acc": 1.0}
    if what == "grow":
        hold = []
        while True: hold.append(bytearray(2**24))
    if what == "keep":
        while True: HELD.append(bytearray(2**24))
    if what == "some memory": bytearray(2**28)
    if what == "slow":
        time.sleep(0.05)
        return {"score": 0.0, "pid": os.getpid()}
    if what == "pid": return {"score": 0.0, "pid": os.getpid()}
    if what == "odd":
        found = {"sibling": sibling_of_rewards.VALUE, "torch": "torch" in sys.modules}
        return {"score": True, "acc": 0, "set": {3}, **found}
    return float(what == ground_truth) + bonus

def waiting(data_source, solution_str, ground_truth, extra_info=None):
    began = time.monotonic()
    time.sleep(float(solution_str))
    return {"score": 1.0, "began": began, "ended": time.monotonic()}

def computing(**sample):
    return waiting(**sample)

computing.cpu_bound = True

async def async_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "sibling_of_rewards.py").write_text("VALUE = 7\n")
    (folder / "behaviours.py").write_text(BEHAVIOURS)
    return folder / "behaviours.py"


@pytest.fixture(scope="module")
def executor(reward_file: Path) -> Iterator[RewardExecutor]:
    custom = CustomFunction(str(reward_file))
    with RewardExecutor(num_workers=2, timeout=TIMEOUT, error_score=-1.0, custom=custom) as pool:
        yield pool


def grade(executor: RewardExecutor, *responses: str) -> list[RewardResult]:
    return executor.score([Sample("any", r, "good", {"index": i}) for i, r in enumerate(responses)])


def test_scores_come_back_in_order(executor: RewardExecutor) -> None:
    responses = ["good" if i % 3 == 0 else "bad" for i in range(500)]
    results = grade(executor, *responses)
    assert [r.score for r in results] == [1.0 if i % 3 == 0 else 0.0 for i in range(500)]
    assert all(r.error is None and r.seconds >= 0 for r in results)


def test_a_file_may_change_the_folder_of_its_graders_alone(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "words.txt").write_text("good")
    (tmp_path / "graders" / "own.py").write_text(
        "import os\nos.chdir(os.path.dirname(__file__))\n"
        "def compute_score(solution_str, **_):\n    return float(open('words.txt').read() == solution_str)\n"
    )
    monkeypatch.chdir(tmp_path)
    with RewardExecutor(num_workers=1, custom=CustomFunction("graders/own.py")) as pool:
        assert [(r.score, r.error) for r in grade(pool, "good", "bad")] == [(1.0, None), (0.0, None)]
    assert Path.cwd() == tmp_path


def test_other_files_of_the_users_leave_the_process_in_its_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "away").mkdir()
    for name in ("losses.py", "away_module.py"):
        (tmp_path / name).write_text("import os\nos.chdir('away')\nclass Own:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    load_custom("losses.py")
    load_object("losses.py:Own", "key")
    load_object("away_module.Own", "key")
    assert Path.cwd() == tmp_path


def test_graders_may_have_processes_of_their_own(executor: RewardExecutor) -> None:
    results = grade(executor, "pool", "good")
    assert [(r.score, r.error) for r in results] == [(5.0, None), (1.0, None)]


def test_no_samples_no_results(executor: RewardExecutor) -> None:
    assert executor.score([]) == []


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "ValueError: no such unit really (behaviours.py:"),
        ("sys.exit", "SystemExit: 0"),
        ("nan", "returned nan"),
        ("none", "returned None, not a number"),
        ("text", "returned '1.0', not a number"),
        ("huge", "returned 1000000"),
        ("no score", "without 'score' (it has acc)"),
    ],
)
def test_a_failing_grader_costs_its_own_sample(executor: RewardExecutor, response: str, reason: str) -> None:
    before, failed, after = grade(executor, "good", response, "good")
    assert (before.score, after.score) == (1.0, 1.0)
    assert failed.score == -1.0
    assert failed.components == {}
    assert failed.error is not None and reason in failed.error and "\n" not in failed.error
    assert not failed.correct


@pytest.mark.parametrize("response", ["sleep", "spin"])
def test_a_hung_grader_is_ended_at_its_timeout(executor: RewardExecutor, response: str) -> None:
    grade(executor, "good")  # the processes are up
    start = time.perf_counter()
    results = grade(executor, *["good"] * 20, response, *["good"] * 20)
    elapsed = time.perf_counter() - start
    assert [r.score for r in results] == [1.0] * 20 + [-1.0] + [1.0] * 20
    assert results[20].error == "no score within 1.5 s (reward.timeout)"
    assert TIMEOUT < elapsed < TIMEOUT + 20.0
    graders = [p for p in psutil.Process().children(recursive=True) if "forkserver" in " ".join(p.cmdline())]
    assert len(graders) <= 3  # the server that forks them, and two: the hung one is no more


def test_a_grader_that_swallows_every_exception_and_signal_is_ended(executor: RewardExecutor) -> None:
    results = grade(executor, "good", "eat", "good")
    assert [r.score for r in results] == [1.0, -1.0, 1.0]
    assert "no score within" in (results[1].error or "")


@pytest.mark.parametrize(
    ("response", "reason"),
    [("exit3", "exit status 3"), ("kill", "signal 9"), ("exit0", "exit status 0")],
)
def test_a_grader_that_ends_its_process_costs_its_own_sample(
    executor: RewardExecutor, response: str, reason: str
) -> None:
    results = grade(executor, *["good"] * 10, response, *["good"] * 10)
    assert [r.score for r in results] == [1.0] * 10 + [-1.0] + [1.0] * 10
    assert reason in (results[10].error or "")


@pytest.mark.skipif(not LIMITS_MEMORY, reason="this system does not limit a process's memory")
@pytest.mark.parametrize(("response", "reason"), [("grow", "MemoryError"), ("keep", "MemoryError")])
def test_a_grader_that_eats_memory_costs_its_own_sample(reward_file: Path, response: str, reason: str) -> None:
    custom = CustomFunction(str(reward_file))
    with RewardExecutor(num_workers=1, timeout=60, error_score=-1.0, custom=custom, memory_mb=512) as pool:
        results = grade(pool, *["good"] * 10, response, *["good"] * 10)
        after = grade(pool, "some memory")
    assert [r.score for r in results] == [1.0] * 10 + [-1.0] + [1.0] * 10
    assert reason in (results[10].error or "") and results[10].kind == "memory"
    assert after[0].error is None  # no process is left full


def test_hung_graders_are_waited_for_together(reward_file: Path) -> None:
    with RewardExecutor(num_workers=6, timeout=4.0, custom=CustomFunction(str(reward_file))) as pool:
        grade(pool, *["good"] * 40)  # the processes are up
        start = time.perf_counter()
        results = grade(pool, *["sleep"] * 4, *["good"] * 60)
        elapsed = time.perf_counter() - start
    assert [r.kind for r in results[:4]] == ["timeout"] * 4
    assert [r.score for r in results[4:]] == [1.0] * 60
    assert 4.0 < elapsed < 7.9  # one timeout, not two


@pytest.mark.skipif(not LIMITS_MEMORY, reason="this system does not limit a process's memory")
def test_a_batch_of_bad_graders_takes_about_one_timeout_and_far_less_than_a_loop(reward_file: Path) -> None:
    kinds = {"sleep": ("timeout", 4), "spin": ("timeout", 1), "exit3": ("crash", 3), "grow": ("memory", 2)}
    bad = [response for response, (_, count) in kinds.items() for _ in range(count)]
    responses = [*["good", "slow", "slow"] * 100, *bad, *["good"] * 100]
    timeout = 6.0
    with RewardExecutor(timeout=timeout, custom=CustomFunction(str(reward_file)), memory_mb=128) as pool:
        grade(pool, *["good"] * 40)  # the processes are up
        start = time.perf_counter()
        results = grade(pool, *responses)
        elapsed = time.perf_counter() - start
    for response, result in zip(responses, results, strict=True):
        assert result.kind == kinds[response][0] if response in kinds else result.error is None, (response, result)
    assert sum(r.score for r in results) == 200.0
    errors = summarize(["a"] * len(results), results)[0]
    assert [errors[f"reward/errors/{kind}"] for kind in ("timeout", "crash", "memory")] == [5.0, 3.0, 2.0]
    loop = 200 * 0.05 + 5 * timeout  # and it would not have survived the others
    assert timeout < elapsed < 2 * timeout
    assert elapsed < loop / 3


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not say which processes wait")
def test_more_processes_are_started_while_graders_wait(reward_file: Path) -> None:
    with RewardExecutor(timeout=60, custom=CustomFunction(str(reward_file), "waiting")) as pool:
        results = grade(pool, *["1.5"] * 40)
        assert pool.num_workers == 8
    assert all(r.score == 1.0 for r in results)
    assert at_once(results) > 8


def at_once(results: list[RewardResult]) -> int:
    spans = [(r.components["began"], r.components["ended"]) for r in results]
    return max(sum(began <= moment < ended for began, ended in spans) for moment, _ in spans)


def test_no_more_graders_compute_at_once_than_there_are_cores(reward_file: Path, monkeypatch) -> None:
    monkeypatch.setattr("valor.rewards.executor._NUM_CORES", 2)
    with RewardExecutor(num_workers=5, custom=CustomFunction(str(reward_file), "computing")) as pool:
        assert at_once(grade(pool, *["0.05"] * 16)) == 2


def test_failures_are_counted_by_kind(executor: RewardExecutor) -> None:
    results = grade(executor, "good", "raise", "exit3", "nan", "sleep")
    metrics = summarize(["a"] * 5, results)[0]
    assert {k: v for k, v in metrics.items() if k.startswith("reward/errors")} == {
        "reward/errors": 4.0,
        "reward/errors/crash": 1.0,
        "reward/errors/exception": 2.0,
        "reward/errors/timeout": 1.0,
    }


def test_many_bad_graders_at_once(executor: RewardExecutor) -> None:
    bad = {5: "exit3", 6: "exit3", 20: "sleep", 21: "raise", 40: "kill", 41: "sleep"}
    results = grade(executor, *[bad.get(i, "good") for i in range(60)])
    assert {i for i, r in enumerate(results) if r.error} == set(bad)
    assert all(r.score == 1.0 for i, r in enumerate(results) if i not in bad)


def test_a_pool_whose_idle_processes_were_killed_starts_again(executor: RewardExecutor) -> None:
    pids = {r.components["pid"] for r in grade(executor, *["pid"] * 40)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    assert [r.score for r in grade(executor, *["good"] * 10)] == [1.0] * 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_sample_whose_process_is_killed_from_outside_is_graded_again(number, tmp_path: Path) -> None:
    """A batch system's SIGTERM goes to all processes of a job, while the run wants to end its step."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\ndef compute_score(solution_str, **_):\n"
        "    path = pathlib.Path(solution_str)\n    with path.open('a') as file: print(os.getpid(), file=file)\n"
        "    time.sleep(20 if len(path.read_text().split()) == 1 else 0)\n    return 1.0\n"
    )
    with RewardExecutor(num_workers=1, timeout=60, custom=CustomFunction(str(tmp_path / "slow.py"))) as pool:
        graded, pids = pool.submit(Sample("any", str(tmp_path / "pids"), "good", {})), tmp_path / "pids"
        while not pids.exists() or not pids.read_text().strip():
            time.sleep(0.02)
        os.kill(int(pids.read_text()), number)
        assert (graded.result(20).score, graded.result().error) == (1.0, None)


def test_slow_graders_share_the_processes(executor: RewardExecutor) -> None:
    results = grade(executor, *["slow"] * 40)  # the other process has 2 s to start, if it must
    assert len({r.components["pid"] for r in results}) == 2
    assert all(r.seconds >= 0.05 for r in results)


def test_components_are_plain_values(executor: RewardExecutor) -> None:
    (result,) = grade(executor, "odd")
    assert result.score == 1.0
    assert result.components == {"acc": 0, "set": "{3}", "sibling": 7, "torch": False}
    assert not result.correct  # `acc` decides where a grader gives it


def test_a_sample_that_cannot_travel_gets_an_error(executor: RewardExecutor) -> None:
    results = executor.score([Sample("a", "good", "good"), Sample("a", "good", lambda: None)])
    assert results[0].score == 1.0
    assert "cannot be sent" in (results[1].error or "")


def test_submitted_samples_are_graded_in_the_background(executor: RewardExecutor) -> None:
    futures = [executor.submit_all([Sample("a", "good", "good")])[0] for _ in range(30)]
    deadline = time.monotonic() + 60
    while not all(f.done() for f in futures) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(f.done() for f in futures)
    assert [r.score for r in gather(futures)] == [1.0] * 30


def test_no_more_processes_are_started_than_there_are_samples(reward_file: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with RewardExecutor(num_workers=6, custom=CustomFunction(str(reward_file))) as pool:
        assert [r.score for r in grade(pool, "good", "bad")] == [1.0, 0.0]
        assert len(set(psutil.Process().children(recursive=True)) - before) <= 4  # with what forkserver itself starts


def test_keyword_arguments_and_async_functions(reward_file: Path) -> None:
    with RewardExecutor(num_workers=1, custom=CustomFunction(str(reward_file), kwargs={"bonus": 0.5})) as pool:
        assert [r.score for r in grade(pool, "good", "bad")] == [1.5, 0.5]
    with RewardExecutor(num_workers=1, custom=CustomFunction(str(reward_file), "async_score")) as pool:
        assert [r.score for r in grade(pool, "good", "bad")] == [1.0, 0.0]


def test_processes_that_die_on_start_are_given_up(tmp_path: Path) -> None:
    file = tmp_path / "dies.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: os._exit(1)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
    )
    with RewardExecutor(num_workers=1, timeout=TIMEOUT, custom=CustomFunction(str(file))) as pool:
        (result,) = grade(pool, "good")
    assert result.score == 0.0
    assert "die before" in (result.error or "")


def test_closing_gives_waiting_samples_an_error(reward_file: Path) -> None:
    pool = RewardExecutor(num_workers=1, timeout=30, custom=CustomFunction(str(reward_file)))
    futures = pool.submit_all([Sample("a", "sleep", "")] * 10)
    pool.close()
    assert all("shut down" in (f.result(timeout=1).error or "") for f in futures)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit_all([Sample("a", "good", "")])


def test_a_source_without_a_grader_is_an_error_of_its_sample() -> None:
    with RewardExecutor(num_workers=1) as pool:
        known, unknown = pool.score([Sample("valor/arithmetic", "3 + 4 = 7", "7"), Sample("nobody", "7", "7")])
    assert known.score == 1.0
    assert "no grader for data_source 'nobody'" in (unknown.error or "")


SCRIPT = """
import os, sys, time
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor, Sample

def mine(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "sleep":
        time.sleep(1000)
    return {"score": 2.0, "pid": os.getpid()}

if __name__ == "__main__":
    executor = RewardExecutor(num_workers=1, timeout=60, custom=CustomFunction(__file__, "mine"))
    (result,) = executor.score([Sample("script", "", "")])
    print("score", result.score, "pid", result.components["pid"], flush=True)
    if "hang" in sys.argv:
        executor.submit_all([Sample("script", "sleep", "")])
        time.sleep(60)
    # no close(): the interpreter's end must be quiet all the same
"""

UNGUARDED_SCRIPT = """
from valor.rewards.executor import RewardExecutor, Sample
print("main module")
with RewardExecutor(num_workers=1, timeout=20) as executor:
    print(executor.score([Sample("valor/arithmetic", "1 + 1 = 2", "2")])[0].score)
"""


def start_script(tmp_path: Path, text: str, *args: str) -> "subprocess.Popen[str]":
    script = tmp_path / "train.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(script), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_main_module_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    out, err = start_script(tmp_path, UNGUARDED_SCRIPT).communicate(timeout=30)
    assert (out, err) == ("main module\n1.0\n", "")


def test_a_script_without_close_ends_quietly(tmp_path: Path) -> None:
    out, err = start_script(tmp_path, SCRIPT).communicate(timeout=30)
    assert "score 2.0" in out
    assert err == ""


def test_graders_end_with_a_killed_parent(tmp_path: Path) -> None:
    process = start_script(tmp_path, SCRIPT, "hang")
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("score"))
    grader = int(line.split()[-1])
    time.sleep(0.3)
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 60
    while is_running(grader) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(grader)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
