"""Samples that are generated without a pause, each prompt on its own, while training goes on or between its steps."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Condition
from typing import Any

from valor.agents.episode import Episode, EpisodeKey, episode_rows
from valor.agents.loops import tasks_of
from valor.collector.generation import Generation
from valor.collector.grading import Grading
from valor.collector.queue import Group, SampleQueue
from valor.collector.supply import Drawn, Item, Supply, Unit
from valor.data.batch import Batch
from valor.errors import WorkersReplaced
from valor.tracking.metrics import Histogram, Timer
from valor.tracking.progress import phase, report_progress

_LOOK_SECONDS = 0.5  # between two looks at whether the generators are alive
_END_SECONDS = 20.0  # in which they give back what they are generating when the run ends


@dataclass(eq=False, kw_only=True)
class _Group(Unit, Group):
    """A prompt and its samples; `rows` when all have ended and are graded by rule."""

    keys: list[EpisodeKey]
    grade: Callable[[Episode], None] | None
    share: int = -1  # which generator has it
    episodes: dict[EpisodeKey, Episode] = field(default_factory=dict)


class PromptSupply(Supply):
    """Generators that always have prompts, in processes of their own (`beside`) or in the trainer's.

    Beside the trainer they stop only to take weights. In the trainer's processes they generate while it waits for a
    batch, and go on from there the next time.
    """

    def __init__(self, generation: Generation, grading: Grading) -> None:
        super().__init__(generation, grading)
        v1, self._batch_size = self.config.trainer.v1, self.config.data.train_batch_size
        self._beside = v1.trainer_mode == "separate_async"
        self._steps_per_transfer = self.config.steps_per_transfer if self._beside else 1
        capacity, rule = (1 + v1.batches_ahead) * self._batch_size, v1.sampler
        self.queue = SampleQueue[_Group](capacity, rule.max_off_policy_threshold, rule.max_off_policy_strategy)
        self._changed = Condition()
        self._by_key: dict[EpisodeKey, _Group] = {}
        self._drawn: deque[Drawn] = deque()  # single prompts that have not begun
        self._number = 0
        # For each generator calls of its runner's methods (`RolloutWorker.generate_ahead`).
        self._messages: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
        self._running: Future[None] | None = None
        self._replacements = 0  # of generators, when they were last told of all that is in flight
        self._until: tuple[int, int] | None = None  # in the trainer's processes: generate until the queue has this
        self._seconds, self._idle_seconds = 0.0, 0.0  # of the first generator since the last batch
        self._last_transfer: int | None = None

    def _take(self, wanted: int, step: int, timer: Timer) -> Sequence[Unit]:
        if self._transfer_is_due(step):
            with timer("update_weights"):
                self._last_transfer = step
                self._pause()
                self.generation.publish()
        self._begin_again(self.queue.too_old(self._version))
        self._top_up(step)
        with timer("wait"), phase("rollout", wanted, unit="prompt"):
            return self._wait_for(wanted, self._version + self._transfer_is_due(step + 1))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._pause()
        yield
        if self._beside:
            self._run()

    def metrics(self, batch: Batch) -> dict[str, float | Histogram]:
        out = super().metrics(batch) | {
            "off_policy/dropped_prompts": float(self.queue.num_dropped),
            "queue/finished_prompts": float(self.queue.num_finished),
            "queue/prompts_in_flight": float(self.queue.num_in_flight),
        }
        with self._changed:
            if self._seconds > 0 and self._beside:
                out["rollouter/idle_ratio"] = self._idle_seconds / self._seconds
            self._seconds = self._idle_seconds = 0.0
        return out

    def items(self, step: int) -> list[Item]:
        with suppress(Exception):  # an error of generation is raised when the next batch is taken
            self._check_alive()
        with self._changed:
            again = [group for of_step, group in self._taken if of_step > step]
            groups = sorted({*again, *self.queue.groups}, key=lambda group: group.number)
            begun = [(vars(each.drawn) | {"oldest": each.oldest}, each.rows) for each in groups]
            return [*begun, *((vars(drawn) | {"oldest": 0}, None) for drawn in self._drawn)]

    def restore(self, items: Sequence[Item]) -> None:
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
            self._tell_all("pause")
            wait([self._running], _END_SECONDS)

    # ---- weights

    @property
    def _version(self) -> int:
        return self.generation.weights.version

    def _transfer_is_due(self, step: int) -> bool:
        return self._last_transfer is None or step - self._last_transfer >= self._steps_per_transfer

    # ---- prompts

    def _group(self, drawn: Drawn) -> _Group:
        prompts = self.prompts_of(drawn)
        self._number += 1
        keys = [tuple(key) for key in prompts["episode_key"].tolist()]
        return _Group(self._number, drawn=drawn, prompts=prompts, keys=keys, grade=self.grading.sink(prompts))

    def _top_up(self, step: int) -> None:
        """Begin as many prompts as there is room for, but no more than the steps to come will take."""
        room = self.queue.room
        if self.last_draw is not None:
            room = min(room, (self.last_draw - step + 1) * self._batch_size - len(self.queue.groups))
        for _ in range(room):
            if not self._drawn:
                draw = self.draw()
                self._drawn.extend(Drawn(draw.draw, i, [row]) for i, row in enumerate(draw.rows))
            self._send(self._group(self._drawn.popleft()))
        self._check_alive()
        if self._beside:
            self._run()

    def _send(self, group: _Group) -> None:
        """Begin a prompt, where the fewest are."""
        with self._changed:
            others = (each for each in self.queue.groups if not each.finished and each is not group)
            loads = Counter(other.share for other in others)
            group.share = min(sorted({*self._shares}), key=lambda share: loads[share])
            group.episodes, group.rows = {}, None
            self.queue.begin(group, max(0, self._version))
            self._by_key |= dict.fromkeys(group.keys, group)
            self._tell(group.share, "add", tasks_of(group.prompts, self._params), group.attempt)

    def _begin_again(self, groups: Sequence[_Group]) -> None:
        """Drop what has come of these prompts, and have them answered anew."""
        for group in groups:
            if not group.finished:
                self._tell(group.share, "drop", frozenset(group.keys))
            group.attempt += 1
            self._send(group)

    @cached_property
    def _shares(self) -> list[int]:
        """Which share of the requests each process works on; the first process of a share gets its messages."""
        return self.generation.roles["rollout"].group.data_parallel_ranks("rollout")

    def _tell(self, share: int, method: str, *arguments: Any) -> None:
        with self._changed:
            self._messages[self._shares.index(share)].append((method, *arguments))

    def _tell_all(self, method: str) -> None:
        for share in {*self._shares}:
            self._tell(share, method)

    # ---- generation

    def _run(self) -> None:
        """Generate what is in flight, unless that goes on already."""
        roles = self.generation.roles
        if not self.queue.num_in_flight or (self._running is not None and not self._running.done()):
            return
        if self._replacements != roles["rollout"].group.num_replacements:  # since the pause
            self._recover("generators died during a pause")
            self.generation.publish()
        self._running = roles.submit("rollout", self._generate)

    def _generate(self) -> None:
        seconds, idle = self.generation.roles["rollout"].generate_ahead(sink=self._receive, feed=self._feed)
        with self._changed:
            self._seconds, self._idle_seconds = self._seconds + seconds, self._idle_seconds + idle

    def _feed(self, rank: int) -> Sequence[Any]:
        with self._changed:
            if self._until is not None and self.queue.has(*self._until):
                self._until = None
                self._tell_all("pause")
            return self._messages.pop(rank, ())

    def _receive(self, ended: tuple[Episode, int]) -> None:
        episode, attempt = ended
        with self._changed:
            group = self._by_key.get(episode.key)
            if group is None or attempt != group.attempt:
                return
            group.episodes[episode.key] = episode
            complete = len(group.episodes) == len(group.keys)
        if group.grade is not None:
            group.grade(episode)
        if complete:
            self.grading.when_graded(group.keys, partial(self._graded, group, attempt))

    def _graded(self, group: _Group, attempt: int) -> None:
        """All samples of a prompt have ended, and so have their graders."""
        with self._changed:
            if attempt != group.attempt or group.rows is not None:
                return
            episodes = [group.episodes[key] for key in group.keys]
            group.rows = episode_rows(episodes)
            self.queue.finish(group, min(map(self._oldest, episodes)))
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
                self._recover(replaced)
                self.generation.publish()
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
            self._tell_all("pause")
        self._check_alive(wait=True)

    def _check_alive(self, *, wait: bool = False) -> None:
        """Raise what the generators have failed with; where they died, their successors get what they had."""
        running = self._running
        if running is None or not (wait or running.done()):
            return
        try:
            running.result()
        except WorkersReplaced as replaced:
            self._running = None
            self._recover(replaced)
            if not wait:
                self.generation.publish()
                self._run()

    def _recover(self, replaced: object) -> None:
        """Begin all prompts in flight anew."""
        self.generation.say(f"{replaced}; {self.queue.num_in_flight} prompts in flight begin anew")
        self._replacements = self.generation.roles["rollout"].group.num_replacements
        with self._changed:
            self._messages.clear()
        for group in [group for group in self.queue.groups if not group.finished]:
            group.attempt += 1
            self._send(group)
