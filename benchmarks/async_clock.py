"""How much faster is training whose samples are drawn ahead? Generators that only sleep, on a clock that only counts.

    python benchmarks/async_clock.py                                          # the tables, in about a minute
    python benchmarks/async_clock.py --out benchmarks/results/async_clock.md

Each generator works on one answer at a time; how long that takes is heavy-tailed (log-normal or Pareto, mean 1, cut off
at 16 as at a longest response). The trainer takes a batch of as many prompts as there are generators, and works on it
for as long as an answer takes on average, so that neither side is the bottleneck. Who is begun, dropped and handed over
is the policy of the collector's own `SampleQueue`. Time goes from event to event; nothing waits for real.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from page import print_or_write
from valor.collector.queue import Group, SampleQueue

GENERATORS = (8, 32, 128, 512)
AGES = (0, 1, 2, 4, 8)
LONGEST = 16.0
Strategy = Literal["drop", "wait"]
Draw = Callable[[random.Random], float]


@dataclass(eq=False, kw_only=True)
class Answer(Group):
    """One that takes so many seconds."""

    seconds: float


@dataclass
class Measured:
    """Of a run of `steps` steps: seconds, and what was done in them."""

    steps: int
    seconds: float = 0.0
    generating: float = 0.0  # seconds, summed over generators
    wasted: float = 0.0  # of these, on answers that were dropped
    training: float = 0.0
    depth: float = 0.0  # finished groups that nobody has taken, times seconds
    dropped: int = 0
    ages: list[int] = field(default_factory=list)  # of each group that was trained on
    lengths: list[float] = field(default_factory=list)  # seconds that its answer took


class Clock:
    """Generators, a queue and a trainer in simulated time."""

    def __init__(
        self, generators: int, max_age: int, strategy: Strategy, draw: Draw, train_seconds: float = 1.0, seed: int = 0
    ) -> None:
        self.batch, self.train_seconds, self.draw, self.random = generators, train_seconds, draw, random.Random(seed)
        self.queue = SampleQueue[Answer]((max_age + 1) * generators, max_age, strategy)
        self.now, self.version, self.num_finished = 0.0, 0, 0
        self.waiting: deque[Answer] = deque()  # begun, without a generator
        self.running: dict[int, tuple[Answer, float]] = {}  # by the group's number, with the time at which it started
        self.events: list[tuple[float, int, Answer, int]] = []  # time, order, group, attempt
        self.numbers, self.order = count(), count()

    def run(self, steps: int) -> Measured:
        """`steps` steps: transfer of weights, drop what is too old, wait for a batch, train on it."""
        self.found = Measured(steps)
        for _ in range(steps):
            for group in self.waiting:  # no token yet
                self.queue.begin(group, self.version)
            self._drop()
            self._top_up()
            while self.num_finished < self.batch or not self.queue.has(self.batch, self.version + 1):
                self._until(self.events[0][0])
            taken = self.queue.take(self.batch)
            self.num_finished -= len(taken)
            self.found.ages += [self.version - group.oldest for group in taken]
            self.found.lengths += [group.seconds for group in taken]
            self._until(self.now + self.train_seconds)
            self.found.training += self.train_seconds
            self.version += 1
        for _, started in self.running.values():
            self.found.generating += self.now - started
        self.found.seconds = self.now
        return self.found

    def _top_up(self) -> None:
        """Begin what there is room for. Where the batch was that is in training, there is none until the next step."""
        for _ in range(self.queue.room):
            self._begin(Answer(next(self.numbers), seconds=self.draw(self.random)))

    def _begin(self, group: Answer) -> None:
        self.queue.begin(group, self.version)
        self.waiting.append(group)
        self._assign()

    def _assign(self) -> None:
        while self.waiting and len(self.running) < self.batch:
            group = self.waiting.popleft()
            group.oldest = self.version
            self.running[group.number] = group, self.now
            heapq.heappush(self.events, (self.now + group.seconds, next(self.order), group, group.attempt))

    def _drop(self) -> None:
        """Groups that are too old begin anew, with another answer."""
        for group in self.queue.too_old(self.version):
            self.found.dropped += 1
            spent = group.seconds
            if not group.finished:
                spent = self.now - self.running.pop(group.number)[1]
                self.found.generating += spent
            else:
                self.num_finished -= 1
            self.found.wasted += spent
            group.attempt, group.seconds = group.attempt + 1, self.draw(self.random)
            self._begin(group)

    def _until(self, time: float) -> None:
        """Let time pass."""
        while self.events and self.events[0][0] <= time:
            at, _, group, attempt = heapq.heappop(self.events)
            if attempt != group.attempt:  # dropped meanwhile
                continue
            self._pass(at)
            self.found.generating += group.seconds
            del self.running[group.number]
            self.queue.finish(group, group.oldest)
            self.num_finished += 1
            self._assign()
        self._pass(time)

    def _pass(self, time: float) -> None:
        self.found.depth += (time - self.now) * self.num_finished
        self.now = time


def heavy_tailed(raw: Draw) -> Draw:
    """Cut off at LONGEST, with mean 1."""
    sample = random.Random(0)
    mean = statistics.fmean(min(raw(sample), LONGEST) for _ in range(200_000))
    return lambda draw: min(raw(draw), LONGEST) / mean


TAILS: dict[str, Draw] = {
    "log-normal, sigma 1": lambda draw: math.exp(draw.gauss(0.0, 1.0) - 0.5),
    "Pareto, alpha 1.5": lambda draw: draw.paretovariate(1.5) / 3.0,
}


def tables(generators: tuple[int, ...] = GENERATORS, steps: int = 40) -> str:
    """A line for each number of generators and limit of age; in a cell first drop, then wait."""
    names = [
        "speed-up",
        "generators busy",
        "for nothing",
        "dropped",
        "trainer busy",
        "age",
        "oldest",
        "ready",
        "length",
    ]
    lines = []
    for tail, raw in TAILS.items():
        draw = heavy_tailed(raw)
        lines += ["", f"| {tail}: generators | limit of age | {' | '.join(names)} |"]
        lines.append("|---:|---:|" + "---:|" * len(names))
        for number in generators:
            alone = Clock(number, 0, "wait", draw).run(steps)
            for max_age in AGES:
                both = [Clock(number, max_age, strategy, draw).run(steps) for strategy in ("drop", "wait")]
                rows = [cells(found, alone, number) for found in both]
                shown = [a if a == b else f"{a} / {b}" for a, b in zip(*rows, strict=True)]
                lines.append(f"| {number} | {max_age} | {' | '.join(shown)} |")
            longest = alone.seconds / steps - 1.0
            lines.append(f"| {number} | bound | {1.0 + longest:.2f} | | | | | | | | {longest:.1f} |")
    return "\n".join(lines[1:])


def cells(found: Measured, alone: Measured, generators: int) -> list[str]:
    """The numbers of a line."""
    total = generators * found.seconds
    return [
        f"{alone.seconds / found.seconds:.2f}",
        f"{found.generating / total:.0%}",
        f"{found.wasted / total:.0%}",
        f"{found.dropped / len(found.ages):.0%}",
        f"{found.training / found.seconds:.0%}",
        f"{statistics.fmean(found.ages):.1f}",
        f"{max(found.ages)}",
        f"{found.depth / found.seconds:.0f}",
        f"{statistics.fmean(found.lengths):.2f}",
    ]


if __name__ == "__main__":
    print_or_write(__doc__, "tables", tables)
