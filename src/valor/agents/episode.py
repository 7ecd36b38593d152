"""An episode: a prompt, and turns in which the policy speaks and is told something back.

A single answer is an episode of one turn. Tokens are kept exactly as the engine sampled them or was given them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import torch

from valor.data.batch import Batch, pad_rows
from valor.rollout.base import FinishReason, Output, Span

EpisodeKey = tuple[int, ...]
"""(run seed, step, number of the sample in the step): names an episode and decides its random numbers."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said in one turn.

    `token_ids` and `log_probs` [n] are those of the sampled tokens; `spans` say which version of the weights sampled
    how many of them. `observation_ids` are the tokens that the policy was given since its last turn; those of the first
    turn are the prompt, and belong to the episode.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: tuple[Span, ...]
    observation_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Episode:
    """Turns of one conversation, and why the last one ended."""

    key: EpisodeKey
    turns: tuple[Turn, ...]
    finish_reason: FinishReason

    @classmethod
    def of_one_turn(cls, key: EpisodeKey, output: Output) -> Episode:
        """The answer to a prompt."""
        return cls(key, (Turn(output.token_ids, output.log_probs, output.spans),), output.finish_reason)

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt: observations and the policy's own."""
        return [*chain.from_iterable((*turn.observation_ids, *turn.token_ids) for turn in self.turns)]


def episode_rows(episodes: Sequence[Episode]) -> Batch:
    """One row for each episode, right-padded with zeros to T tokens after the prompt.

    `responses` [B, T], `response_lengths` [B]; and, 0 on observations and padding: `response_mask` [B, T] (1: sampled
    by the policy), `rollout_log_probs` [B, T], `turn_ids` [B, T] (number of the token's turn, counted from 1),
    `weights_versions` [B, T] (which weights sampled the token). Objects: `finish_reason`.
    """
    responses, lengths = pad_rows([episode.response_ids for episode in episodes], torch.long)
    log_probs, _ = pad_rows([_per_token(e, [turn.log_probs for turn in e.turns]) for e in episodes], torch.float32)
    turns = [_per_token(e, [[i] * len(t.token_ids) for i, t in enumerate(e.turns, 1)]) for e in episodes]
    turn_ids, _ = pad_rows(turns, torch.long)
    versions, _ = pad_rows([_per_token(e, [_versions(turn) for turn in e.turns]) for e in episodes], torch.long)
    columns = {
        "responses": responses,
        "response_lengths": lengths,
        "response_mask": (turn_ids > 0).float(),
        "rollout_log_probs": log_probs,
        "turn_ids": turn_ids,
        "weights_versions": versions,
    }
    return Batch(columns, {"finish_reason": [episode.finish_reason for episode in episodes]})


def _per_token(episode: Episode, of_turns: Sequence[Sequence[float]]) -> list[float]:
    """The turns' numbers in a row, with zeros where the policy was given an observation."""
    pairs = zip(episode.turns, of_turns, strict=True)
    return [*chain.from_iterable((*repeat(0, len(turn.observation_ids)), *numbers) for turn, numbers in pairs)]


def _versions(turn: Turn) -> list[int]:
    return [*chain.from_iterable(repeat(span.weights_version, span.num_tokens) for span in turn.spans)]
