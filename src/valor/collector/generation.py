"""Prompts in, responses out, by the rollout role and the weights that it was given."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from valor.collector.episode_files import EpisodeFiles
from valor.collector.freshness import WeightPublisher
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, pad_rows
from valor.data.prompts import PromptRow
from valor.errors import WorkersReplaced
from valor.rollout.base import SamplingParams
from valor.tracking.metrics import Timer

PROMPT_OBJECTS = ("uid", "data_source", "ground_truth", "extra_info", "messages")

# Validation draws the same noise at every step, so that two validations differ by the policy alone.
_VALIDATION_KEY = -1


class Generation:
    """Has the rollout role answer prompts."""

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Pools, say: Callable[[str], None]) -> None:
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


def prompt_batch(
    rows: Sequence[PromptRow], *, samples_per_prompt: int, seed: int, step: int | None, first: int = 0
) -> Batch:
    """B = len(rows) · samples_per_prompt rows, the samples of a prompt next to each other.

    `episode_key` [B, 3] = (seed, step, sample number) decides each sample's random numbers; `step` None = validation.
    `first`: how many prompts of this step came before these.
    """
    prompts, lengths = pad_rows([r.prompt_ids for r in rows], torch.long)
    batch = Batch(
        {"prompts": prompts, "prompt_lengths": lengths},
        {
            "uid": [f"{i}:{row.uid}" for i, row in enumerate(rows, first)],
            **{name: [getattr(row, name) for row in rows] for name in PROMPT_OBJECTS[1:]},
        },
    ).repeat(samples_per_prompt)
    key = torch.empty(len(batch), 3, dtype=torch.long)
    key[:, 0], key[:, 1] = seed, _VALIDATION_KEY if step is None else step
    key[:, 2] = torch.arange(len(batch)) + first * samples_per_prompt
    batch["episode_key"] = key
    return batch


def sampling_params(config: PPOConfig, *, validation: bool = False) -> SamplingParams:
    """How samples are drawn: for training, or by `rollout.val_kwargs` (greedy unless a temperature is set)."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        temperature=val.effective_temperature if validation else rollout.temperature,
        top_p=val.top_p if validation else rollout.top_p,
        top_k=val.top_k if validation else rollout.top_k,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )
