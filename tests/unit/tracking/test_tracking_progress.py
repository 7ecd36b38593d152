"""Ambient progress: phases, parts, threads, listeners, and the two ways of showing it."""

import io
import multiprocessing
import re
import threading

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from valor.tracking import progress
from valor.tracking.console import PhaseView, format_pace, get_console, show_progress
from valor.tracking.progress import Latest, Progress, part, phase, relay, report_progress, report_tokens


@pytest.fixture
def heard():
    """Every report made while the test runs."""
    reports: list[Progress] = []
    remove = progress.add_listener(reports.append)
    yield reports
    remove()


def test_a_report_reaches_the_innermost_phase(heard):
    with phase("training", 2, unit="step"):
        with phase("rollout", 8, unit="sample"):
            report_progress(3)
        report_progress(1)
    assert heard == [
        Progress("training", 0, 2, "step", 0, "start"),
        Progress("rollout", 0, 8, "sample", 1, "start"),
        Progress("rollout", 3, 8, "sample", 1, "update"),
        Progress("rollout", 3, 8, "sample", 1, "end"),
        Progress("training", 1, 2, "step", 0, "update"),
        Progress("training", 1, 2, "step", 0, "end"),
    ]


def test_a_total_that_comes_with_the_report_wins(heard):
    with phase("values"):
        report_progress(1, 5)
        report_progress(2)
    assert [(one.done, one.total) for one in heard] == [(0, None), (1, 5), (2, 5), (2, 5)]


def test_parts_turn_inner_counts_into_shares_of_the_whole(heard):
    with phase("train actor"):
        for mini_batch in range(2):
            with part(mini_batch, 2):
                report_progress(1, 4)
                with part(1, 2):
                    report_progress(1, 2)
    assert [(one.done, one.total) for one in heard if one.state == "update"] == [
        (0.25, 2),
        (0.75, 2),  # micro-batch 1 of 2 in the second half
        (1.0, 2),
        (1, 2),
        (1.25, 2),
        (1.75, 2),
        (2.0, 2),
        (2, 2),
    ]


def test_a_phase_that_fails_ends_and_an_unfinished_part_is_not_counted(heard):
    with pytest.raises(RuntimeError), phase("train critic"), part(0, 2):
        raise RuntimeError
    assert [(one.state, one.done) for one in heard] == [("start", 0), ("end", 0)]
    report_progress(1, 2)
    assert heard[-1].phase == ""


def test_reports_from_threads_are_heard(heard):
    with phase("reward", 4):
        threads = [threading.Thread(target=report_progress, args=(n + 1,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {one.done for one in heard if one.state == "update"} == {1, 2, 3, 4}


def test_polling_workers(heard):
    latest = Latest()
    remove = progress.add_listener(latest)
    try:
        latest.begin()
        report_progress(3, 8)
        report_tokens(5)
        assert latest.report == Progress("", 3, 8, tokens=5)
        latest.begin()
        assert latest.report is None
        report_tokens(2)
        assert latest.report == Progress("", 0, None, tokens=2)
        latest.begin()
    finally:
        remove()
    report_progress(4, 8)
    assert latest.report is None
    with phase("training", 5, unit="step"):
        relay([Progress("", 8, 8)])  # of a call outside of the step's phases
        with phase("rollout", unit="sample"):
            relay([None, None])
            relay([Progress("", 3, 8), None])
            relay([Progress("", 4, 8, tokens=30), Progress("", 6, 10, tokens=12)])
            assert heard[-1].tokens == 42
    updates = [(one.phase, one.done, one.total) for one in heard if one.phase and one.state == "update"]
    assert updates == [("rollout", 3, 16), ("rollout", 10, 18)]


def _listeners_of_child(queue):
    report_progress(1, 1)  # would hang on an inherited lock, or draw on the parent's terminal
    queue.put(len(progress._board.listeners))


def test_a_forked_child_listens_to_nobody(heard):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with phase("reward"):
        held = threading.Event()
        release = threading.Event()

        def hold() -> None:
            with progress._board.lock:
                held.set()
                release.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(10)
        child = context.Process(target=_listeners_of_child, args=(queue,))
        child.start()
        child.join(20)
        stuck = child.is_alive()
        child.kill()
        release.set()
        holder.join()
    assert not stuck
    assert queue.get() == 0
    assert len(progress._board.listeners) == 1


def test_pace_starts_at_the_first_report():
    now = [0.0]
    bars = RichProgress(disable=True, get_time=lambda: now[0], speed_estimate_period=3600)
    number = bars.add_task("training", total=100, unit="step")

    def pace(done: float, at: float) -> str:
        now[0] = at
        bars.update(number, completed=done)
        return format_pace(bars.tasks[0])

    assert pace(0, 1.0) == ""
    assert pace(40, 10.0) == ""  # resumed at step 40
    assert pace(50, 30.0) == "0.5 steps/s, 1 min 40 s left"
    assert pace(52, 80.0) == "5.83 s per step, 4 min 40 s left"


def test_plain_lines_tell_of_a_phase_when_it_begins_and_every_ten_seconds():
    stream = io.StringIO()
    now = [0.0]
    listener = PhaseView(Console(file=stream, width=200), clock=lambda: now[0])
    remove = progress.add_listener(listener)
    try:
        with phase("adv", 1):
            now[0] = 9.0
            report_progress(1)
        with phase("rollout", 512, unit="sample"):
            for second in range(0, 26):
                now[0] = 9.0 + second
                report_progress(10 * second)
        with phase("train actor"), part(1, 4):
            now[0] += 20.0
            report_progress(1, 2)
        with phase("train critic", 4, unit="mini-batch"):
            now[0] += 20.0
            report_progress(1)
            now[0] += 10.0
            report_progress(2)
        with phase("rollout", 512, unit="sample"):  # not for the first time
            pass
        with phase("validation", 1319, unit="sample"):  # whose samples are long: none ends, and nobody reports one
            now[0] += 12.0
            report_tokens(4000)
            now[0] += 12.0
            report_tokens(5000)
            now[0] += 10.0
            listener.tell()
            listener.tell()
    finally:
        remove()
    assert stream.getvalue().splitlines() == [
        "adv: 0/1",
        "rollout: 0/512 samples",
        "rollout: 100/512 samples, 10 samples/s, 42.0 s left",
        "rollout: 200/512 samples, 10 samples/s, 32.0 s left",
        "rollout: finished in 25.0 s",
        "train actor: begins",
        "train actor: 38%, 20.0 s so far",
        "train actor: finished in 20.0 s",
        "train critic: 0/4 mini-batches",
        "train critic: 1/4 mini-batches, 20.0 s so far",
        "train critic: 2/4 mini-batches, 10.0 s per mini-batch, 20.0 s left",
        "train critic: finished in 30.0 s",
        "validation: 0/1319 samples",
        "validation: 0/1319 samples, 4,000 tokens, 12.0 s so far",
        "validation: 0/1319 samples, 9,000 tokens, 24.0 s so far",
        "validation: 0/1319 samples, 9,000 tokens, 34.0 s so far",
        "validation: finished in 34.0 s",
    ]


def test_no_control_characters_where_stdout_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("valor.tracking.console.PLAIN_EVERY", 0.0)
    get_console.cache_clear()
    with show_progress(), phase("rollout", 2, unit="sample"):
        report_progress(1)
    lines = r"rollout: 0/2 samples\nrollout: 1/2 samples, 0\.00 s so far\nrollout: finished in \d+\.\d\d s\n"
    assert re.fullmatch(lines, capsys.readouterr().out)


def test_live_bars_show_the_phases_of_a_step_together():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    view = PhaseView(console)
    remove = progress.add_listener(view)

    def rows() -> list[str]:
        return [str(task.description).strip() for task in view.bars.tasks]

    try:
        with phase("training", 3, unit="step"):
            report_progress(0)
            with phase("rollout", 8, unit="sample"):
                report_progress(8)
            with phase("values"):
                report_progress(1, 2)
                assert rows() == ["training", "rollout", "values"]
            report_progress(1)
            assert rows() == ["training"]
            with phase("rollout", 8, unit="sample"):
                with phase("tool calls"):
                    assert rows() == ["training", "rollout", "tool calls"]
                assert rows() == ["training", "rollout", "tool calls"]
            assert rows() == ["training", "rollout"]
        assert rows() == []
    finally:
        remove()
    drawn = stream.getvalue()
    assert "8/8 samples" in drawn and "training" in drawn
    assert "\x1b[?25h" in drawn  # the cursor is back
