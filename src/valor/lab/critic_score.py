"""`valor critic score`: is this critic any good? Its values on held-out rollouts against what came of them."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from valor.collector.branches import BRANCH_STREAM, branch_returns
from valor.collector.inputs import RunInputs
from valor.collector.rollouts import (
    SCORE_STREAM,
    correct,
    draw_rollouts,
    outcomes,
    policy_group,
    read_rollouts,
    rollout_records,
    same_prompt,
    write_rollouts,
)
from valor.config import CriticRunConfig, CriticScoreConfig, held_out
from valor.controller.placement import Placement
from valor.controller.start import start_pools
from valor.data.batch import Batch, Episodes
from valor.data.sampler import subset
from valor.lab.publish import SCORECARD_FILES, fingerprint
from valor.lab.scorecard import Branches, Judged, scorecard
from valor.models.load import check_critic, load_policy_tokenizer
from valor.report.lab_pages import main_numbers, scorecard_page
from valor.report.run_data import evenly_spaced
from valor.tracking.console import say
from valor.tracking.progress import phase
from valor.tracking.rundir import write_atomically
from valor.trainer.checks import placed
from valor.workers.roles import role_specs

ROLLOUTS_FILE = "rollouts.jsonl"
_CHOICE_STREAM = 4  # last word of a random key


class ScoreRun:
    """Draws or reads rollouts and asks the critic; writes the numbers and the page to `score.out`."""

    def __init__(self, config: CriticScoreConfig, command: str) -> None:
        self.config, self.command, self.placement = config, command, placed(config)

    def fit(self) -> int:
        config = self.config
        card = {
            "critic": config.critic.model.path,
            "weights": fingerprint(Path(config.critic.model.path)),
            "policy": config.actor_rollout_ref.model.path,
            "data": config.score.rollouts or config.data.val_files,
            "temperature": config.actor_rollout_ref.rollout.temperature,
            "gamma": config.algorithm.gamma,
            "seed": config.trainer.seed,
            "command": self.command,
            **scorecard(*_measure(config, self.placement), config.algorithm.gamma),
        }
        numbers, page = (Path(config.score.out, name) for name in SCORECARD_FILES)
        write_atomically(numbers, json.dumps(card, indent=1, allow_nan=False) + "\n")
        write_atomically(page, scorecard_page(card))
        say(f"{card['responses']} answers to {card['prompts']} prompts, {card['right']:.1%} right")
        for name, value, remark in main_numbers(card):
            say(f"{name}: {value} ({remark})")
        say(str(page))
        return 0


def values_of(config: CriticRunConfig, placement: Placement, rollouts: Batch) -> Batch:
    """`compute_values` of the critic."""
    frozen = config.model_copy(update={"critic": config.critic.model_copy(update={"freeze": True})})
    critic = replace(role_specs(frozen, total_steps=0, eos_token_ids=[])["critic"], replaceable=True)
    roles = start_pools(placement, {"critic": critic}, config.ray_kwargs.ray_init)
    with closing(roles), phase("values", len(rollouts), unit="sample"):
        return roles["critic"].compute_values(rollouts).to("cpu")  # read before the processes that hold it end


def _measure(config: CriticScoreConfig, placement: Placement) -> tuple[Judged, Branches | None]:
    """Rollouts, branches if asked for, and the critic's values of the rollouts: policy and critic take turns."""
    tokenizer = load_policy_tokenizer(config)
    check_critic(config, tokenizer, trains=False)
    rollouts, branches = _rollouts(config, placement)
    values = values_of(config, placement, rollouts)["values"]
    records = rollout_records(rollouts, rollouts["scores"].tolist(), 0, tokenizer)
    lengths = rollouts["response_lengths"].tolist()
    with_values = (record | {"values": v[:n]} for record, v, n in zip(records, values.tolist(), lengths, strict=True))
    write_rollouts(Path(config.score.out) / ROLLOUTS_FILE, with_values)
    returns, mask = outcomes(rollouts, config.algorithm.gamma), rollouts["response_mask"]
    columns = {"values": values, "returns": returns, "response_mask": mask}
    # One column of padding more, or a turn might run on into the next row of its episode.
    rows = rollouts.union(Batch({name: pad(column, (0, 1)) for name, column in columns.items()}))
    episodes = Episodes(rows).joined()
    mask = episodes["response_mask"]
    right, prompts = correct(episodes), same_prompt(episodes)
    return Judged(episodes["values"], episodes["returns"], mask, right, prompts), branches


def _rollouts(config: CriticScoreConfig, placement: Placement) -> tuple[Batch, Branches | None]:
    score = config.score
    if score.rollouts:
        return read_rollouts(score.rollouts, load_policy_tokenizer(config)), None
    as_training = held_out(config)  # answered as training prompts are: by sampling, rollout.n times
    with (
        closing(RunInputs(as_training)) as inputs,
        policy_group(as_training, inputs, placement, say) as collector,
    ):
        rollouts = draw_rollouts(collector, list(inputs.train), SCORE_STREAM)
        if not score.mc:
            return rollouts, None
        chosen = subset(len(rollouts), score.responses, config.trainer.seed, 0, _CHOICE_STREAM)
        lengths = rollouts["response_lengths"].tolist()
        points = [(row, token) for row in chosen for token in evenly_spaced(range(lengths[row]), score.positions)]
        behind = [(row, token + 1) for row, token in points if token + 1 < lengths[row]]
        gamma = config.algorithm.gamma
        states = points + behind
        returns, _ = branch_returns(collector, rollouts, states, score.mc, gamma, BRANCH_STREAM, all_at_end=True)
        rows, tokens = torch.tensor(points).T
        after = rollouts["scores"][rows, None].repeat(1, score.mc)  # behind the last token
        after[tokens + 1 < rollouts["response_lengths"][rows]] = gamma * returns[len(points) :]
        return rollouts, Branches(rows, tokens, returns[: len(points)], after)
