"""Prompts in, responses out, by the rollout role and the actor's present weights."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from valor.collector.episode_files import EpisodeFiles
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, pad_rows
from valor.data.images import IMAGES
from valor.data.prompts import PromptRow
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import SamplingParams

Sink = Callable[..., None]

PROMPT_OBJECTS = ("uid", "data_source", "ground_truth", "extra_info", "messages", "template_kwargs")

# Validation draws the same noise at every step, so that two validations differ by the policy alone.
_VALIDATION_KEY = -1


class WeightPublisher:
    """Gives the rollout the actor's weights when it has others: by a call where it is beside the actor, else by a
    transfer between their pools.

    versions: those that the rollout was given, ascending.
    """

    def __init__(self, roles: Pools) -> None:
        self._roles = roles
        self._address: tuple[str, int] | None = None
        self._replacements = 0  # of the rollout's processes, when the channel was opened
        self.versions: list[int] = []

    def publish(self) -> None:
        """After it, `generate` uses the actor's present weights, unless its engine has fixed ones.

        RuntimeError when they did not arrive bit for bit. WorkersReplaced: the rollout died and has to be sent them.
        """
        roles = self._roles
        actor, rollout = roles["actor"], roles["rollout"]
        version = actor.version()
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)
        if not rollout.needs_weights(version):
            return
        group = rollout.group
        if group is actor.group:
            rollout.update_weights()
            return
        if self._address is None or self._replacements != group.num_replacements:  # new ones know no old channel
            self._address, self._replacements = actor.open_channel(), group.num_replacements
        sent = roles.submit("actor", actor.send_weights, group.pool.world_size)
        received = roles.submit("rollout", rollout.receive_weights, self._address, version)
        errors = received.exception(), sent.exception()
        deaths = [error for error in errors if isinstance(error, TrainingStopped)]
        if error := next(iter(deaths), errors[0] or errors[1]):  # a survivor complains of the one that died
            raise error

    @property
    def version(self) -> int:
        """Number of the newest transfer, from 0; ages are differences of such numbers."""
        return len(self.versions) - 1

    def number(self, weights_version: int) -> int:
        """Number of the transfer that brought the weights after so many updates."""
        return max(0, bisect_right(self.versions, weights_version) - 1)

    def ages(self, weights_versions: Tensor) -> Tensor:
        """Age in transfers of tokens that weights of these versions sampled."""
        numbers = torch.searchsorted(torch.tensor(self.versions), weights_versions, right=True) - 1
        return self.version - numbers.clamp(min=0)


class Generation:
    """Has the rollout role answer prompts."""

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Pools, say: Callable[[str], None]) -> None:
        self.config, self.inputs, self.roles, self.say = config, inputs, roles, say
        self.weights = WeightPublisher(roles)
        self.files = EpisodeFiles(config, inputs.agents)

    def answer(self, prompts: Batch, params: SamplingParams, *, sink: Sink | None = None) -> Batch:
        """The prompts with one response each, as ids and as text, by the actor's present weights, or as recorded.

        `sink` gets each episode as soon as it has ended.
        """
        self.publish()
        try:
            rows = self.generate(prompts, params, sink)
        except WorkersReplaced as replaced:
            self.say(str(replaced))
            return self.answer(prompts, params, sink=sink)
        return self.joined(prompts, rows, prompts["episode_key"][:, 2])

    def publish(self) -> None:
        """Give the rollout the actor's present weights; processes that die meanwhile are replaced."""
        try:
            self.weights.publish()
        except WorkersReplaced as replaced:
            self.say(str(replaced))
            self.publish()

    def generate(self, prompts: Batch, params: SamplingParams, sink: Sink | None = None) -> Batch:
        """The rows of one episode for each prompt, by the weights that were published last, or as recorded."""
        if (rows := self.files.replayed(prompts)) is not None:
            return rows
        objects = PROMPT_OBJECTS if self.config.plays_episodes else ("uid",)
        objects += (IMAGES,) * (IMAGES in prompts)
        columns = prompts.select(("prompts", "prompt_lengths", "episode_key", *objects))
        return self.roles["rollout"].generate(columns, params, sink=sink)

    def joined(self, prompts: Batch, rows: Batch, numbers: Tensor) -> Batch:
        """Prompts and the rows of their episodes, with text. `numbers`: of each prompt's episode, unlike all others."""
        self.files.write(prompts, rows)
        if "episode" in rows:  # an episode may have several rows
            prompts, numbers = prompts.take(rows["episode"]), numbers[rows["episode"]]
            rows["episode"] = numbers
        return self.inputs.with_text(prompts.union(rows))


def prompt_batch(rows: Sequence[PromptRow], config: PPOConfig, step: int | None, first: int) -> Batch:
    """As many rows for each prompt as `config` has samples of it, next to each other; `step` None: in validation.

    `episode_key` [B, 3] = (seed, step, sample number) decides each sample's random numbers. `first`: how many prompts
    of this step came before these.
    """
    rollout = config.actor_rollout_ref.rollout
    samples_per_prompt = rollout.val_kwargs.n if step is None else rollout.n
    prompts, lengths = pad_rows([r.prompt_ids for r in rows], torch.long)
    batch = Batch(
        {"prompts": prompts, "prompt_lengths": lengths},
        {
            "uid": [f"{i}:{row.uid}" for i, row in enumerate(rows, first)],
            **{name: [getattr(row, name) for row in rows] for name in PROMPT_OBJECTS[1:]},
        },
    )
    if rows and rows[0].images is not None:
        batch.objects[IMAGES] = [row.images for row in rows]
    batch = batch.repeat(samples_per_prompt)
    key = torch.empty(len(batch), 3, dtype=torch.long)
    key[:, 0], key[:, 1] = config.trainer.seed, _VALIDATION_KEY if step is None else step
    key[:, 2] = torch.arange(len(batch)) + first * samples_per_prompt
    batch["episode_key"] = key
    return batch


def sampling_params(config: PPOConfig, *, validation: bool = False) -> SamplingParams:
    """How samples are drawn: for training, or by `rollout.val_kwargs` (greedy unless a temperature is set)."""
    rollout = config.actor_rollout_ref.rollout
    drawn = rollout.val_kwargs if validation else rollout
    temperature = rollout.val_kwargs.effective_temperature if validation else rollout.temperature
    limits = {"max_tokens": config.data.max_response_length, "ignore_eos": rollout.ignore_eos}
    return SamplingParams(temperature, drawn.top_k, drawn.top_p, **limits)
