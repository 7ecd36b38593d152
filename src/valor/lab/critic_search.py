"""`valor critic search`: how much better a saved policy answers when a saved critic chooses, for how many tokens."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path as FilePath
from typing import Any

import torch

from valor.collector.generation import sampling_params
from valor.collector.inputs import RunInputs
from valor.config import CriticSearchConfig, held_out
from valor.lab.search import Path, Searcher, Spent, choose
from valor.lab.statistics import bootstrap_interval
from valor.models.load import check_critic, load_policy, load_value_model
from valor.rewards.worker import Sample
from valor.rollout.native.engine import NativeEngine
from valor.tracking.console import say
from valor.tracking.rundir import write_atomically
from valor.workers.rollout import end_token_ids

Graded = tuple[Sequence[Path], list[str | None], list[bool]]
RESULT_FILES = ("search.json", "search.md")
_CHOICES = {"best": "best-of-N", "majority": "majority vote", "weighted": "weighted majority"}


def start(config: CriticSearchConfig, command: str) -> int:
    """Measure, and write the numbers and the table to `search.out`."""
    with closing(RunInputs(held_out(config))) as inputs:
        rows = list(_measure(config, inputs))
    facts = {
        "policy": config.actor_rollout_ref.model.path,
        "critic": config.critic.model.path,
        "data": config.data.val_files,
        "prompts": len(inputs.train),
        "temperature": config.actor_rollout_ref.rollout.temperature,
        "seed": config.trainer.seed,
        "command": command,
    }
    numbers, page = (FilePath(config.search.out, name) for name in RESULT_FILES)
    write_atomically(numbers, json.dumps({**facts, "results": rows}, indent=1, allow_nan=False) + "\n")
    text = table(rows)
    about = "\n".join(f"* {name}: {value}" for name, value in facts.items())
    write_atomically(page, f"# Search with a critic\n\n{about}\n\n{text}\n")
    say(text)
    say(str(page))
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each method and N."""
    lines = [
        "| method | N | accuracy | 95 % | sampled tokens | tokens read by the critic |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for row in rows:
        low, high = row["interval"] or (row["accuracy"], row["accuracy"])
        cost = f"{row['sampled']:,.1f} | {row['read']:,.1f}"
        lines.append(f"| {row['method']} | {row['n']} | {row['accuracy']:.3f} | {low:.3f} to {high:.3f} | {cost} |")
    return "\n".join([*lines, "", "Tokens are means over the prompts; intervals are bootstraps over them."])


def _measure(config: CriticSearchConfig, inputs: RunInputs) -> Iterator[dict[str, Any]]:
    """A result for each method and N."""

    def right(graded: Sequence[Graded], how: str) -> list[bool]:
        return [verdicts[choose(paths, answers, how)] for paths, answers, verdicts in graded]

    search, searcher = config.search, _searcher(config, inputs)
    most = max(search.samples)
    drawn, spent = _graded(inputs, searcher.samples(most)), searcher.spent
    for n in search.samples:
        sampled, read = round(spent.sampled * n / most), round(spent.read * n / most)
        some = [(paths[:n], answers[:n], verdicts[:n]) for paths, answers, verdicts in drawn]
        for how, name in _CHOICES.items():
            yield _result(name, n, right(some, how), Spent(sampled, 0 if how == "majority" else read))
        yield _result("any right (pass@N)", n, [any(verdicts) for _, _, verdicts in some], Spent(sampled, 0))


def _result(method: str, n: int, right: Sequence[bool], spent: Spent) -> dict[str, Any]:
    values = [float(verdict) for verdict in right]
    return {
        "method": method,
        "n": n,
        "accuracy": sum(values) / len(values),
        "interval": bootstrap_interval(values),
        "sampled": spent.sampled / len(values),
        "read": spent.read / len(values),
    }


def _searcher(config: CriticSearchConfig, inputs: RunInputs) -> Searcher:
    """The policy's engine and the critic, in this process."""
    check_critic(config, inputs.tokenizer)
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    device = "cuda" if torch.cuda.is_available() and config.trainer.device != "cpu" else "cpu"
    torch.set_num_threads(config.trainer.num_threads or torch.get_num_threads())
    policy = load_policy(model, dtype=getattr(torch, rollout.dtype)).to(device)
    ends = end_token_ids(model, inputs.eos_token_ids)
    engine = NativeEngine(policy.hf, eos_token_ids=ends, max_num_seqs=rollout.max_num_seqs)
    critic = load_value_model(config.critic.model, levels=config.critic.value_levels).to(device)
    prompts = [row.prompt_ids for row in inputs.train]
    seed, at_once = config.trainer.seed, config.critic.ppo_max_token_len_per_gpu
    return Searcher(engine, critic, prompts, sampling_params(config), seed=seed, most_read=at_once)


def _graded(inputs: RunInputs, responses: Sequence[Sequence[Path]]) -> list[Graded]:
    """Each prompt's responses with their answers as the graders read them (`pred`), and which are right."""
    samples = [
        Sample(row.data_source, text, row.ground_truth, row.extra_info)
        for row, paths in zip(inputs.train, responses, strict=True)
        for text in inputs.decode([list(path.ids) for path in paths])
    ]
    results = iter(inputs.rewards.score(samples))
    graded = []
    for paths in responses:
        scores = [next(results) for _ in paths]
        graded.append((paths, [s.components.get("pred") or None for s in scores], [s.correct for s in scores]))
    return graded
