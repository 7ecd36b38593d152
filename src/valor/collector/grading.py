"""What responses are worth: graders, a learned reward model or a judge, and DAPO's penalty for length.

Graders get a response as soon as it has ended, while others are still being generated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

from valor import algorithms
from valor.agents.episode import Episode, EpisodeKey, last_rows, turn_rewards
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.group import Roles
from valor.data.batch import Batch
from valor.data.episodes import Episodes
from valor.data.reward_texts import prompt_text
from valor.errors import StepRefused
from valor.rewards.executor import RewardResult
from valor.rewards.judge import Question
from valor.rewards.worker import Sample, gather
from valor.tracking.progress import phase

_SAMPLE_COLUMNS = ("data_source", "response_text", "ground_truth", "extra_info")


class Grading:
    """The scores of a run, as `config.reward` asks for them.

    In training a reward model takes the rule's place, or joins it: score = `weight` * model + `rule_weight` * rule,
    with both as components `rm_score` and `rule_score`. Validation goes by rule where the data source has a grader,
    else by the model alone, so that it measures the task and not what is trained on.
    """

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Roles) -> None:
        self.config, self.inputs, self.roles = config.reward, inputs, roles
        self._max_response_length = config.data.max_response_length
        self._early: dict[EpisodeKey, tuple[str, Future[RewardResult]]] = {}

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
                text = self.inputs.decode([episode.response_ids])[0] if episode.text is None else episode.text
                sample = Sample(source, text, columns["ground_truth"][i], columns["extra_info"][i])
                self._early[episode.key] = text, self.inputs.rewards.submit_all([sample])[0]

        return grade

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

        Nothing is learnt from an episode with log-probs that are not finite: it is an error, and the `response_mask` of
        its rows becomes 0. StepRefused when there are more errors than `reward.max_error_ratio` allows.
        """
        model, ends = self.config.reward_model, last_rows(batch)
        results = [] if model.replaces_rule else self._by_rule(ends)
        if model.enable:
            pairs = zip(self._by_model(ends), results or [None] * len(ends), strict=True)
            results = [self._joined(by_model, by_rule) for by_model, by_rule in pairs]
        if "turn_rewards" in batch:
            pairs = zip(results, turn_rewards(batch).tolist(), strict=True)
            results = [r._replace(score=r.score + of_turns) for r, of_turns in pairs]
        if "is_finite" in batch:
            self._leave_out_broken(batch, results)
        self._check_errors(results)
        return self._without_overlong_penalty(results, ends)

    def validation(self, batch: Batch) -> list[RewardResult]:
        """The verdicts on the responses, in row order. Where an environment judges, what it gave for the turns counts
        too; the rewards of tools do not."""
        outcomes = batch.objects.get("outcome") or [None] * len(batch)
        judged = [outcome is not None for outcome in outcomes]
        by_model = self.config.reward_model.enable
        sources = batch.objects["data_source"]
        by_rule = [not by_model or judged[i] or self.inputs.has_grader(source) for i, source in enumerate(sources)]
        results: dict[int, RewardResult] = {}
        for graded, score in ((True, self._by_rule), (False, self._by_model)):
            rows = [i for i, found in enumerate(by_rule) if found is graded]
            if rows:
                results |= zip(rows, score(batch.take(rows)), strict=True)
        if any(judged):
            of_turns = turn_rewards(batch).tolist()
            results |= {i: r._replace(score=r.score + of_turns[i]) for i, r in results.items() if judged[i]}
        return [results[i] for i in range(len(batch))]

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

    def _by_rule(self, batch: Batch) -> list[RewardResult]:
        """The graders' verdicts; what they were given while it was generated is not graded again."""
        if "outcome" in batch:
            judged = [self._by_environment(batch, i) for i in range(len(batch))]
            rest = [i for i, result in enumerate(judged) if result is None]
            graded = iter(self._by_grader(batch.take(rest)) if rest else ())
            return [next(graded) if result is None else result for result in judged]
        return self._by_grader(batch)

    def _by_environment(self, batch: Batch, i: int) -> RewardResult | None:
        """What the environment of row i's episode said, or why it could not be played; None: graders judge."""
        if (error := batch.objects["episode_error"][i]) is not None:
            return RewardResult(self.config.error_score, {}, error)
        outcome = batch.objects["outcome"][i]
        return None if outcome is None else RewardResult(outcome, {})

    def _by_grader(self, batch: Batch) -> list[RewardResult]:
        samples = [Sample(*row) for row in zip(*(batch.objects[name] for name in _SAMPLE_COLUMNS), strict=True)]
        keys = [tuple(key) for key in batch["episode_key"].tolist()] if "episode_key" in batch else []
        futures: dict[int, Future[RewardResult]] = {}
        for i, key in enumerate(keys):
            text, future = self._early.pop(key, (None, None))
            if future is not None and text == samples[i].solution_str:
                futures[i] = future
        rest = [i for i in range(len(batch)) if i not in futures]
        futures |= zip(rest, self.inputs.rewards.submit_all([samples[i] for i in rest]), strict=True)
        return gather([futures[i] for i in range(len(batch))])

    def _by_model(self, batch: Batch) -> list[RewardResult]:
        """Scores with the component `rm_score`; from a model here also `rm_cut`, whether the text had to be cut."""
        if self.inputs.judge is not None:
            columns = batch.objects
            texts = zip(columns["messages"], columns["response_text"], columns["ground_truth"], strict=True)
            with phase("judge", len(batch), unit="sample"):
                results = self.inputs.judge.score([Question(prompt_text(m), r, truth) for m, r, truth in texts])
            return [r._replace(components={"rm_score": r.score}) if r.error is None else r for r in results]
        assert self.inputs.reward_texts is not None, "the reward model has its tokenizer"
        rows, cut = self.inputs.reward_texts.rows(batch)
        with phase("reward model", len(batch), unit="sample"):
            scores = self.roles["reward_model"].score(rows)["scores"].tolist()
        return [
            RewardResult(score, {"rm_score": score, "rm_cut": was_cut})
            if math.isfinite(score)
            else RewardResult(self.config.error_score, {}, f"the reward model gave {score}")
            for score, was_cut in zip(scores, cut, strict=True)
        ]

    def _joined(self, model: RewardResult, rule: RewardResult | None) -> RewardResult:
        """A failed part counts as `error_score`, as it does alone."""
        weights = self.config.reward_model
        if rule is None:
            return model._replace(score=weights.weight * model.score)
        components = {**rule.components, "acc": rule.correct, "rule_score": rule.score, **model.components}
        return RewardResult(
            weights.weight * model.score + weights.rule_weight * rule.score,
            components,
            " and ".join(e for e in (rule.error, model.error) if e is not None) or None,
            max(rule.seconds, model.seconds),
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
