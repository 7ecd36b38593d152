"""Scored responses apart from training steps: drawn from the policy for a critic to learn from or to be judged on,
written to a file, read back.

A batch of rollouts has prompts, responses, their lengths and mask, `scores` [B], and the objects of `OBJECTS`; and
`episode` where rollouts may have several rows, each with the score of the whole.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.algorithms.scan import returns_to_go
from valor.collector.collector import Collector
from valor.collector.generation import PROMPT_OBJECTS
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.placement import Placement
from valor.controller.start import start_pools
from valor.data.batch import Batch, Episodes, pad_rows, text_rows, unpadded
from valor.data.files import read_records
from valor.data.messages import parse_messages
from valor.data.prompts import Fits, PromptRow, continued, render
from valor.data.templates import end_tokens
from valor.errors import UserError
from valor.rewards.executor import RewardResult
from valor.tracking.rundir import write_atomically
from valor.workers.roles import role_specs

# Second word of the key of a sample's random numbers, where a training step has its number and validation has -1.
PRETRAIN_STREAM, SCORE_STREAM = 0, -2  # branches: -3 and below
OBJECTS = (*PROMPT_OBJECTS, "finish_reason", "reward_info")
_COLUMNS = ("prompts", "prompt_lengths", "responses", "response_lengths", "response_mask", "scores", *OBJECTS)


@contextmanager
def policy_group(
    config: PPOConfig, inputs: RunInputs, placement: Placement, say: Callable[[str], None]
) -> Iterator[Collector]:
    """The roles that answer and score, alive within the block; no critic and no reference among them."""
    specs = role_specs(config, total_steps=1, eos_token_ids=inputs.eos_token_ids, separator_id=inputs.separator_id)
    specs = {name: spec for name, spec in specs.items() if name in ("actor", "rollout", "reward_model")}
    with closing(start_pools(placement, specs, config.ray_kwargs.ray_init)) as roles:
        yield Collector(config, inputs, roles, say)


def draw_rollouts(collector: Collector, rows: Sequence[PromptRow], stream: int, at_once: int | None = None) -> Batch:
    """`rollout.n` responses to each of `rows`, drawn and scored as in training, all or `at_once` prompts at a time."""
    batch = collector.responses(rows, stream, at_once or len(rows))
    episodes = Episodes(batch)
    batch["scores"] = episodes.spread(episodes.sums(batch["token_level_scores"]))
    drawn = batch.select([*_COLUMNS, *(["episode"] if "episode" in batch else [])])
    return drawn.to("cpu")  # read here what other processes hold, which may have ended before it is looked at


def correct(batch: Batch) -> Tensor:
    """[B] bool: which responses are right: the grader's `acc` where it reports one, else a score above 0."""
    pairs = zip(batch["scores"].tolist(), batch.objects["reward_info"], strict=True)
    return torch.tensor([RewardResult(score, info).correct for score, info in pairs], dtype=torch.bool)


def outcomes(batch: Batch, gamma: float) -> Tensor:
    """Return [B, T] of every state: γ^(policy tokens that follow) times the score, the λ = 1 return."""
    episodes = Episodes(batch)
    mask = episodes.join(batch["response_mask"])
    rewards = algorithms.place_at_end(batch["scores"][[rows[-1] for rows in episodes.rows]], mask)
    return episodes.part(returns_to_go(rewards, mask, gamma))


def same_prompt(batch: Batch) -> list[int]:
    """Number of each row's prompt, in order of appearance: rollouts with the same prompt tokens share it."""
    seen: dict[tuple[int, ...], int] = {}
    prompts, numbers = unpadded(batch, "prompt"), list[int]()
    for rows in Episodes(batch).rows:
        numbers += [seen.setdefault(tuple(prompts[rows[0]]), len(seen))] * len(rows)
    return numbers


def rollout_records(batch: Batch, scores: Sequence[float], step: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Every row as a JSON object: verl's fields (input, output, gts, score, step, data_source), then those that
    `read_rollouts` needs."""
    columns, rows = batch.objects, zip(scores, unpadded(batch, "prompt"), unpadded(batch, "response"), strict=True)
    for i, (score, prompt, response) in enumerate(rows):
        yield {
            "input": tokenizer.decode(prompt),
            "output": tokenizer.decode(response, skip_special_tokens=True),
            "gts": columns["ground_truth"][i],
            "score": score,
            "step": step,
            **{name: columns[name][i] for name in OBJECTS if name in columns and name != "ground_truth"},
            "prompt_ids": prompt,
            "response_ids": response,
            "response_mask": batch["response_mask"][i, : len(response)].int().tolist(),
            **({"episode": int(batch["episode"][i])} if "episode" in batch else {}),
        }


def write_rollouts(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """One JSON object a line; what JSON does not know is written as its text."""
    lines = (json.dumps(record, default=str, ensure_ascii=False) for record in records)
    write_atomically(path, "".join(line + "\n" for line in lines))


def read_rollouts(paths: Sequence[str], tokenizer: Any, fits: Fits = lambda ids, where: None) -> Batch:
    """The rollouts in jsonl or parquet files, or in all such files of a folder.

    A row is what `trainer.rollout_data_dir` and `validation_data_dir` hold (prompt_ids, response_ids), or messages with
    a text response; either has a score. Neighbours with the same `episode` (and `step`) are rows of one rollout.
    UserError: anything else. `fits` looks at every row's tokens.
    """
    records = [(path, where, record) for path in _files(paths) for where, record in read_records(path)]
    rows = [_parse(record, where, tokenizer) for _, where, record in records]
    for row, (_, where, record) in zip(rows[:1], records, strict=False):
        if record.get("prompt_ids") and record.get("input") not in (None, tokenizer.decode(row["prompt"])):
            raise UserError(
                f"{where}: its prompt_ids are not its input in the tokenizer of actor_rollout_ref.model.path: give the "
                "policy that wrote the rollouts"
            )
    for row, (_, where, _) in zip(rows, records, strict=True):
        fits([*row["prompt"], *row["response"]], where)
    batch = text_rows([row["prompt"] for row in rows], [row["response"] for row in rows])
    batch.objects = {name: [row[name] for row in rows] for name in OBJECTS}
    batch["response_mask"], _ = pad_rows([row["response_mask"] for row in rows], torch.float32)
    batch["scores"] = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
    numbers = [(path, record.get("step"), record.get("episode")) for path, _, record in records]
    if any(number is not None for _, _, number in numbers):
        begins = [number != before or number[-1] is None for before, number in pairwise(numbers)]
        batch["episode"] = torch.tensor([False, *begins]).cumsum(0)
    return batch


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        if not files:
            raise UserError(f"'{path}' holds no rollouts: it has no .jsonl or .parquet file")
        yield from files


def _parse(record: Mapping[str, Any], where: str, tokenizer: Any) -> dict[str, Any]:
    if record.get("prompt_ids") is not None and record.get("response_ids") is not None:
        prompt, response = list(record["prompt_ids"]), list(record["response_ids"])
    elif "messages" in record and isinstance(record.get("response"), str):
        text = render(tokenizer, parse_messages(record["messages"], where, "messages"), where=where)
        prompt, answer = continued(tokenizer, [text], [record["response"]])[0]
        response = [*answer, *end_tokens(tokenizer)[:1]]
    else:
        raise UserError(
            f"{where}: not a rollout: it needs prompt_ids and response_ids (as trainer.rollout_data_dir writes them), "
            f"or messages and response; it has {', '.join(record)}"
        )
    mask = record.get("response_mask") or [1] * len(response)
    if not prompt or not response or len(mask) != len(response):
        raise UserError(f"{where}: a rollout has a prompt, a response, and a mask as long as the response")
    size = len(tokenizer)
    if unknown := [token for token in (*prompt, *response) if not isinstance(token, int) or not 0 <= token < size]:
        raise UserError(f"{where}: token {unknown[0]!r} is none of the {size} of this tokenizer")
    score = record.get("score")
    if not isinstance(score, bool | int | float) or not math.isfinite(score):
        raise UserError(f"{where}: the score must be a number, and finite, got {score!r}")
    objects = {name: record.get(name) for name in OBJECTS} | {
        "ground_truth": record.get("ground_truth", record.get("gts")),
        "reward_info": record.get("reward_info") or {},
        "template_kwargs": record.get("template_kwargs") or {},
    }
    return {"prompt": prompt, "response": response, "response_mask": mask, "score": score, **objects}
