"""What a batch's responses are worth: graders, a learned reward model or a judge, and what the manager takes off."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from valor.config import RewardConfig
from valor.controller import Roles
from valor.data.batch import Batch
from valor.data.reward_texts import prompt_text
from valor.rewards.executor import RewardResult
from valor.rewards.judge import Question
from valor.tracking.progress import phase
from valor.trainer.inputs import RunInputs, with_overlong_penalty
from valor.trainer.rules import Rules


class Scoring:
    """The scores of a run, as `config.reward` asks for them.

    In training a reward model takes the rule's place, or joins it: score = `weight` * model + `rule_weight` * rule,
    with both as components `rm_score` and `rule_score`. Validation goes by rule where the data source has a grader,
    else by the model alone, so that it measures the task and not what is trained on.
    """

    def __init__(self, config: RewardConfig, inputs: RunInputs, group: Roles) -> None:
        self.config, self.inputs, self.group = config, inputs, group
        self.rules = Rules(inputs)

    def ahead(self, prompts: Batch, *, validation: bool = False) -> AbstractContextManager[None]:
        """Inside the block responses to `prompts` are generated: each is graded by rule as soon as it is there."""
        if self.config.reward_model.replaces_rule and not validation:
            return nullcontext()
        return self.rules.ahead(prompts)

    def training(self, batch: Batch) -> list[RewardResult]:
        """What the responses are worth in training, in row order."""
        model = self.config.reward_model
        results = [] if model.replaces_rule else self.rules.grade(batch)
        if model.enable:
            pairs = zip(self._by_model(batch), results or [None] * len(batch), strict=True)
            results = [self._joined(by_model, by_rule) for by_model, by_rule in pairs]
        return with_overlong_penalty(results, batch["response_lengths"], self.config)

    def validation(self, batch: Batch) -> list[RewardResult]:
        """The verdicts on the responses, in row order."""
        if not self.config.reward_model.enable:
            return self.rules.grade(batch)
        by_rule = [self.inputs.has_grader(source) for source in batch.objects["data_source"]]
        results: dict[int, RewardResult] = {}
        for wanted, score in ((True, self.rules.grade), (False, self._by_model)):
            rows = [i for i, found in enumerate(by_rule) if found is wanted]
            if rows:
                results |= zip(rows, score(batch.take(rows)), strict=True)
        return [results[i] for i in range(len(batch))]

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
            scores = self.group["reward_model"].score(rows)["scores"].tolist()
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
