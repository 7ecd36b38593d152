"""Samples of a generation that runs ahead of training: what every kind of it has, and the one by whole batches."""

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
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
    """Prompts of one draw from the data: `rows` are their numbers there, `first` the place of the first in the draw."""

    draw: int
    first: int
    rows: Sequence[int]


class Supply(ABC):
    """Draws prompts before they are needed, and hands their samples over in batches."""

    def __init__(self, generation: Generation, grading: Grading) -> None:
        self.generation, self.grading = generation, grading
        self.config, self.inputs = generation.config, generation.inputs
        self.rollout = self.config.actor_rollout_ref.rollout
        self.draws = 0
        filtering = self.config.algorithm.filter_groups.enable
        # Where every draw is a step's batch, nothing is drawn that no step will take.
        self.last_draw = None if filtering else self.inputs.total_steps

    @abstractmethod
    def take(self, wanted: int, step: int, timer: Timer) -> Batch:
        """Samples of `wanted` prompts for step `step`, or of fewer where a draw has fewer; not graded yet."""

    @abstractmethod
    def standing(self) -> Any:
        """Context: nobody generates, so that the rollout role can be called."""

    @abstractmethod
    def items(self, step: int) -> list[tuple[dict[str, Any], Batch | None]]:
        """What a checkpoint after step `step` must hold: facts about prompts, and their samples if they have them."""

    @abstractmethod
    def restore(self, items: Sequence[tuple[Mapping[str, Any], Batch | None]]) -> None:
        """Go on from what `items` gave."""

    def close(self) -> None:  # noqa: B027  # a batch under way ends with its processes
        """End what is under way."""

    def metrics(self, batch: Batch) -> dict[str, float | Histogram]:
        """How old a batch's samples are, `off_policy/age/*` in transfers of weights, and what the queue looks like."""
        mask = batch["response_mask"]
        ages = self.generation.weights.ages(batch["weights_versions"]).float()
        of_tokens = ages[mask != 0]
        out: dict[str, float | Histogram] = {}
        if len(of_tokens):
            out |= {"off_policy/age/mean": float(of_tokens.mean()), "off_policy/age/max": float(of_tokens.max())}
            spans = (ages * mask).amax(-1) - torch.where(mask != 0, ages, torch.inf).amin(-1)
            out["off_policy/partial_ratio"] = float((spans.isfinite() & (spans > 0)).float().mean())
        if (found := histogram(ages, mask)) is not None:
            out["off_policy/age/histogram"] = found
        return out

    def draw(self) -> Drawn:
        self.draws += 1
        return Drawn(self.draws, 0, self.inputs.sampler.next_batch())

    def prompts_of(self, drawn: Drawn) -> Batch:
        """Their prompts, `rollout.n` rows each."""
        prompts = prompt_batch(
            [self.inputs.train[i] for i in drawn.rows],
            samples_per_prompt=self.rollout.n,
            seed=self.config.trainer.seed,
            step=drawn.draw,
            first=drawn.first,
        )
        prompts.objects["uid"] = [f"{drawn.draw}.{uid}" for uid in prompts.objects["uid"]]
        return prompts

    def joined(self, prompts: Batch, rows: Batch) -> Batch:
        key, size = prompts["episode_key"], self.inputs.sampler.batch_size * self.rollout.n
        return self.generation.joined(prompts, rows, key[:, 1] * size + key[:, 2])

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
            "sampler": self.inputs.sampler.state_dict(),
            "versions": self.generation.weights.versions,
            "items": items,
        }
        (folder / _STATE).write_text(json.dumps(state, default=str))
        save_file(tensors, folder / _TENSORS)

    def load(self, folder: Path) -> None:
        state, tensors = json.loads((folder / _STATE).read_text()), load_file(folder / _TENSORS)
        self.draws = state["draws"]
        self.inputs.sampler.load_state_dict(state["sampler"])
        self.generation.weights.versions = state["versions"]
        items = []
        for number, facts in enumerate(state["items"]):
            objects, of_item = facts.pop("objects"), f"{number}/"
            columns = {name.removeprefix(of_item): one for name, one in tensors.items() if name.startswith(of_item)}
            items.append((facts, None if objects is None else Batch(columns, objects)))
        self.restore(items)


@dataclass(eq=False)
class _Ahead:
    drawn: Drawn
    prompts: Batch
    rows: Future[Batch]


class BatchesAhead(Supply):
    """Each batch is generated as a whole, by weights `max_off_policy_threshold` steps older than the one it trains.

    The trainer waits for the generators before it sends weights, so what is sampled does not depend on speed: a run
    repeats bit for bit.
    """

    def __init__(self, generation: Generation, grading: Grading) -> None:
        super().__init__(generation, grading)
        self._age = self.config.trainer.v1.sampler.max_off_policy_threshold
        self._queue: deque[_Ahead] = deque()
        self._taken: list[tuple[int, _Ahead]] = []  # with the step

    def take(self, wanted: int, step: int, timer: Timer) -> Batch:
        with timer("wait"):
            self._settle()
        with timer("update_weights"):
            self._publish()
        self._taken = [(of_step, one) for of_step, one in self._taken if of_step == step]
        while len(self._queue) <= self._age and (self.last_draw is None or self.draws < self.last_draw):
            drawn = self.draw()
            prompts = self.prompts_of(drawn)
            self._queue.append(_Ahead(drawn, prompts, self._submit(prompts)))
        first = self._queue.popleft()
        self._taken.append((step, first))
        with timer("wait"):
            rows = self._result(first)
        return self.joined(first.prompts, Batch(rows.tensors, rows.objects))

    @contextmanager
    def standing(self) -> Iterator[None]:
        self._settle()
        yield

    def items(self, step: int) -> list[tuple[dict[str, Any], Batch | None]]:
        again = [one for of_step, one in self._taken if of_step > step]
        return [(vars(one.drawn), self._rows(one)) for one in [*again, *self._queue]]

    def restore(self, items: Sequence[tuple[Mapping[str, Any], Batch | None]]) -> None:
        for facts, rows in items:
            drawn, done = Drawn(**facts), Future[Batch]()
            if rows is None:
                done.set_exception(WorkersReplaced("generation had failed when the run was saved"))
            else:
                done.set_result(rows)
            self._queue.append(_Ahead(drawn, self.prompts_of(drawn), done))

    def _submit(self, prompts: Batch) -> Future[Batch]:
        roles = self.generation.roles
        columns, sink = self.generation.columns(prompts), self.grading.sink(prompts)

        def generate() -> Batch:
            with phase("rollout", len(prompts), unit="sample"):
                return roles["rollout"].generate(columns, sampling_params(self.config), sink=sink)

        return roles.submit("rollout", generate)

    def _result(self, one: _Ahead) -> Batch:
        """The rows of a batch. Where a generator has died, all that were not done are drawn by the present weights."""
        try:
            return one.rows.result()
        except WorkersReplaced as replaced:
            self.generation.say(f"{replaced}; what it was generating is drawn by the newest weights")
            self._publish()
            for other in dict.fromkeys([one, *self._queue]):
                if not other.rows.done() or other.rows.exception() is not None:
                    other.rows = self._submit(other.prompts)
            return self._result(one)

    def _rows(self, one: _Ahead) -> Batch | None:
        """The rows of a batch; None where its generation has failed, which who takes the batch is told."""
        try:
            return self._result(one)
        except Exception:
            return None

    def _settle(self) -> None:
        for one in self._queue:
            self._result(one)

    def _publish(self) -> None:
        try:
            self.generation.weights.publish()
        except WorkersReplaced as replaced:
            self.generation.say(str(replaced))
            self._publish()
