"""Rollouts that branch off responses and are played to the end: Monte-Carlo values of the states in between."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from valor.algorithms import place_at_end
from valor.algorithms.scan import returns_to_go
from valor.collector.collector import Collector
from valor.collector.generation import PROMPT_OBJECTS, sampling_params
from valor.data.batch import Batch, Episodes, pad_rows, unpadded
from valor.errors import UserError
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase

BRANCH_STREAM = -3
"""Second word of the key of a branch's random numbers; in training the step is taken off."""
_GRADED = ("prompts", "prompt_lengths", "responses", "response_lengths", "response_mask")
_OBJECTS = (*PROMPT_OBJECTS, "finish_reason")


def branch_returns(
    collector: Collector,
    rollouts: Batch,
    points: Sequence[tuple[int, int]],
    branches: int,
    gamma: float,
    stream: int,
    *,
    all_at_end: bool = False,
) -> tuple[Tensor, int]:
    """[n, branches] returns of rollouts from the states before (row, token) of `rollouts`; and the tokens they took.

    The prompt and the response so far are the branch's prompt; it is sampled as in training, by random numbers that
    depend on the run's seed, `stream` and the branch's number alone, and graded with the response before it. What steps
    before the state have earned is no part of the return, except with all_at_end, where the whole score is earned then.
    UserError: responses with tokens that the policy did not write, as a branch has no environment to go on in.
    """
    seed, limit = collector.config.trainer.seed, collector.config.data.max_response_length
    lengths = rollouts["response_lengths"]
    if Episodes(rollouts).forked or bool((rollouts["response_mask"].sum(1) != lengths).any()):
        raise UserError("branches go off answers of one turn, and these have tokens that the policy did not write")
    rows = torch.tensor([row for row, _ in points])
    so_far = [rollouts["responses"][row, :token].tolist() for row, token in points]
    starts = rollouts.select(("prompts", "prompt_lengths", *PROMPT_OBJECTS)).take(rows)
    ids = [[*prompt, *tokens] for prompt, tokens in zip(unpadded(starts, "prompt"), so_far, strict=True)]
    starts["prompts"], starts["prompt_lengths"] = pad_rows(ids, torch.long)
    starts.objects["uid"] = [f"{row}@{token}" for row, token in points]
    states = starts.repeat(branches)
    states["episode_key"] = torch.tensor([[seed, stream, number] for number in range(len(states))])
    # One call for all: a branch that goes on beyond the limit is cut afterwards, as its tokens do not depend on it.
    params = replace(sampling_params(collector.config), max_tokens=limit - min(map(len, so_far)))
    with phase("branches", len(states), unit="sample"):
        drawn = collector.generation.answer(states, params)
    before = [tokens for tokens in so_far for _ in range(branches)]
    ends = [row[: limit - len(tokens)] for tokens, row in zip(before, unpadded(drawn, "response"), strict=True)]
    answers = rollouts.select([*_GRADED, *_OBJECTS]).take(rows).repeat(branches)
    responses = [[*tokens, *end] for tokens, end in zip(before, ends, strict=True)]
    answers["responses"], answers["response_lengths"] = pad_rows(responses, torch.long)
    width = answers["responses"].shape[1]
    answers["response_mask"] = (torch.arange(width) < answers["response_lengths"][:, None]).float()
    graded, _ = collector.graded(collector.inputs.with_text(answers), Timer())
    rewards, mask = graded["token_level_scores"], graded["response_mask"]
    to_go = returns_to_go(place_at_end(rewards.sum(-1), mask) if all_at_end else rewards, mask, gamma)
    states = torch.tensor([len(tokens) for tokens in before])[:, None]
    return to_go.gather(1, states).view(len(points), branches), sum(map(len, ends))
