"""What responses are worth: graders, a learned reward model or a judge, and DAPO's penalty for length.

Graders get a response as soon as it has ended, while others are still being generated.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

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
from valor.rewards.steps import Step, on_tokens, scaled, token_rewards
from valor.rewards.worker import NOT_GRADED, Sample, gather

logger = logging.getLogger(__name__)

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
        self._episode_length, self._may_be_ungraded = config.episode_length, config.distillation.alone
        self._early: dict[EpisodeKey, tuple[Sample, Future[RewardResult]]] = {}
        self._has_warned = False  # that the user's own function is not called

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
                text = self.model.decode(episode.response_ids) if episode.text is None else episode.text
                turns = episode.turn_texts_by(self.inputs.decode)
                sample = Sample.of_turns(turns, text, source, columns["ground_truth"][i], columns["extra_info"][i])
                self._early[episode.key] = sample, self.inputs.rewards.submit(sample)

        return grade

    def when_graded(self, keys: Sequence[EpisodeKey], then: Callable[[], None]) -> None:
        """Call `then`, in any thread, when the graders of these episodes have ended."""
        futures = iter([self._early[key][1] for key in keys if key in self._early])

        def wait_for_next(_: object = None) -> None:
            for future in futures:
                if not future.done():
                    future.add_done_callback(wait_for_next)
                    return
            then()

        wait_for_next()

    def training(self, batch: Batch) -> tuple[list[RewardResult], dict[str, Tensor]]:
        """What the episodes of a batch are worth in training, and columns [R, T], where there are such: `step_rewards`,
        the part of a score that lies on tokens of its own, where a turn, or a step of the answer, has ended; `progress`
        (`ModelGrading`).

        StepRefused when there are more errors than `reward.max_error_ratio` allows. An episode with log-probs that are
        not finite is an error.
        """
        model, ends = self.config.reward_model, last_rows(batch)
        results = [] if model.replaces_rule else self._by_rule(ends)
        columns: dict[str, Tensor] = {}
        if model.enable and not model.scores:
            columns["progress"] = self.model.progress(batch)
        if model.scores:
            pairs = zip(self.model.grades(ends), results or [None] * len(ends), strict=True)
            unplayed = self._unplayed(ends)
            results = [unplayed.get(i) or self._joined(*pair) for i, pair in enumerate(pairs)]
        results, steps = self._with_steps(batch, results)
        if steps is not None:
            columns["step_rewards"] = steps
        if "is_finite" in batch:
            error = "the rollout engine gave log-probs that are not finite"
            for i, rows in enumerate(Episodes(batch).rows):
                if not batch["is_finite"][rows].all():
                    results[i] = RewardResult(self.config.error_score, {}, error)
        self._check_errors(results)
        return self._without_overlong_penalty(results, batch), columns

    def validation(self, batch: Batch) -> list[RewardResult]:
        """The verdicts on the responses, in row order. Where an environment judges, what it gave for the turns counts
        too; the rewards of tools do not. StepRefused: as in training."""
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
            turn_sums = turn_rewards(batch).tolist()
            results |= {i: results[i]._replace(score=results[i].score + turn_sums[i]) for i in judged}
        verdicts = [results[i] for i in range(len(batch))]
        self._check_errors(verdicts)
        return verdicts

    def _with_steps(self, batch: Batch, results: list[RewardResult]) -> tuple[list[RewardResult], Tensor | None]:
        """Scores with the sums of the steps' and turns' rewards, and these on tokens [R, T]; None where there are none.

        A step that the response does not have makes its sample an error.
        """
        if "turn_rewards" not in batch and not any(result.steps for result in results):
            return results, None
        mask, results = batch["response_mask"], list(results)
        placed = batch["turn_rewards"].clone() if "turn_rewards" in batch else torch.zeros_like(mask)
        episodes = Episodes(batch)
        for i, rows in enumerate(episodes.rows):
            if not results[i].steps:
                continue
            try:
                rewards = self._token_rewards(batch, rows, results[i].steps)
            except ValueError as error:
                results[i] = RewardResult(self.config.error_score, {}, str(error))
                continue
            for row, of_row in zip(rows, rewards, strict=True):
                placed[row, : len(of_row)] += torch.tensor(of_row)
            total = math.fsum(reward for _, reward in results[i].steps)
            components = {"acc": results[i].correct, **results[i].components, "step_reward": total}
            results[i] = results[i]._replace(components=components)
        # The reward of an observation is credited to the preceding policy token.
        steps = credit_policy_tokens(placed, mask, "carry")
        totals = episodes.sums(steps).tolist()
        return [r._replace(score=r.score + total) for r, total in zip(results, totals, strict=True)], steps

    def _token_rewards(self, batch: Batch, rows: list[int], steps: Sequence[Step]) -> list[list[float]]:
        """The steps' rewards on the tokens of an episode's rows. ValueError: a step is not in the response."""
        ids = [batch["responses"][row, : int(batch["response_lengths"][row])].tolist() for row in rows]
        if "turn_texts" in batch:  # graders of episodes give spans of the policy's own words
            turns, first = list[tuple[int, list[int], str]](), 0
            for row, of_row in zip(rows, ids, strict=True):
                numbers = batch["turn_ids"][row, : len(of_row)].tolist()
                texts = batch.objects["turn_texts"][row]
                pairs = zip(turn_tokens(of_row, numbers), texts, strict=True)
                turns += [(first + at, tokens, text) for (_, at, tokens), text in pairs]
                first += len(of_row)
            steps = on_tokens(steps, turns, self.model.decode, between=1)
        return token_rewards(steps, ids, self.model.decode)

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
        """Environments' outcomes, and graders' results for the rest; what `sink` had graded is not graded again."""
        outcomes, function = enumerate(batch.objects.get("outcome", ())), self.config.custom_reward_function.path
        results = {i: RewardResult(outcome, {}) for i, outcome in outcomes if outcome is not None}
        if function and 0 < len(results) == len(batch) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "reward.custom_reward_function.path=%s is not called: episodes come with the score of their environment"
                " or program; where that is None (an Env with grades = False), the function gives it",
                function,
            )
        results |= self._unplayed(batch)
        if self._may_be_ungraded:
            sources = enumerate(batch.objects["data_source"])
            ungraded = [i for i, source in sources if i not in results and not self.inputs.has_grader(source)]
            results |= dict.fromkeys(ungraded, RewardResult(0.0, {NOT_GRADED: "its data source has no grader"}))
        rows = enumerate(zip(*(batch.objects[name] for name in _SAMPLE_COLUMNS), strict=True))
        turns = batch.objects.get("turn_texts", [None] * len(batch))
        samples = {i: Sample.of_turns(turns[i], *row) for i, row in rows if i not in results}
        futures: dict[int, Future[RewardResult]] = {}
        for i, key in enumerate(batch["episode_key"].tolist() if "episode_key" in batch else ()):
            early = self._early.pop(tuple(key), None)
            if early is not None and i in samples and _texts(early[0]) == _texts(samples[i]):
                futures[i] = early[1]
        rest = [i for i in samples if i not in futures]
        futures |= zip(rest, self.inputs.rewards.submit_all([samples[i] for i in rest]), strict=True)
        results |= zip(samples, gather([futures[i] for i in samples]), strict=True)
        return [results[i] for i in range(len(batch))]

    def _joined(self, model: RewardResult, rule: RewardResult | None) -> RewardResult:
        """A failed part counts as `error_score`, as it does alone."""
        weights = self.config.reward_model
        model = model._replace(score=weights.weight * model.score, steps=scaled(model.steps, weights.weight))
        if rule is None:
            return model
        components = {**rule.components, "acc": rule.correct, "rule_score": rule.score, **model.components}
        error = " and ".join(e for e in (rule.error, model.error) if e is not None) or None
        return RewardResult(
            model.score + weights.rule_weight * rule.score,
            components if error is None else {},  # those of the part that failed are not there
            error,
            max(rule.seconds, model.seconds),
            steps=(*model.steps, *scaled(rule.steps, weights.rule_weight)),
        )

    def _without_overlong_penalty(self, results: list[RewardResult], batch: Batch) -> list[RewardResult]:
        """Under `reward_manager.name=dapo` with an overlong buffer: scores less DAPO's soft penalty for length, that of
        an episode's longest row, as the limit is that of a row.

        The penalty is the component `overlong_reward` (0 or negative); whether an answer is right stays as it was.
        """
        buffer = self.config.reward_kwargs.overlong_buffer_cfg
        if self.config.reward_manager.name != "dapo" or not buffer.enable:
            return results
        lengths = batch["response_lengths"]
        penalties = algorithms.overlong_penalty(
            torch.stack([lengths[rows].max() for rows in Episodes(batch).rows]),
            max_response_length=self._episode_length,
            buffer_length=buffer.len,
            penalty_factor=buffer.penalty_factor,
        )
        return [
            r._replace(
                score=r.score + p,
                components={"acc": r.correct, **r.components, "overlong_reward": p} if r.error is None else {},
            )
            for r, p in zip(results, penalties.tolist(), strict=True)
        ]


def without_broken(batch: Batch) -> Batch:
    """The batch with `rollout_log_probs` and `response_mask` 0 in episodes with log-probs that are not finite: nothing
    is learnt from these."""
    if "is_finite" not in batch or batch["is_finite"].all():
        return batch
    broken = [row for rows in Episodes(batch).rows if not batch["is_finite"][rows].all() for row in rows]
    columns = {name: batch[name].clone() for name in ("rollout_log_probs", "response_mask")}
    for column in columns.values():
        column[broken] = 0.0
    return batch.union(Batch(columns))


def _texts(sample: Sample) -> tuple[Any, ...]:
    return sample.solution_str, sample.turns, sample.transcript
