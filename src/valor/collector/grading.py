"""What responses are worth: graders, a learned reward model or a judge, and DAPO's penalty for length.

Graders get a response as soon as it has ended, while others are still being generated.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

import torch

from valor import algorithms
from valor.agents.episode import Episode, EpisodeKey, last_rows, turn_rewards, turn_tokens
from valor.algorithms.scan import credit_policy_tokens
from valor.collector.inputs import RunInputs
from valor.collector.model_grading import ModelGrading
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, Episodes
from valor.errors import StepRefused
from valor.rewards.executor import RewardResult
from valor.rewards.steps import on_tokens, scaled, token_rewards
from valor.rewards.worker import Sample, gather

_SAMPLE_COLUMNS = ("response_text", "data_source", "ground_truth", "extra_info")


class Grading:
    """The scores of a run, as `config.reward` asks for them.

    In training a reward model takes the rule's place, or joins it: score = `weight` * model + `rule_weight` * rule,
    with both as components `rm_score` and `rule_score`. Validation goes by rule where the data source has a grader,
    else by the model alone, so that it measures the task and not what is trained on.
    """

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Pools) -> None:
        self.config, self.inputs = config.reward, inputs
        self.model = ModelGrading(config, inputs, roles)
        self._max_response_length = config.data.max_response_length
        self._early: dict[EpisodeKey, tuple[Sample, Future[RewardResult]]] = {}

    def sink(self, prompts: Batch, *, validation: bool = False) -> Callable[[Episode], None] | None:
        """For episodes that answer `prompts`: gives each to its grader at once. None where graders have to wait."""
        by_rule = validation or not self.config.reward_model.replaces_rule
        if not by_rule or not self.inputs.rewards.one_by_one:
            return None
        rows = {tuple(key): i for i, key in enumerate(prompts["episode_key"].tolist())}
        columns = prompts.objects

        def grade(episode: Episode) -> None:
            if episode.outcome is not None or episode.error is not None:
                return
            i = rows[episode.key]
            source = columns["data_source"][i]
            if self.inputs.has_grader(source):
                text = self._decode(episode.response_ids) if episode.text is None else episode.text
                turns = episode.turn_texts_by(self.inputs.decode)
                sample = Sample.of_turns(turns, text, source, columns["ground_truth"][i], columns["extra_info"][i])
                self._early[episode.key] = sample, self.inputs.rewards.submit(sample)

        return grade

    def _decode(self, ids: Sequence[int]) -> str:
        return self.inputs.decode([list(ids)])[0]

    def when_graded(self, keys: Sequence[EpisodeKey], then: Callable[[], None]) -> None:
        """Call `then`, in any thread, when no grader is at work on these episodes."""
        pending = {self._early[key][1] for key in keys if key in self._early}
        lock = Lock()

        def ended(future: Future[RewardResult]) -> None:
            with lock:
                pending.discard(future)
                last = not pending
            if last:
                then()

        if not pending:
            then()
        for future in list(pending):
            future.add_done_callback(ended)

    def training(self, batch: Batch) -> list[RewardResult]:
        """What the episodes of a batch are worth in training, in order.

        The batch may gain `step_rewards` [R, T]: what of a score lies on tokens of its own, where a turn, or a step of
        the answer, has ended; with a prover also `progress` [R, T]. Nothing is learnt from an episode with log-probs
        that are not finite: it is an error, and the `response_mask` of its rows becomes 0. StepRefused when there are
        more errors than `reward.max_error_ratio` allows.
        """
        model, ends = self.config.reward_model, last_rows(batch)
        results = [] if model.replaces_rule else self._on_tokens(batch, self._by_rule(ends))
        if model.enable and not model.scores:
            batch["progress"] = self.model.progress(batch)
        if model.scores:
            pairs = zip(self.model.grades(ends), results or [None] * len(ends), strict=True)
            unplayed = self._unplayed(ends)
            results = [unplayed.get(i) or self._joined(*pair) for i, pair in enumerate(pairs)]
        results = self._with_steps(batch, results)
        if "is_finite" in batch:
            self._leave_out_broken(batch, results)
        self._check_errors(results)
        return self._without_overlong_penalty(results, ends)

    def validation(self, batch: Batch) -> list[RewardResult]:
        """The verdicts on the responses, in row order. Where an environment judges, what it gave for the turns counts
        too; the rewards of tools do not."""
        outcomes = enumerate(batch.objects.get("outcome", ()))
        judged = {i for i, outcome in outcomes if outcome is not None}
        known, scores = judged | self._unplayed(batch).keys(), self.config.reward_model.scores
        sources = enumerate(batch.objects["data_source"])
        alone = [i for i, source in sources if scores and i not in known and not self.inputs.has_grader(source)]
        rest = sorted({*range(len(batch))} - {*alone})
        results = dict(zip(rest, self._by_rule(batch.take(rest)), strict=True))
        if alone:
            by_model = zip(alone, self.model.grades(batch.take(alone)), strict=True)
            results |= {i: r._replace(score=r.total) for i, r in by_model}  # its steps are all that it says
        if judged:
            of_turns = turn_rewards(batch).tolist()
            results |= {i: results[i]._replace(score=results[i].score + of_turns[i]) for i in judged}
        return [results[i] for i in range(len(batch))]

    def _on_tokens(self, batch: Batch, results: list[RewardResult]) -> list[RewardResult]:
        """With tokens for the spans of steps, which graders of episodes give in the policy's own words."""
        if "turn_texts" not in batch or not any(result.steps for result in results):
            return results
        results, episodes = list(results), Episodes(batch).rows
        for i, rows in enumerate(episodes):
            turns, first = list[tuple[int, list[int], str]](), 0
            for row in rows:
                length = int(batch["response_lengths"][row])
                ids, numbers = (batch[name][row, :length].tolist() for name in ("responses", "turn_ids"))
                texts = batch.objects["turn_texts"][row]
                found = zip(turn_tokens(ids, numbers), texts, strict=True)
                turns += [(first + at, own, text) for (_, at, own), text in found]
                first += length
            try:
                results[i] = results[i]._replace(
                    steps=tuple(on_tokens(results[i].steps, turns, self._decode, between=1))
                )
            except ValueError as error:
                results[i] = RewardResult(self.config.error_score, {}, str(error))
        return results

    def _with_steps(self, batch: Batch, results: list[RewardResult]) -> list[RewardResult]:
        """Where there are any: adds `step_rewards` to the batch, and to the scores what they sum to. A step that the
        response does not have makes its sample an error."""
        if "turn_rewards" not in batch and not any(result.steps for result in results):
            return results
        mask, results = batch["response_mask"], list(results)
        placed = batch["turn_rewards"].clone() if "turn_rewards" in batch else torch.zeros_like(mask)
        episodes = Episodes(batch)
        for i, rows in enumerate(episodes.rows):
            if not results[i].steps:
                continue
            lengths = batch["response_lengths"][rows].tolist()
            ids = [batch["responses"][row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
            try:
                found = token_rewards(results[i].steps, ids, self._decode)
            except ValueError as error:
                results[i] = RewardResult(self.config.error_score, {}, str(error))
                continue
            for row, rewards in zip(rows, found, strict=True):
                placed[row, : len(rewards)] += torch.tensor(rewards)
            own = math.fsum(reward for _, reward in results[i].steps)
            components = {"acc": results[i].correct, **results[i].components, "step_reward": own}
            results[i] = results[i]._replace(components=components)
        # What an observation has earned is the doing of the policy token before it.
        batch["step_rewards"] = credit_policy_tokens(placed, mask, "carry")
        totals = episodes.sums(batch["step_rewards"]).tolist()
        return [r._replace(score=r.score + total) for r, total in zip(results, totals, strict=True)]

    def _leave_out_broken(self, batch: Batch, results: list[RewardResult]) -> None:
        broken = ~batch["is_finite"]
        if not broken.any():
            return
        columns = {name: batch[name].clone() for name in ("rollout_log_probs", "response_mask")}
        error = "the rollout engine gave log-probs that are not finite"
        for i, rows in enumerate(Episodes(batch).rows):
            if broken[rows].any():
                for column in columns.values():
                    column[rows] = 0.0
                results[i] = RewardResult(self.config.error_score, {}, error)
        batch.tensors.update(columns)

    def _check_errors(self, results: list[RewardResult]) -> None:
        errors = Counter(r.error for r in results if r.error is not None)
        if errors.total() > self.config.max_error_ratio * len(results):
            error, count = errors.most_common(1)[0]
            raise StepRefused(
                f"{errors.total()} of {len(results)} samples could not be graded, more than reward.max_error_ratio="
                f"{self.config.max_error_ratio:g} allows; most often ({count} x): {error}"
            )

    def _unplayed(self, batch: Batch) -> dict[int, RewardResult]:
        """By row, why its episode could not be played: there is nothing to be judged then."""
        errors = enumerate(batch.objects.get("episode_error", ()))
        return {i: RewardResult(self.config.error_score, {}, error) for i, error in errors if error is not None}

    def _by_rule(self, batch: Batch) -> list[RewardResult]:
        """What environments say, and graders of the rest; what these were given early is not graded again."""
        outcomes = enumerate(batch.objects.get("outcome", ()))
        found = {i: RewardResult(outcome, {}) for i, outcome in outcomes if outcome is not None} | self._unplayed(batch)
        rows = enumerate(zip(*(batch.objects[name] for name in _SAMPLE_COLUMNS), strict=True))
        turns = batch.objects.get("turn_texts", [None] * len(batch))
        samples = {i: Sample.of_turns(turns[i], *row) for i, row in rows if i not in found}
        futures: dict[int, Future[RewardResult]] = {}
        for i, key in enumerate(batch["episode_key"].tolist() if "episode_key" in batch else ()):
            early = self._early.pop(tuple(key), None)
            if early is not None and i in samples and _texts(early[0]) == _texts(samples[i]):
                futures[i] = early[1]
        rest = [i for i in samples if i not in futures]
        futures |= zip(rest, self.inputs.rewards.submit_all([samples[i] for i in rest]), strict=True)
        found |= zip(samples, gather([futures[i] for i in samples]), strict=True)
        return [found[i] for i in range(len(batch))]

    def _joined(self, model: RewardResult, rule: RewardResult | None) -> RewardResult:
        """A failed part counts as `error_score`, as it does alone."""
        weights = self.config.reward_model
        model = model._replace(score=weights.weight * model.score, steps=scaled(model.steps, weights.weight))
        if rule is None:
            return model
        components = {**rule.components, "acc": rule.correct, "rule_score": rule.score, **model.components}
        return RewardResult(
            model.score + weights.rule_weight * rule.score,
            components,
            " and ".join(e for e in (rule.error, model.error) if e is not None) or None,
            max(rule.seconds, model.seconds),
            steps=(*model.steps, *scaled(rule.steps, weights.rule_weight)),
        )

    def _without_overlong_penalty(self, results: list[RewardResult], batch: Batch) -> list[RewardResult]:
        """Under `reward_manager.name=dapo` with an overlong buffer: scores less DAPO's soft penalty for length.

        The penalty is the component `overlong_reward` (0 or negative); whether an answer is right stays as it was.
        """
        buffer = self.config.reward_kwargs.overlong_buffer_cfg
        if self.config.reward_manager.name != "dapo" or not buffer.enable:
            return results
        penalties = algorithms.overlong_penalty(
            batch["response_lengths"],
            max_response_length=self._max_response_length,
            buffer_length=buffer.len,
            penalty_factor=buffer.penalty_factor,
        )
        return [
            r._replace(score=r.score + p, components={"acc": r.correct, **r.components, "overlong_reward": p})
            for r, p in zip(results, penalties.tolist(), strict=True)
        ]


def _texts(sample: Sample) -> tuple[Any, ...]:
    return sample.solution_str, sample.turns, sample.transcript
