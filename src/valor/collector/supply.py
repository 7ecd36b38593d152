"""The supply of samples to training: the interface, and the supply by whole batches.

Synchronous training is the supply by batches with depth 0: a batch is drawn when a step takes it, by the newest
weights. With a depth the next batches are generated meanwhile, each by weights of a prescribed age. The supply by
prompts (`collector/ahead.py`) is a second mechanism, since there the age follows from the speed of each episode: which
samples make a batch is decided when they have ended, and no run of it repeats bit for bit.
"""

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from valor.collector.generation import Generation, prompt_batch, sampling_params
from valor.collector.grading import Grading
from valor.data.batch import Batch
from valor.errors import WorkersReplaced
from valor.tracking.metrics import Histogram, Timer, histogram
from valor.tracking.progress import phase

_STATE, _TENSORS = "queue.json", "queue.safetensors"


@dataclass(eq=False)
class Drawn:
    """Prompts of one draw from the data: `rows` are their numbers there, `first` the number of the first in the draw.

    `draw` is the second word of the samples' keys (`prompt_batch`).
    """

    draw: int
    first: int
    rows: Sequence[int]


@dataclass(eq=False, kw_only=True)
class Unit:
    """Prompts that are answered together, and the rows of their episodes when all have ended."""

    drawn: Drawn
    prompts: Batch
    rows: Batch | None = None


Item = tuple[dict[str, Any], Batch | None]
"""A unit in a checkpoint: the fields of its Drawn (and `oldest`), and its rows if there are such."""


class Supply(ABC):
    """Draws prompts, has them answered, and hands their samples over in batches."""

    def __init__(self, generation: Generation, grading: Grading) -> None:
        self.generation, self.grading = generation, grading
        self.config, self.inputs = generation.config, generation.inputs
        self.draws = 0
        self.again: list[int] = []  # rows that are drawn before any others
        self._params = sampling_params(self.config)
        self._taken: list[tuple[int, Any]] = []  # steps and units of theirs
        # Ahead of training nothing is drawn that no step will take, where every draw is a step's batch.
        one_each = self.config.trainer.v1.runs_ahead and not self.config.algorithm.filter_groups.enable
        self.last_draw = self.inputs.total_steps if one_each else None

    def take(self, wanted: int, step: int, timer: Timer) -> Batch:
        """Samples of `wanted` prompts for step `step`, or of fewer where a draw has fewer; not graded yet."""
        self._taken = [(of_step, unit) for of_step, unit in self._taken if of_step == step]
        units = self._take(wanted, step, timer)
        self._taken += ((step, unit) for unit in units)
        rows, episodes = list[Batch](), 0
        for unit in units:
            assert unit.rows is not None, "its episodes have ended"
            rows.append(Batch(unit.rows.tensors, unit.rows.objects))
            if "episode" in unit.rows:
                rows[-1]["episode"] = unit.rows["episode"] + episodes
            episodes += len(unit.prompts)
        prompts = Batch.concat([unit.prompts for unit in units])
        key, size = prompts["episode_key"], self.inputs.sampler.batch_size * self.config.actor_rollout_ref.rollout.n
        return self.generation.joined(prompts, Batch.concat(rows), key[:, 1] * size + key[:, 2])

    @abstractmethod
    def _take(self, wanted: int, step: int, timer: Timer) -> Sequence[Unit]:
        """Units whose episodes have ended, for `take`."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Context in which nobody generates, so that the rollout role can be called."""

    @abstractmethod
    def items(self, step: int) -> list[Item]:
        """What a checkpoint after step `step` must hold."""

    @abstractmethod
    def restore(self, items: Sequence[Item]) -> None:
        """Go on from what `items` gave."""

    def close(self) -> None:  # noqa: B027  # a batch under way ends with its processes
        """End what is under way."""

    def metrics(self, batch: Batch) -> dict[str, float | Histogram]:
        """How old a batch's samples are: `off_policy/age/*` in transfers of weights."""
        mask = batch["response_mask"]
        ages = self.generation.weights.ages(batch["weights_versions"]).float()
        of_tokens = ages[mask != 0]
        out: dict[str, float | Histogram] = {}
        if len(of_tokens):
            out |= {"off_policy/age/mean": float(of_tokens.mean()), "off_policy/age/max": float(of_tokens.max())}
            spans = (ages * mask).amax(-1) - torch.where(mask != 0, ages, torch.inf).amin(-1)
            out["off_policy/partial_ratio"] = float((spans.isfinite() & (spans > 0)).float().mean())
        if (shown := histogram(ages, mask)) is not None:
            out["off_policy/age/histogram"] = shown
        return out

    def draw(self) -> Drawn:
        self.draws += 1
        size = self.inputs.sampler.batch_size
        while len(self.again) < size:
            self.again += self.inputs.sampler.next_batch()
        rows, self.again = self.again[:size], self.again[size:]
        return Drawn(self.draws, 0, rows)

    def prompts_of(self, drawn: Drawn) -> Batch:
        """Their prompts, `rollout.n` rows each."""
        prompts = prompt_batch([self.inputs.train[i] for i in drawn.rows], self.config, drawn.draw, drawn.first)
        prompts.objects["uid"] = [f"{drawn.draw}.{uid}" for uid in prompts.objects["uid"]]
        return prompts

    def save(self, folder: Path, step: int) -> None:
        """Write what `load` needs after step `step`."""
        folder.mkdir(parents=True)
        items, tensors = [], {}
        for number, (facts, rows) in enumerate(self.items(step)):
            items.append(facts | {"objects": None if rows is None else rows.objects})
            if rows is not None:
                tensors |= {f"{number}/{name}": column.contiguous() for name, column in rows.tensors.items()}
        state = {
            "draws": self.draws,
            "again": self.again,
            "sampler": self.inputs.sampler.state_dict(),
            "versions": self.generation.weights.versions,
            "items": items,
        }
        (folder / _STATE).write_text(json.dumps(state, default=str))
        save_file(tensors, folder / _TENSORS)

    def load(self, folder: Path, *, anew: bool) -> None:
        """Go on from what `save` wrote. anew: after a change of settings, so from the prompts alone."""
        state, tensors = json.loads((folder / _STATE).read_text()), load_file(folder / _TENSORS)
        self.draws, self.again = state["draws"], state.get("again", [])
        self.inputs.sampler.load_state_dict(state["sampler"])
        self.generation.weights.versions = state["versions"]
        if anew:
            rows = [row for facts in state["items"] for row in facts["rows"]] + self.again
            self.again = [row for row in rows if row < len(self.inputs.train)]
            count = len(self.again)
            self.generation.say(f"{count} prompts were ahead of training, and are answered anew after that change")
            return
        items: list[Item] = []
        for number, facts in enumerate(state["items"]):
            objects, prefix = facts.pop("objects"), f"{number}/"
            columns = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            items.append((facts, None if objects is None else Batch(columns, objects)))
        self.restore(items)


@dataclass(eq=False, kw_only=True)
class _Batch(Unit):
    generation: Future[Batch]


class BatchSupply(Supply):
    """Each batch is generated as a whole, by weights exactly `depth` steps older than the step that takes it.

    Weights are sent when no generation is under way, so what is sampled does not depend on speed: a run repeats bit for
    bit.
    """

    def __init__(self, generation: Generation, grading: Grading) -> None:
        super().__init__(generation, grading)
        v1 = self.config.trainer.v1
        self._depth = v1.sampler.max_off_policy_threshold if v1.runs_ahead else 0
        self._queue: deque[_Batch] = deque()

    def _take(self, wanted: int, step: int, timer: Timer) -> Sequence[Unit]:
        waiting = "wait" if self._depth else "gen"
        with timer(waiting):
            self._settle()
        with timer("update_weights"):
            self.generation.publish()
        with timer(waiting):
            left = self._depth if self.last_draw is None else self.last_draw - step
            while len(self._queue) <= min(self._depth, left):
                drawn = self.draw()
                if not self._depth:  # so that a step's samples do not depend on how many draws earlier steps took
                    drawn = Drawn(step, sum(len(batch.drawn.rows) for _, batch in self._taken), drawn.rows)
                prompts = self.prompts_of(drawn)
                self._queue.append(_Batch(drawn=drawn, prompts=prompts, generation=self._start(prompts)))
            self._wait_for(self._queue[0])
        return [self._queue.popleft()]

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._settle()
        yield

    def items(self, step: int) -> list[Item]:
        with suppress(Exception):  # `take` raises what generation has failed with
            self._settle()
        again = [batch for of_step, batch in self._taken if of_step > step]
        return [(vars(batch.drawn), batch.rows) for batch in [*again, *self._queue]]

    def restore(self, items: Sequence[Item]) -> None:
        for facts, rows in items:
            drawn, ended = Drawn(**facts), Future[Batch]()
            if rows is None:
                ended.set_exception(WorkersReplaced("generation had failed when the run was saved"))
            else:
                ended.set_result(rows)
            self._queue.append(_Batch(drawn=drawn, prompts=self.prompts_of(drawn), generation=ended))

    def _start(self, prompts: Batch) -> Future[Batch]:
        """Generate: at depth 0 in this thread, since nothing works beside it."""
        sink = self.grading.sink(prompts)

        def generate() -> Batch:
            with phase("rollout", len(prompts), unit="sample"):
                return self.generation.generate(prompts, self._params, sink)

        if self._depth:
            return self.generation.roles.submit("rollout", generate)
        ended = Future[Batch]()
        try:
            ended.set_result(generate())
        except WorkersReplaced as replaced:
            ended.set_exception(replaced)
        return ended

    def _wait_for(self, batch: _Batch) -> None:
        """Until a batch is generated. Where a generator has died, the present weights generate all that it had."""
        try:
            batch.rows = batch.generation.result()
        except WorkersReplaced as replaced:
            self.generation.say(f"{replaced}; what it was generating is drawn by the newest weights")
            self.generation.publish()
            for other in self._queue:
                if not other.generation.done() or other.generation.exception() is not None:
                    other.generation = self._start(other.prompts)
            self._wait_for(batch)

    def _settle(self) -> None:
        for batch in self._queue:
            self._wait_for(batch)
