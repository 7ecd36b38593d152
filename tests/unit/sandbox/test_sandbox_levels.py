"""Which level is taken, what happens when none works or the supervisor fails, and what a check costs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from valor.sandbox import LEVELS, Limits, Sandbox, SandboxError, levels, strongest_level

ORDER = ["landlock", "seccomp", "rlimits"]


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Why each level does not work, for a machine of the test's making."""
    failures: dict[str, str | None] = dict.fromkeys(ORDER, "no such thing here")
    monkeypatch.setattr(levels, "_failure", lambda level: failures[level])
    monkeypatch.setattr(levels, "strongest_level", levels.strongest_level.__wrapped__)
    return failures


def test_the_first_level_that_works_is_taken(works: dict[str, str | None]) -> None:
    assert list(LEVELS) == ORDER
    for level in reversed(ORDER):
        works[level] = None
        assert levels.strongest_level() == level


def test_without_any_level_there_is_an_error_with_every_reason(works: dict[str, str | None]) -> None:
    with pytest.raises(SandboxError) as error:
        levels.strongest_level()
    assert all(f"{level}: no such thing here" in str(error.value) for level in ORDER)
    assert levels.main([]) == 1


def test_the_command_says_what_is_in_use(works: dict[str, str | None], capsys: pytest.CaptureFixture[str]) -> None:
    works["seccomp"] = works["rlimits"] = None
    assert levels.main([]) == 0
    states = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert dict(states) == {
        "landlock": "not here: no such thing here",
        "seccomp": "in use",
        "rlimits": "works here",
    }


def test_a_busy_machine_does_not_weaken_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    level = strongest_level()
    for seconds in (-1.0, 0.001):
        monkeypatch.setattr(levels, "_TRIAL_SECONDS", seconds)
        with pytest.raises(SandboxError, match="did not end in time"):
            levels._failure(level)


def test_an_unknown_level_encloses_nothing() -> None:
    with (
        Sandbox("landslide", Limits()) as sandbox,
        pytest.raises(SandboxError, match="no level 'landslide'"),
    ):
        list(sandbox.run_all("print(1)", [""], time.monotonic() + 60.0))


def test_a_supervisor_that_dies_is_an_error() -> None:
    with Sandbox(strongest_level(), Limits()) as sandbox:
        sandbox._process.kill()
        with pytest.raises(SandboxError, match="supervisor failed"):
            list(sandbox.run_all("print(1)", [""], time.monotonic() + 60.0))


def test_a_check_costs_little() -> None:
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    level, start = strongest_level(), spent()
    for _ in range(5):
        with Sandbox(level, Limits(wall_seconds=60.0)) as sandbox:
            assert sandbox.check(["def f(x): return x"], [], ["assert f(1) == 1"], ["f"]).passed == 1
    assert (spent() - start) / 5 < 0.3  # CPU seconds; about 0.05 when measured


def test_the_sandbox_has_no_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Sandbox(strongest_level(), Limits()) as sandbox:
        list(sandbox.run_all("open('file', 'w').write('x')", [""], time.monotonic() + 60.0))
        assert os.listdir(tmp_path) == []
    assert os.listdir(tmp_path) == []


# The parent of a process that is being enclosed is killed while that one asks to be killed with it.
DYING = """
import ctypes, os, signal, time
from valor.sandbox import box, walls

call = walls._call
limits = {"cpu_seconds": 10, "memory_mb": 4096, "output_mb": 1, "uid": 1_900_000_123}

def slowly(name, *args):
    if args[0] == walls._PDEATHSIG:
        time.sleep(0.4)
    return call(name, *args)

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become this process's children
parent = os.fork()
if parent == 0:
    parent = os.getpid()
    if os.fork() == 0:
        walls.die_with_parent(parent)
        walls._call = slowly
        walls.enclose("landlock", readable=box._readable(), seccomp=walls.seccomp_filter(), **limits)
    time.sleep(60)
time.sleep(0.2)
os.kill(parent, signal.SIGKILL)
signal.alarm(10)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def test_a_process_dies_with_its_parent_at_any_moment() -> None:
    if (failure := levels._failure("landlock")) is not None:
        pytest.skip(failure)
    assert subprocess.run([sys.executable, "-c", DYING], timeout=60).returncode == 0
