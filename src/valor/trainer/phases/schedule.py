"""Runs a list of phases on a batch: each as soon as its columns are there and its processes are free."""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import torch

from valor.controller.group import Pools
from valor.data.batch import Batch
from valor.errors import UserError, did_you_mean
from valor.tracking.metrics import Timer
from valor.trainer.phases.base import COLLECTED, COLLECTED_SOMETIMES, EVERY_COLUMN, Metrics, Phase, Resources


class Schedule:
    """The phases of a run in their order, and for each the earlier ones whose columns it reads.

    UserError: two phases have one name, or a phase reads a column that neither the collector nor an earlier phase adds.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = list(phases)
        self.sources: dict[str, list[Phase]] = {}
        there = {*COLLECTED}
        for number, phase in enumerate(self.phases):
            if phase.name in self.sources:
                raise UserError(f"two phases are called '{phase.name}': give each a name of its own")
            missing = sorted(phase.reads - there - EVERY_COLUMN)
            if missing:
                hint = (
                    did_you_mean(missing[0], {*there, *COLLECTED_SOMETIMES})
                    or f" (there are {', '.join(sorted(there))})"
                )
                raise UserError(f"phase '{phase.name}' reads '{missing[0]}', which no phase before it adds{hint}")
            read = phase.reads | phase.reads_if_there
            everything = bool(read & EVERY_COLUMN)
            earlier = self.phases[:number]
            self.sources[phase.name] = [one for one in earlier if one.adds & read or (everything and one.adds)]
            there |= phase.adds

    def bind(self, resources: Resources) -> None:
        """Gives the phases what they work with."""
        for phase in self.phases:
            phase.resources = resources

    def state_dict(self) -> dict[str, Any]:
        """The state of those phases that have one, by their names."""
        return {phase.name: state for phase in self.phases if (state := phase.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Phases that the earlier run did not have start afresh."""
        for phase in self.phases:
            if phase.name in state:
                phase.load_state_dict(state[phase.name])

    def run(self, batch: Batch, step: int, timer: Timer, pools: Pools) -> tuple[Batch, Metrics]:
        """The batch with all columns, and the metrics of all phases.

        Where roles have processes of their own, phases of different pools, and those of the driver, run at the same
        time; in one process they run in the order of the list.
        """
        for phase in self.phases:
            phase.refuse(batch)
        results: dict[str, Future[tuple[Batch, Metrics]]] = {}
        waiting = list(self.phases)
        # torch's number of threads is a thread's own, and decides the order of sums.
        with ThreadPoolExecutor(1, "driver", torch.set_num_threads, (torch.get_num_threads(),)) as driver:
            while waiting:
                ready = [phase for phase in waiting if self._is_ready(phase, results)]
                for phase in ready:
                    columns = [results[source.name].result()[0] for source in self.sources[phase.name]]
                    task = (_run, phase, batch, columns, step, timer)
                    if phase.role is not None:
                        results[phase.name] = pools.submit(phase.role, *task)
                    elif pools.apart:
                        results[phase.name] = driver.submit(*task)
                    else:
                        results[phase.name] = Future()
                        results[phase.name].set_result(_run(*task[1:]))
                    waiting.remove(phase)
                if waiting and not any(self._is_ready(phase, results) for phase in waiting):
                    wait([one for one in results.values() if not one.done()], return_when=FIRST_COMPLETED)
        metrics = Metrics()
        for phase in self.phases:
            columns, found = results[phase.name].result()
            batch, metrics = batch.union(columns), metrics | found
        return batch, metrics

    def _is_ready(self, phase: Phase, results: dict[str, Future[tuple[Batch, Metrics]]]) -> bool:
        return all(one.name in results and results[one.name].done() for one in self.sources[phase.name])


def _run(phase: Phase, batch: Batch, columns: Sequence[Batch], step: int, timer: Timer) -> tuple[Batch, Metrics]:
    for more in columns:
        batch = batch.union(more)
    read = phase.reads | phase.reads_if_there
    if not read & EVERY_COLUMN:
        batch = batch.select([*sorted(phase.reads), *sorted(name for name in phase.reads_if_there if name in batch)])
    name = phase.timing(batch, step)
    with timer(name) if name is not None else nullcontext():
        added, metrics = phase.run(batch, step)
    undeclared = {*added.tensors, *added.objects} - phase.adds
    assert not undeclared, f"phase '{phase.name}' adds {sorted(undeclared)}, which it does not declare"
    return added, metrics
