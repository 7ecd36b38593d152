"""Ambient progress: phases, parts, threads, and the lines about it."""

import multiprocessing
import pickle
import threading
import time

import pytest

from valor.tracking import progress
from valor.tracking.console import get_console, phase_text, show_phases, show_progress
from valor.tracking.progress import (
    Phase,
    begin_call,
    call_progress,
    part,
    phase,
    relay,
    report_progress,
    report_tokens,
)


@pytest.fixture
def heard(monkeypatch):
    """Name, count and total of the phase at every report made while the test runs."""
    reports: list[tuple[str, float, float | None]] = []
    report = Phase.report

    def listened(self: Phase, **changes) -> None:
        report(self, **changes)
        reports.append((self.name, self.done, self.total))

    monkeypatch.setattr(Phase, "report", listened)
    return reports


def test_a_report_reaches_the_innermost_phase(heard):
    with phase("training", 2, unit="step"):
        with phase("rollout", 8, unit="sample"):
            report_progress(3)
        report_progress(1)
    assert heard == [("rollout", 3, 8), ("training", 1, 2)]


def test_a_total_that_comes_with_the_report_wins(heard):
    with phase("values"):
        report_progress(1, 5)
        report_progress(2)
    assert heard == [("values", 1, 5), ("values", 2, 5)]


def test_parts_are_phases_within_the_phase(heard):
    with phase("train actor", unit="mini-batch"):
        for mini_batch in range(2):
            with part(mini_batch, 2):
                report_progress(1, 4)
    assert heard == [("part 1 of 2", 1, 4), ("train actor", 1, 2), ("part 2 of 2", 1, 4), ("train actor", 2, 2)]


def test_a_phase_that_fails_ends_and_an_unfinished_part_is_not_counted(heard):
    with pytest.raises(RuntimeError), phase("train critic"), part(0, 2):
        raise RuntimeError
    report_progress(1, 2)
    assert heard == [("", 1, 2)]


def test_reports_from_threads_are_heard(heard):
    with phase("reward", 4):
        threads = [threading.Thread(target=report_progress, args=(n + 1,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {done for _, done, _ in heard} == {1, 2, 3, 4}


def test_polling_workers(heard):
    begin_call()
    report_progress(3, 8)
    report_tokens(5)
    call = call_progress()
    assert call is not None and (call.done, call.total, call.tokens) == (3, 8, 5)
    assert pickle.loads(pickle.dumps(call)).done == 3
    begin_call()
    assert call_progress() is None
    report_tokens(2)
    call = call_progress()
    assert call is not None and (call.done, call.total, call.tokens) == (0, None, 2)
    begin_call()
    heard.clear()
    with phase("training", 5, unit="step"):
        relay([Phase(done=8, total=8)])  # of a call outside of the step's phases
        with phase("rollout", unit="sample") as rollout:
            relay([None, None])
            relay([Phase(done=3, total=8), None])
            relay([Phase(done=4, total=8, tokens=30), Phase(done=6, total=10, tokens=12)])
            assert rollout.tokens == 42
    assert heard == [("rollout", 3, 16), ("rollout", 10, 18)]


def _phases_of_child(queue):
    report_progress(1, 1)  # would hang on an inherited lock
    queue.put(len(progress.open_phases()))


def test_a_forked_child_reports_to_nobody():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with phase("reward") as reward:
        held = threading.Event()
        release = threading.Event()

        def hold() -> None:
            with progress._board.lock:
                held.set()
                release.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(10)
        child = context.Process(target=_phases_of_child, args=(queue,))
        child.start()
        child.join(20)
        stuck = child.is_alive()
        child.kill()
        release.set()
        holder.join()
        assert not stuck
        assert queue.get() == 0
        assert progress.open_phases() == [reward]


def phase_at(done: float, total: float | None, *, tokens: int = 0, unit: str = "", first=None) -> Phase:
    return Phase("work", total, unit, done, tokens, began=0.0, first=first)


@pytest.mark.parametrize(
    ("shown", "now", "text"),
    [
        (phase_at(0, None), 12.0, "12.0 s so far"),
        (phase_at(0, 1319, unit="sample", tokens=4000), 12.0, "0/1319 samples, 4,000 tokens, 12.0 s so far"),
        (phase_at(40, 100, unit="step", first=(10.0, 40)), 10.0, "40/100 steps, 10.0 s so far"),  # a run that resumes
        (phase_at(50, 100, unit="step", first=(10.0, 40)), 30.0, "50/100 steps, 0.5 steps/s, 1 min 40 s left"),
        (phase_at(2, 4, unit="batch", first=(0.0, 0)), 20.0, "2/4 batches, 10.0 s per batch, 20.0 s left"),
        (phase_at(3, None, unit="sample"), 5.0, "3 samples, 5.00 s so far"),
    ],
)
def test_a_phase_in_words(shown: Phase, now: float, text: str) -> None:
    assert phase_text(shown, now) == f"work: {text}"


def test_a_line_every_ten_seconds_of_a_phase(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("valor.tracking.console.time.monotonic", lambda: now[0])
    get_console.cache_clear()
    with phase("training", 3, unit="step"), phase("rollout", 512, unit="sample"):
        report_progress(0)
        for _ in range(26):
            now[0] += 1.0
            report_progress(10)
            show_phases()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(" > rollout: 10/512 samples" in line for line in lines)


def test_no_control_characters_where_stdout_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("valor.tracking.console.EVERY", 0.0)
    get_console.cache_clear()
    with show_progress(), phase("rollout", 2, unit="sample"):
        time.sleep(0.7)
    lines = {f"rollout: 0/2 samples, 0.{n:02d} s so far" for n in range(100)}
    assert {*capsys.readouterr().out.splitlines()} <= lines
