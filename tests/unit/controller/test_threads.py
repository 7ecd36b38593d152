"""The number of CPU threads: what is asked for, what a run in the folder had, what is quickest now."""

import math

import pytest
import torch

from valor.config import TrainerConfig
from valor.controller import threads
from valor.controller.threads import threads_for
from valor.tracking.rundir import write_run_info


@pytest.fixture
def quickest(monkeypatch):
    """Set the seconds that each count of threads takes; the measurements that were made."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    measured: list[int] = []

    def pose(seconds: dict[int, float]) -> list[int]:
        threads._quickest.cache_clear()

        def posed(count, factors, limit):
            torch.set_num_threads(count)
            measured.append(count)
            return seconds[count] if seconds[count] <= limit else math.inf

        monkeypatch.setattr(threads, "_seconds", posed)
        return measured

    yield pose
    threads._quickest.cache_clear()


def trainer(tmp_path, **more) -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(tmp_path), **more)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
        ({1: 1.0, 2: 0.6, 4: 2.0}, 2),
        ({1: 1.0, 2: 9.0, 4: 9.0}, 1),
        ({1: 0.38, 2: 0.5, 4: 0.4}, 4),  # no difference to speak of
    ],
)
def test_as_many_as_are_quickest_once_and_told(tmp_path, quickest, capsys, seconds, chosen):
    measured, before = quickest(seconds), torch.get_num_threads()
    (count, why), again = (threads_for(trainer(tmp_path), 4, measure=True) for _ in range(2))
    assert count == chosen and again == (count, why)
    assert sorted(measured) == [1, 2, 4] and torch.get_num_threads() == before
    assert (f"threads: {chosen} of 4" in why and "trainer.num_threads=4" in why) == (why != "") == (chosen != 4)
    assert capsys.readouterr() == ("", "")  # who reads the configuration may yet refuse it


def test_what_is_asked_for_is_taken_unmeasured(tmp_path, quickest, monkeypatch):
    measured = quickest({1: 1.0, 2: 9.0, 4: 9.0})
    assert threads_for(trainer(tmp_path, num_threads=3), 4, measure=True)[0] == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert threads_for(trainer(tmp_path), 4, measure=True)[0] == 2
    assert threads_for(trainer(tmp_path, num_threads=3), 4, measure=False)[0] == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_for(trainer(tmp_path), 4, measure=False)[0] == 4
    assert threads_for(trainer(tmp_path), 1, measure=True)[0] == 1
    assert measured == []


def test_a_run_goes_on_with_the_threads_that_it_had(tmp_path, quickest):
    measured = quickest({1: 1.0, 2: 0.5, 4: 0.2})
    write_run_info(tmp_path, threads=1)
    assert threads_for(trainer(tmp_path), 4, measure=True)[0] == 1 and measured == []
    assert threads_for(trainer(tmp_path, resume_mode="disable"), 4, measure=True)[0] == 4


def test_the_measurement_ends_when_threads_wait(monkeypatch):
    factors = [[torch.ones(2, 2), torch.ones(2, 2)]]
    assert 0 < threads._seconds(1, factors, math.inf) < 5
    assert threads._seconds(1, factors, 0.0) == math.inf
