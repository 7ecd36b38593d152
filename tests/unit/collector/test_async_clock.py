"""The simulated clock of `benchmarks/async_clock.py`: cases that can be worked out by hand, and what always holds."""

from pathlib import Path
from types import ModuleType

import pytest

from valor.user_files import load_file


@pytest.fixture(scope="module")
def clock() -> ModuleType:
    return load_file(str(Path(__file__).parents[3] / "benchmarks" / "async_clock.py"), "path")


def alternating(long: float):
    """Answers of 1 second, every fourth one of `long`."""
    seconds = iter([long if i % 4 == 3 else 1.0 for i in range(10_000)])
    return lambda _: next(seconds)


def test_synchronous_steps_wait_for_the_longest(clock: ModuleType) -> None:
    found = clock.Clock(4, 0, "wait", alternating(5.0), train_seconds=2.0).run(3)
    assert found.seconds == 3 * (5.0 + 2.0) and found.ages == [0] * 12 and found.dropped == 0
    assert found.generating == 3 * (3 * 1.0 + 5.0) and found.depth == 3 * 3 * 4.0  # three are ready for four seconds


@pytest.mark.parametrize("strategy", ["drop", "wait"])
def test_equal_answers_overlap_perfectly(clock: ModuleType, strategy: str) -> None:
    """Generation and training of a second each: 20 steps take 21 seconds, and all samples but the first are one old."""
    found = clock.Clock(4, 1, strategy, lambda _: 1.0).run(20)
    assert found.seconds == pytest.approx(21.0) and found.ages == [0] * 4 + [1] * 76
    assert found.generating == pytest.approx(4 * 21.0) and found.dropped == 0


@pytest.mark.parametrize(("strategy", "seconds"), [("drop", 7.0), ("wait", 12.0)])
def test_a_straggler_is_dropped_or_waited_for(clock: ModuleType, strategy: str, seconds: float) -> None:
    """Two generators, answers of 1 second but for one of 10 that begins at 0; limit 1. Step 1 trains from 2 to 3;
    step 2 is the last that may have the long answer. `wait`: from 10 to 11, and step 3 has what is ready: 12. `drop`:
    from 4 to 5, where the answer is given up after 5 seconds and asked for again; at 6 two are ready: 7."""
    answers = iter([1.0, 10.0, *[1.0] * 100])
    found = clock.Clock(2, 1, strategy, lambda _: next(answers)).run(3)
    assert found.seconds == seconds
    assert (found.dropped, found.wasted) == ((1, 5.0) if strategy == "drop" else (0, 0.0))
    assert (10.0 in found.lengths) == (strategy == "wait")


@pytest.mark.parametrize("generators", [5, 64])
@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_what_always_holds(clock: ModuleType, generators: int, max_age: int) -> None:
    """No sample is too old; waiting drops none, and is at most max_age + 1 times as fast as synchronous steps; dropping
    takes away long answers; generators are never busier than always."""
    draw = clock.heavy_tailed(lambda draw: draw.paretovariate(1.5) / 3.0)
    alone = clock.Clock(generators, 0, "wait", draw).run(25)
    for strategy in ("drop", "wait"):
        run = clock.Clock(generators, max_age, strategy, draw)
        found = run.run(25)
        assert len(found.ages) == 25 * generators and max(found.ages) == max_age
        assert len(run.queue.groups) <= run.queue.capacity
        assert 0.0 <= found.wasted <= found.generating <= generators * found.seconds + 1e-9
        assert found.seconds >= 25 * 1.0 and found.seconds <= alone.seconds + 1e-9
        if strategy == "wait":
            assert found.dropped == 0 and alone.seconds / found.seconds <= max_age + 1
        elif max_age:
            assert found.dropped > 0 and sum(found.lengths) < 0.95 * sum(alone.lengths)  # long answers go first
