"""Monte-Carlo ground truth for values: rollouts that branch off a response and are played to the end."""

from __future__ import annotations

from dataclasses import replace

import torch

from valor.collector.collector import Collector
from valor.collector.prompts import PROMPT_OBJECTS, sampling_params
from valor.collector.rollouts import BRANCH_STREAM
from valor.data.batch import Batch, pad_rows
from valor.data.episodes import Episodes
from valor.data.sampler import subset
from valor.errors import UserError
from valor.lab.scorecard import Branches
from valor.report.run_data import evenly_spaced
from valor.tracking.progress import phase

_CHOICE_STREAM = 4  # last word of a random key


def draw_branches(
    collector: Collector, rollouts: Batch, *, responses: int, positions: int, branches: int, gamma: float
) -> Branches:
    """`branches` rollouts from each of `positions` states (first token to last, evenly spaced) of some responses.

    The prompt and the response so far are the branch's prompt; it is sampled as in training, by random numbers that
    depend on the run's seed and the branch's number alone, and graded as a whole. UserError: responses with tokens
    that the policy did not write, as a branch has no environment to go on in.
    """
    seed, limit = collector.config.trainer.seed, collector.config.data.max_response_length
    lengths = rollouts["response_lengths"]
    if Episodes(rollouts).forked or bool((rollouts["response_mask"].sum(1) != lengths).any()):
        raise UserError(
            "score.mc branches off answers of one turn, and these have tokens that the policy did not write"
        )
    chosen = subset(len(rollouts), responses, seed, 0, _CHOICE_STREAM)
    points = [(row, token) for row in chosen for token in evenly_spaced(range(int(lengths[row])), positions)]
    rows, tokens = (torch.tensor(column) for column in zip(*points, strict=True))

    so_far = [rollouts["responses"][row, :token].tolist() for row, token in points]
    asked = [rollouts["prompts"][row, : int(rollouts["prompt_lengths"][row])].tolist() for row, _ in points]
    prompts, prompt_lengths = pad_rows([a + b for a, b in zip(asked, so_far, strict=True)], torch.long)
    objects = {name: [rollouts.objects[name][row] for row, _ in points] for name in PROMPT_OBJECTS}
    objects["uid"] = [f"{row}@{token}" for row, token in points]
    states = Batch({"prompts": prompts, "prompt_lengths": prompt_lengths}, objects).repeat(branches)
    states["episode_key"] = torch.tensor([[seed, BRANCH_STREAM, number] for number in range(len(states))])
    # One call for all: a branch that goes on beyond the limit is cut afterwards, as its tokens do not depend on it.
    params = replace(sampling_params(collector.config), max_tokens=limit - int(tokens.min()))
    with phase("branches", len(states), unit="sample"):
        drawn = collector.generation.answer(states, params)
    ends = [
        row[: min(int(n), limit - len(so_far[i // branches]))]
        for i, (row, n) in enumerate(zip(drawn["responses"].tolist(), drawn["response_lengths"], strict=True))
    ]
    whole, whole_lengths = pad_rows([so_far[i // branches] + end for i, end in enumerate(ends)], torch.long)
    answers = rollouts.take(rows).repeat(branches)
    answers["responses"], answers["response_lengths"] = whole, whole_lengths
    answers["response_mask"] = (torch.arange(whole.shape[1]) < whole_lengths[:, None]).float()
    with phase("reward", len(answers), unit="sample"):
        scores = collector.scores(collector.inputs.with_text(answers))
    to_go = torch.tensor([len(end) - 1 for end in ends])
    return Branches(rows, tokens, (scores * gamma**to_go).view(len(points), branches))
