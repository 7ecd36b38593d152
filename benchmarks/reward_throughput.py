"""Grader processes against a plain loop, on a batch as bad graders make it.

    python benchmarks/reward_throughput.py [--workers N] [--timeout 2] [--hang 4]

1024 samples in random order: 532 cheap ones (GSM8K), 480 that wait 50 ms as for a server, 4 that hang, 4 that end their
process, 4 that eat memory. The loop grades them one after another in one process and ends a hung one by an alarm at the
same timeout; it is spared the last eight, which it would not survive.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import Counter
from typing import Any

from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor, Sample
from valor.rewards.gsm8k import grade_strict

COUNTS = {"cheap": 532, "wait": 480, "hang": 4, "crash": 4, "memory": 4}
FATAL = "crash", "memory"


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """A grader with the behaviour that its data source names."""
    if data_source == "wait":
        time.sleep(0.05)
    elif data_source == "hang":
        time.sleep(1e6)
    elif data_source == "crash":
        os._exit(1)
    elif data_source == "memory":
        held = []
        while True:
            held.append(bytearray(2**24))
    return float(grade_strict(data_source, solution_str, ground_truth, extra_info)["score"])


def make_samples(num_hung: int) -> list[Sample]:
    """The batch; every second answer is right."""
    rng = random.Random(0)
    kinds = [kind for kind, count in (COUNTS | {"hang": num_hung}).items() for _ in range(count)]
    rng.shuffle(kinds)
    return [Sample(kind, f"6 times 7 is {42 + i % 2}.\n#### {42 + i % 2}", "42") for i, kind in enumerate(kinds)]


def by_loop(samples: list[Sample], timeout: float) -> list[float | None]:
    """Scores, None for those that hung; seconds go by as in any loop without processes."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    scores: list[float | None] = []
    for sample in samples:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            scores.append(compute_score(*sample[:4]))
        except TimeoutError:
            scores.append(None)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return scores


def main() -> None:
    """Print both times, the errors by kind, and whether all other scores agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--timeout", type=float, default=2.0)
    parser.add_argument("--hang", type=int, default=COUNTS["hang"])
    args = parser.parse_args()
    samples = make_samples(args.hang)

    custom = CustomFunction(os.path.abspath(__file__))
    with RewardExecutor(num_workers=args.workers, timeout=args.timeout, custom=custom, memory_mb=256) as executor:
        executor.score([s for s in samples if s.data_source == "cheap"])  # the processes are up
        start = time.perf_counter()
        results = executor.score(samples)
        pool_seconds = time.perf_counter() - start

    spared = [i for i, s in enumerate(samples) if s.data_source not in FATAL]
    start = time.perf_counter()
    scores = by_loop([samples[i] for i in spared], args.timeout)
    loop_seconds = time.perf_counter() - start

    agree = all(results[i].score == (score or 0.0) for i, score in zip(spared, scores, strict=True))
    errors = Counter((samples[i].data_source, r.kind) for i, r in enumerate(results) if r.error is not None)
    print(f"{len(samples)} samples, {len(os.sched_getaffinity(0))} cores")
    print(f"processes {pool_seconds:.2f} s, loop {loop_seconds:.2f} s (without {', '.join(FATAL)}): ", end="")
    print(f"{loop_seconds / pool_seconds:.1f} times; scores {'agree' if agree else 'DIFFER'}")
    print("errors:", ", ".join(f"{count} {what} -> {kind}" for (what, kind), count in sorted(errors.items())))


if __name__ == "__main__":
    main()
