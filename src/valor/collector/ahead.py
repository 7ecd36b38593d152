"""Samples that are generated without a pause, each prompt on its own, while training goes on or between its steps."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Condition
from typing import Any

from valor.agents.episode import Episode, EpisodeKey, episode_rows
from valor.agents.loops import tasks_of
from valor.collector.generation import Generation, sampling_params
from valor.collector.grading import Grading
from valor.collector.queue import Group, SampleQueue
from valor.collector.supply import Drawn, Supply
from valor.data.batch import Batch
from valor.errors import StepRefused, TrainingStopped, WorkerDied, WorkersReplaced
from valor.tracking.metrics import Histogram, Timer
from valor.tracking.progress import phase, report_progress
from valor.workers.ahead import Begin, Drop, Pause, Played, TakeWeights, Usage

_LOOK_SECONDS = 0.5  # between two looks at whether the generators are alive
_END_SECONDS = 20.0  # in which they give back what they are generating when the run ends


@dataclass(eq=False, kw_only=True)
class _Group(Group):
    """A prompt with what has come of it."""

    drawn: Drawn
    prompts: Batch
    keys: list[EpisodeKey]
    grade: Callable[[Episode], None] | None
    share: int = -1  # which generator has it
    played: dict[EpisodeKey, Episode] = field(default_factory=dict)
    rows: Batch | None = None  # when all have come


class SamplesAhead(Supply):
    """Generators that always have prompts, in processes of their own (`beside`) or in the trainer's.

    Beside the trainer they stop only to take weights, and with `keep_cache` not even then. In the trainer's processes
    they generate while it waits for a batch, and go on from there the next time.
    """

    def __init__(self, generation: Generation, grading: Grading) -> None:
        super().__init__(generation, grading)
        config, v1 = self.config, self.config.trainer.v1
        self._beside = v1.trainer_mode == "separate_async"
        self._keep_cache = self._beside and not v1.separate_async.clear_kv_cache_on_weight_sync
        self._steps_per_transfer = config.steps_per_transfer if self._beside else 1
        sampler, batch = v1.sampler, config.data.train_batch_size
        capacity = (1 + v1.batches_ahead) * batch
        self.queue = SampleQueue[_Group](capacity, sampler.max_off_policy_threshold, sampler.max_off_policy_strategy)
        self._changed = Condition()
        self._by_key: dict[EpisodeKey, _Group] = {}
        self._drawn: deque[Drawn] = deque()  # prompts that were drawn and not begun
        self._number = 0
        self._taken: list[tuple[int, _Group]] = []  # with the step
        self._messages: defaultdict[int, list[Any]] = defaultdict(list)  # for each generator
        self._running: Future[None] | None = None
        self._replacements = 0  # of generators, when they were last told of all that is in flight
        self._until: tuple[int, int] | None = None  # in the trainer's processes: what ends a round of generation
        self._usage: list[Usage] = []
        self._last_transfer: int | None = None

    def take(self, wanted: int, step: int, timer: Timer) -> Batch:
        if self._transfer_is_due(step):
            with timer("update_weights"):
                self._give_weights(step)
        self._taken = [(of_step, one) for of_step, one in self._taken if of_step == step]
        self._begin_again(self.queue.too_old(self._version))
        self._top_up(step)
        with timer("wait"), phase("rollout", wanted, unit="prompt"):
            groups = self._wait_for(wanted, self._version + self._transfer_is_due(step + 1))
        self._taken += ((step, group) for group in groups)
        parts, episodes = [], 0
        for one in groups:
            assert one.rows is not None, "it is finished"
            parts.append(Batch(one.rows.tensors, one.rows.objects))
            if "episode" in one.rows:
                parts[-1]["episode"] = one.rows["episode"] + episodes
            episodes += len(one.keys)
        return self.joined(Batch.concat([one.prompts for one in groups]), Batch.concat(parts))

    @contextmanager
    def standing(self) -> Iterator[None]:
        self._pause()
        yield
        if self._beside and self.queue.num_in_flight:
            self._run()

    def metrics(self, batch: Batch) -> dict[str, float | Histogram]:
        with self._changed:
            usage, self._usage = self._usage, []
        seconds = sum(one.seconds for one in usage)
        out = super().metrics(batch) | {
            "off_policy/dropped_prompts": float(self.queue.num_dropped),
            "queue/finished_prompts": float(self.queue.num_finished),
            "queue/prompts_in_flight": float(self.queue.num_in_flight),
        }
        if seconds > 0 and self._beside:
            out["rollouter/idle_ratio"] = sum(one.idle for one in usage) / seconds
        return out

    def items(self, step: int) -> list[tuple[dict[str, Any], Batch | None]]:
        with suppress(Exception):  # what generation has failed with is told when the next batch is taken
            self._check_alive()
        with self._changed:
            again = [group for of_step, group in self._taken if of_step > step]
            groups = sorted({*again, *self.queue.groups}, key=lambda one: one.number)
            found: list[tuple[dict[str, Any], Batch | None]] = [
                (vars(one.drawn) | {"oldest": one.oldest}, one.rows if one.finished else None) for one in groups
            ]
            return found + [(vars(drawn) | {"oldest": 0}, None) for drawn in self._drawn]

    def restore(self, items: Sequence[tuple[Mapping[str, Any], Batch | None]]) -> None:
        for facts, rows in items:
            drawn = Drawn(facts["draw"], facts["first"], facts["rows"])
            if rows is None:
                self._drawn.append(drawn)
                continue
            group = self._group(drawn)
            self.queue.begin(group, facts["oldest"])
            group.rows = rows
            self.queue.finish(group, facts["oldest"])

    def close(self) -> None:
        if self._running is not None and not self._running.done():
            self._tell_all(Pause())
            wait([self._running], _END_SECONDS)

    # ---- weights

    @property
    def _version(self) -> int:
        return self.generation.weights.version

    def _transfer_is_due(self, step: int) -> bool:
        return self._last_transfer is None or step - self._last_transfer >= self._steps_per_transfer

    def _give_weights(self, step: int) -> None:
        """The generators get the actor's present weights, between two tokens, or after what they have is given back."""
        self._last_transfer = step
        running = self._running is not None and not self._running.done()
        if running and self._keep_cache:
            try:
                self.generation.weights.publish_beside(lambda *where: self._tell_all(TakeWeights(*where)))
                return
            except (TrainingStopped, RuntimeError):
                assert self._running is not None
                if self._running.exception() is None:
                    raise
        self._pause()
        self._publish()

    def _publish(self) -> None:
        try:
            self.generation.weights.publish()
        except WorkersReplaced as replaced:
            self._begin_again_after(replaced)
            self._publish()
        except WorkerDied as death:
            raise StepRefused(str(death)) from death

    # ---- prompts

    def _group(self, drawn: Drawn) -> _Group:
        prompts = self.prompts_of(drawn)
        self._number += 1
        keys = [tuple(key) for key in prompts["episode_key"].tolist()]
        return _Group(self._number, drawn=drawn, prompts=prompts, keys=keys, grade=self.grading.sink(prompts))

    def _top_up(self, step: int) -> None:
        """Begin as many prompts as there is room for, but no more than the steps to come will take."""
        batch, filtering = self.config.data.train_batch_size, self.last_draw is None
        needed = (self.inputs.total_steps - step + 1) * batch - len(self.queue.groups)
        room = self.queue.room if filtering else min(self.queue.room, needed)
        for _ in range(room):
            if not self._drawn:
                whole = self.draw()
                self._drawn.extend(Drawn(whole.draw, i, [row]) for i, row in enumerate(whole.rows))
            self._send(self._group(self._drawn.popleft()))
        self._check_alive()
        if self._beside and (self._running is None or self._running.done()) and self.queue.num_in_flight:
            self._run()

    def _send(self, group: _Group) -> None:
        """Begin a prompt, where the fewest are."""
        tasks = tasks_of(group.prompts, sampling_params(self.config))
        with self._changed:
            loads = [0] * (max(self._shares) + 1)
            for other in self.queue.groups:
                if not other.finished and other is not group:
                    loads[other.share] += 1
            group.share, group.played, group.rows = loads.index(min(loads)), {}, None
            self.queue.begin(group, max(0, self._version))
            self._by_key |= dict.fromkeys(group.keys, group)
            self._tell(group.share, Begin(tasks, group.attempt))

    def _begin_again(self, groups: Sequence[_Group]) -> None:
        """Drop what has come of these prompts, and have them answered anew."""
        for group in groups:
            if not group.finished:
                self._tell(group.share, Drop(frozenset(group.keys)))
            group.attempt += 1
            self._send(group)

    @cached_property
    def _shares(self) -> list[int]:
        """Which share of the requests each process works on; the first one of a share is told of them."""
        return self.generation.roles["rollout"].group.data_parallel_ranks("rollout")

    # ---- generation

    def _run(self) -> None:
        roles = self.generation.roles
        if self._replacements != roles["rollout"].group.num_replacements:  # since it paused
            self._begin_again_after("generators that stood have died")
            self._publish()
        self._running = roles.submit("rollout", self._generate)

    def _generate(self) -> None:
        self.generation.roles["rollout"].generate_ahead(sink=self._receive, feed=self._feed)

    def _feed(self, rank: int) -> Sequence[Any]:
        with self._changed:
            if self._until is not None and self.queue.has(*self._until):
                self._until = None
                self._tell_all(Pause())
            return self._messages.pop(rank, ())

    def _receive(self, item: Played | Usage) -> None:
        if isinstance(item, Usage):
            with self._changed:
                self._usage.append(item)
            return
        with self._changed:
            group = self._by_key.get(item.episode.key)
            if group is None or item.attempt != group.attempt:
                return
            group.played[item.episode.key] = item.episode
            complete = len(group.played) == len(group.keys)
        if group.grade is not None:
            group.grade(item.episode)
        if complete:
            self.grading.when_graded(group.keys, partial(self._graded, group, item.attempt))

    def _graded(self, group: _Group, attempt: int) -> None:
        """All samples of a prompt are there, and so are their grades by rule."""
        with self._changed:
            if attempt != group.attempt or group.rows is not None:
                return
            played = [group.played[key] for key in group.keys]
            group.rows = episode_rows(played)
            self.queue.finish(group, min(map(self._oldest, played)))
            for key in group.keys:
                self._by_key.pop(key, None)
            self._changed.notify_all()

    def _oldest(self, episode: Episode) -> int:
        spans = [span.weights_version for turn in episode.turns for span in turn.spans if span.num_tokens]
        return self.generation.weights.number(min(spans)) if spans else self._version

    def _wait_for(self, wanted: int, next_version: int) -> list[_Group]:
        while not self._beside and not self.queue.has(wanted, next_version):
            self._until = (wanted, next_version)
            try:
                self._generate()
            except WorkersReplaced as replaced:
                self._begin_again_after(replaced)
                self._publish()
        while True:
            with self._changed:
                report_progress(min(wanted, self.queue.num_finished), wanted)
                if self.queue.has(wanted, next_version):
                    return self.queue.take(wanted)
                self._changed.wait(_LOOK_SECONDS)
            self._check_alive()

    def _pause(self) -> None:
        """Return when nobody generates; tools may go on."""
        if self._running is not None and not self._running.done():
            self._tell_all(Pause())
        self._check_alive(wait=True)

    def _check_alive(self, *, wait: bool = False) -> None:
        """Raise what the generators have failed with; where they died, what they had goes to those in their place."""
        running = self._running
        if running is None or not (wait or running.done()):
            return
        try:
            running.result()
        except WorkersReplaced as replaced:
            self._running = None
            self._begin_again_after(replaced)
            if not wait:
                self._publish()
                self._run()
        except WorkerDied as death:  # none is left: what there is can be saved
            self._running = None
            raise StepRefused(str(death)) from death

    def _begin_again_after(self, death: object) -> None:
        self.generation.say(f"{death}; {self.queue.num_in_flight} prompts in flight begin anew")
        self._replacements = self.generation.roles["rollout"].group.num_replacements
        with self._changed:
            self._messages.clear()
        for group in [one for one in self.queue.groups if not one.finished]:
            group.attempt += 1
            self._send(group)

    def _tell(self, share: int, message: Any) -> None:
        with self._changed:
            self._messages[self._shares.index(share)].append(message)

    def _tell_all(self, message: Any) -> None:
        """Also the processes that follow others, which care for new weights alone."""
        with self._changed:
            for rank in range(len(self._shares)):
                self._messages[rank].append(message)
