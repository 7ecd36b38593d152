"""Prompt rows as the batch that goes to the rollout role."""

from collections.abc import Sequence

import torch

from valor.config import PPOConfig
from valor.data.batch import Batch, pad_rows
from valor.data.prompts import PromptRow
from valor.rollout.base import SamplingParams

PROMPT_OBJECTS = ("uid", "data_source", "ground_truth", "extra_info", "messages")

# Validation draws the same noise at every step, so that two validations differ by the policy alone.
_VALIDATION_KEY = -1


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
