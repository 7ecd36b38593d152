"""`valor critic search`: how much better a saved policy answers when a saved critic chooses, for how many tokens."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from valor.collector.inputs import RunInputs
from valor.collector.rollouts import SCORE_STREAM, correct, draw_rollouts, policy_group
from valor.config import CriticSearchConfig, held_out
from valor.data.batch import Batch
from valor.lab.critic_score import values_of
from valor.lab.statistics import bootstrap_interval
from valor.models.load import check_critic, load_policy_tokenizer
from valor.tracking.console import say
from valor.tracking.rundir import write_atomically
from valor.trainer.checks import placed

RESULT_FILES = ("search.json", "search.md")
_CHOICES = {"best": "best-of-N", "majority": "majority vote", "weighted": "weighted majority"}


class SearchRun:
    """Answers held-out prompts `search.samples` times; writes the numbers and the table to `search.out`."""

    def __init__(self, config: CriticSearchConfig, command: str) -> None:
        self.config, self.command, self.placement = config, command, placed(config)

    def fit(self) -> int:
        config = self.config
        answers = self._answers()
        rows = list(results(answers, max(config.search.samples), config.search.samples))
        facts = {
            "policy": config.actor_rollout_ref.model.path,
            "critic": config.critic.model.path,
            "data": config.data.val_files,
            "prompts": len(answers) // max(config.search.samples),
            "temperature": config.actor_rollout_ref.rollout.temperature,
            "seed": config.trainer.seed,
            "command": self.command,
        }
        numbers, page = (Path(config.search.out, name) for name in RESULT_FILES)
        write_atomically(numbers, json.dumps({**facts, "results": rows}, indent=1, allow_nan=False) + "\n")
        text = table(rows)
        about = "\n".join(f"* {name}: {value}" for name, value in facts.items())
        write_atomically(page, f"# Search with a critic\n\n{about}\n\n{text}\n")
        say(text)
        say(str(page))
        return 0

    def _answers(self) -> Batch:
        """max(search.samples) graded answers to each prompt, one prompt's after the other's, with their values."""
        policy = self.config.actor_rollout_ref
        rollout = policy.rollout.model_copy(update={"n": max(self.config.search.samples)})
        policy = policy.model_copy(update={"rollout": rollout})
        config = held_out(self.config.model_copy(update={"actor_rollout_ref": policy}))
        check_critic(config, load_policy_tokenizer(config), trains=False)
        with closing(RunInputs(config)) as inputs, policy_group(config, inputs, self.placement, say) as collector:
            answers = draw_rollouts(collector, list(inputs.train), SCORE_STREAM)
        return answers.union(values_of(self.config, self.placement, answers).select(["values"]))


def results(answers: Batch, each: int, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A result for each method and N in `numbers`; `answers` has `each` to a prompt, of which the first N count.

    An answer's value is that at its last token: V of the state in which all but that token is written. Votes need a
    grader that reports `pred`; without one there are none.
    """
    values = answers["values"].gather(1, answers["response_lengths"][:, None] - 1).squeeze(1).tolist()
    read_as = [info.get("pred") for info in answers.objects["reward_info"]]  # by the graders; "": they found none
    texts = [None if answer == "" else answer for answer in read_as]
    methods = {how: name for how, name in _CHOICES.items() if how == "best" or any(a is not None for a in read_as)}
    right, sampled = correct(answers).tolist(), answers["response_lengths"]
    read = sampled + answers["prompt_lengths"]
    for n in numbers:
        groups = [slice(i, i + n) for i in range(0, len(answers), each)]
        tokens, seen = (sum(int(count[group].sum()) for group in groups) / len(groups) for count in (sampled, read))
        for how, method in methods.items():
            verdicts = [right[group][choose(values[group], texts[group], how)] for group in groups]
            yield _result(method, n, verdicts, tokens, 0.0 if how == "majority" else seen)
        yield _result("any right (pass@N)", n, [any(right[group]) for group in groups], tokens, 0.0)


def choose(values: Sequence[float], answers: Sequence[str | None], how: str) -> int:
    """Which of the answers to take. best: the one of highest value; majority: one that most agree on; weighted: one
    with the highest Σ of values. Votes: the first of the winner's, ties to the answer met first; None does not vote.
    The first answer where nobody votes."""
    if how == "best":
        return max(range(len(values)), key=values.__getitem__)
    votes: dict[str, float] = defaultdict(float)
    for value, answer in zip(values, answers, strict=True):
        if answer is not None:
            votes[answer] += 1.0 if how == "majority" else value
    return answers.index(max(votes, key=votes.__getitem__)) if votes else 0


def _result(method: str, n: int, verdicts: Sequence[bool], sampled: float, read: float) -> dict[str, Any]:
    """Tokens `sampled` by the policy and `read` by the critic are means over the prompts."""
    right = [float(verdict) for verdict in verdicts]
    costs = {"interval": bootstrap_interval(right), "sampled": sampled, "read": read}
    return {"method": method, "n": n, "accuracy": sum(right) / len(right), **costs}


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
    remark = "Tokens are means over the prompts; intervals are bootstraps over them."
    if not any(row["method"] == _CHOICES["majority"] for row in rows):
        remark += " Nothing was voted on: the grader reports no `pred`."
    return "\n".join([*lines, "", remark])
