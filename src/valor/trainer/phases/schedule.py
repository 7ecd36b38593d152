"""Runs a list of phases on a batch: each as soon as its columns exist and its processes are free."""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from valor.controller.group import Pools
from valor.data.batch import Batch
from valor.data.images import IMAGES
from valor.errors import UserError, did_you_mean
from valor.tracking.metrics import Timer
from valor.trainer.phases.base import COLLECTED, COLLECTED_SOMETIMES, EVERY_COLUMN, Metrics, Phase, Resources

Result = tuple[Batch, Metrics]


class Schedule:
    """The phases of a run in their order, and for each the earlier ones whose columns it reads.

    UserError: two phases have one name, or a phase reads a column that neither the collector nor an earlier phase adds.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = list(phases)
        self.sources: dict[str, list[Phase]] = {}
        available = {*COLLECTED}
        for number, phase in enumerate(self.phases):
            if phase.name in self.sources:
                raise UserError(f"two phases are called '{phase.name}': give each a name of its own")
            if missing := sorted(phase.reads - available - EVERY_COLUMN):
                hint = did_you_mean(missing[0], {*available, *COLLECTED_SOMETIMES})
                hint = hint or f" (there are {', '.join(sorted(available))})"
                raise UserError(f"phase '{phase.name}' reads '{missing[0]}', which no phase before it adds{hint}")
            read = phase.reads | phase.reads_if_there
            earlier = [other for other in self.phases[:number] if other.adds]
            self.sources[phase.name] = [other for other in earlier if other.adds & read or read & EVERY_COLUMN]
            available |= phase.adds

    def bind(self, resources: Resources) -> None:
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

    def save(self, folder: Path) -> None:
        """A folder for each phase that writes tensors."""
        for phase in self.phases:
            (folder / phase.name).mkdir(parents=True)
            phase.save(folder / phase.name)
            if not any((folder / phase.name).iterdir()):
                (folder / phase.name).rmdir()
        if not any(folder.iterdir()):
            folder.rmdir()

    def load(self, folder: Path) -> None:
        """What `save` wrote."""
        for phase in self.phases:
            if (folder / phase.name).is_dir():
                phase.load(folder / phase.name)

    def run(self, batch: Batch, step: int, timer: Timer, pools: Pools) -> Result:
        """The batch with all columns, and the metrics of all phases.

        Where roles have processes of their own, phases of different pools, and those of the driver, run at the same
        time; in one process they run in the order of the list.
        """
        for phase in self.phases:
            phase.refuse(batch)
        results: dict[str, Future[Result]] = {}
        waiting = list(self.phases)
        # torch's number of threads is a thread's own, and decides the order of sums.
        with ThreadPoolExecutor(1, "driver", torch.set_num_threads, (torch.get_num_threads(),)) as driver:
            while waiting:
                done = {name for name, result in results.items() if result.done()}
                ready = [phase for phase in waiting if done.issuperset(each.name for each in self.sources[phase.name])]
                if not ready:
                    wait([result for result in results.values() if not result.done()], return_when=FIRST_COMPLETED)
                for phase in ready:
                    waiting.remove(phase)
                    columns = [results[source.name].result()[0] for source in self.sources[phase.name]]
                    task = (_run, phase, batch, columns, step, timer)
                    if phase.role is not None:
                        results[phase.name] = pools.submit(phase.role, *task)
                    elif pools.apart:
                        results[phase.name] = driver.submit(*task)
                    else:
                        results[phase.name] = Future()
                        results[phase.name].set_result(_run(*task[1:]))
        metrics = Metrics()
        for phase in self.phases:
            columns, measured = results[phase.name].result()
            batch, metrics = batch.union(columns), metrics | measured
        return batch, metrics


def _run(phase: Phase, batch: Batch, columns: Sequence[Batch], step: int, timer: Timer) -> Result:
    for added in columns:
        batch = batch.union(added)
    if not (phase.reads | phase.reads_if_there) & EVERY_COLUMN:
        there = {*phase.reads_if_there, *[IMAGES] * ("prompts" in phase.reads)}  # which belong to the prompts
        batch = batch.select([*sorted(phase.reads), *sorted(name for name in there if name in batch)])
    if phase.skips(batch, step):
        return Batch(), {}
    with timer(phase.timing(batch, step)):
        result, metrics = phase.run(batch, step)
    undeclared = {*result.tensors, *result.objects} - phase.adds
    assert not undeclared, f"phase '{phase.name}' adds {sorted(undeclared)}, which it does not declare"
    return result, metrics
