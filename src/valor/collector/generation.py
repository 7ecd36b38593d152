"""Prompts in, responses out, by the rollout role and the weights that it was given."""

from collections.abc import Callable

from torch import Tensor

from valor.collector.episode_files import EpisodeFiles
from valor.collector.freshness import WeightPublisher
from valor.collector.inputs import RunInputs
from valor.collector.prompts import PROMPT_OBJECTS
from valor.config import PPOConfig
from valor.controller.group import Roles
from valor.data.batch import Batch
from valor.errors import WorkersReplaced
from valor.rollout.base import SamplingParams
from valor.tracking.metrics import Timer


class Generation:
    """Has the rollout role answer prompts."""

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Roles, say: Callable[[str], None]) -> None:
        self.config, self.inputs, self.roles, self.say = config, inputs, roles, say
        self.weights = WeightPublisher(roles)
        self.files = EpisodeFiles(config, inputs.agents)

    def answer(
        self,
        prompts: Batch,
        params: SamplingParams,
        *,
        sink: Callable[..., None] | None = None,
        timer: Timer | None = None,
    ) -> Batch:
        """The prompts with one response each, as ids and as text, by the actor's present weights, or as recorded.

        `sink` gets each episode as soon as it has ended.
        """
        timer = timer or Timer()
        numbers = prompts["episode_key"][:, 2]
        if (rows := self.files.replayed(prompts)) is not None:
            with timer("gen"):
                return self.joined(prompts, rows, numbers)
        try:
            with timer("update_weights"):
                self.weights.publish()
            with timer("gen"):
                rows = self.roles["rollout"].generate(self.columns(prompts), params, sink=sink)
                return self.joined(prompts, rows, numbers)
        except WorkersReplaced as replaced:
            self.say(str(replaced))
            return self.answer(prompts, params, sink=sink, timer=timer)

    def columns(self, prompts: Batch) -> Batch:
        """What the rollout role needs to know of prompts."""
        objects = PROMPT_OBJECTS if self.config.plays_episodes else ("uid",)
        return prompts.select(("prompts", "prompt_lengths", "episode_key", *objects))

    def joined(self, prompts: Batch, rows: Batch, numbers: Tensor) -> Batch:
        """Prompts and the rows of their episodes, with text. `numbers`: of each prompt's episode, unlike all others."""
        self.files.write(prompts, rows)
        if "episode" in rows:  # of one prompt several may have come
            prompts, numbers = prompts.take(rows["episode"]), numbers[rows["episode"]]
            rows["episode"] = numbers
        return self.inputs.with_text(prompts.union(rows))
