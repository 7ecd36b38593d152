"""The first half of a step: prompts in, scored responses out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig
from valor.controller import Roles
from valor.data.batch import Batch
from valor.data.prompts import PromptRow
from valor.errors import TrainingStopped, UserError
from valor.rewards.executor import RewardResult
from valor.rewards.manager import summarize
from valor.rollout.base import SamplingParams
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase
from valor.trainer.advantage import place_scores
from valor.trainer.inputs import RunInputs
from valor.trainer.prompts import PROMPT_OBJECTS, prompt_batch, training_params, validation_params
from valor.trainer.rollout_weights import RolloutWeights
from valor.trainer.scoring import Scoring

_SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")  # verl's ways to say "the score" in filter_groups.metric


class Generation:
    """Draws prompts, has the rollout role answer them and the graders score the answers."""

    def __init__(self, config: PPOConfig, inputs: RunInputs, group: Roles, say: Callable[[str], None]) -> None:
        self.config, self.inputs, self.group, self._say = config, inputs, group, say
        self.rollout = config.actor_rollout_ref.rollout
        self.scoring = Scoring(config.reward, inputs, group)
        self.weights = RolloutWeights(group)

    def training_batch(self, step: int, timer: Timer) -> tuple[Batch, dict[str, float]]:
        """`data.train_batch_size` prompts with `rollout.n` scored responses each, the samples of a prompt together.

        With dynamic sampling (`algorithm.filter_groups`, DAPO) prompts whose samples all agree are dropped and further
        ones are drawn until there are enough; surplus ones are left out. `reward/*` are about everything generated.
        """
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        kept: list[Batch] = []
        results: list[RewardResult] = []
        sources: list[str] = []
        rounds = found = 0
        while found < wanted:
            if rounds:
                self._go_on(step, rounds, found)
            rows = [self.inputs.train[i] for i in self.inputs.sampler.next_batch()]
            batch, graded = self._round(rows, step, first=len(results) // self.rollout.n, timer=timer)
            rounds += 1
            results += graded
            sources += batch.objects["data_source"]
            kept.append(self._informative(batch, graded) if filtering.enable else batch)
            found = sum(map(len, kept)) // self.rollout.n
        metrics, line = summarize(sources, results)
        self._say(line)
        if self.inputs.reward_texts is not None:
            metrics["reward_model/cut_texts"] = sum(r.components.get("rm_cut", False) for r in results)
        if filtering.enable:
            drawn = len(results) // self.rollout.n
            metrics |= {
                "training/filter_groups/num_gen_batches": rounds,
                "training/filter_groups/prompts": drawn,
                "training/filter_groups/kept_ratio": found / drawn,
                "training/filter_groups/surplus_prompts": found - wanted,
                "training/filter_groups/score_before": sum(r.score for r in results) / len(results),
            }
        batch = Batch.concat(kept).take(range(wanted * self.rollout.n)) if rounds > 1 or found > wanted else kept[0]
        batch.meta |= {"temperature": self.rollout.temperature, "global_step": step}
        return batch, metrics

    def greedy_rewards(self, batch: Batch) -> Tensor:
        """Score [B] of the greedy response to each row's prompt (ReMax's baseline), one response a prompt."""
        n = self.rollout.n
        prompts = batch.select(("prompts", "prompt_lengths", "sample_key", *PROMPT_OBJECTS))
        params = replace(training_params(self.rollout), temperature=0.0)
        prompts = prompts.take(range(0, len(batch), n))
        with phase("greedy baseline", len(prompts), unit="sample"), self.scoring.ahead(prompts):
            greedy = self.respond(prompts, params)
        return self.scores(greedy).repeat_interleave(n)

    def validation_batch(self) -> tuple[Batch, list[RewardResult]]:
        """Responses to the whole validation set and their grades (without penalties for length)."""
        parts: list[Batch] = []
        for rows in self.inputs.validation_chunks():
            prompts = prompt_batch(
                rows, samples_per_prompt=self.rollout.val_kwargs.n, seed=self.config.trainer.seed, step=None
            )
            ahead = self.scoring.ahead(prompts, validation=True)
            with phase("validation", len(prompts), unit="sample"), ahead:
                parts.append(self.respond(prompts, validation_params(self.rollout)))
        batch = Batch.concat(parts)
        with phase("reward", len(batch), unit="sample"):
            results = self.scoring.validation(batch)
        batch.objects["reward_info"] = [r.components for r in results]
        return batch, results

    def responses(self, rows: Sequence[PromptRow], step: int, at_once: int) -> Batch:
        """`rollout.n` scored responses to each of `rows`, drawn as in step `step`, `at_once` prompts at a time."""
        starts = range(0, len(rows), at_once)
        rounds = [self._round(list(rows[i : i + at_once]), step, first=i, timer=Timer())[0] for i in starts]
        return Batch.concat(rounds)

    def _round(self, rows: list[PromptRow], step: int, *, first: int, timer: Timer) -> tuple[Batch, list[RewardResult]]:
        """Responses to `rows`, the first of which is the step's prompt number `first`, with their scores."""
        prompts = prompt_batch(
            rows, samples_per_prompt=self.rollout.n, seed=self.config.trainer.seed, step=step, first=first
        )
        with timer("update_weights"):
            self.weights.update()
        with timer("gen"), phase("rollout", len(prompts), unit="sample"), self.scoring.ahead(prompts):
            batch = self.respond(prompts, training_params(self.rollout))
        with timer("reward"), phase("reward", len(batch), unit="sample"):
            results = self.scoring.training(batch)
        batch.objects["reward_info"] = [r.components for r in results]
        batch["token_level_scores"] = place_scores(batch, self._outcomes(results))
        return batch, results

    def scores(self, batch: Batch) -> Tensor:
        """What the responses of a batch are worth in training, [B]."""
        return self._outcomes(self.scoring.training(batch))

    def _outcomes(self, results: list[RewardResult]) -> Tensor:
        """Scores [B] as the algorithm takes them: 0 or 1 under `reward_binarize`."""
        scores = torch.tensor([r.score for r in results])
        algorithm = self.config.algorithm
        return algorithms.binarize(scores, algorithm.reward_threshold) if algorithm.reward_binarize else scores

    def respond(self, prompts: Batch, params: SamplingParams) -> Batch:
        """The prompts with one response each, as ids and as text."""
        self.weights.update()
        columns = prompts.select(("prompts", "prompt_lengths", "sample_key", "uid"))
        batch = prompts.union(self.group["rollout"].generate(columns, params))
        return self.inputs.with_text(batch)

    def _informative(self, batch: Batch, results: list[RewardResult]) -> Batch:
        """The rows of prompts whose samples differ in `filter_groups.metric`."""
        metric = self._metric(results)
        keep = algorithms.filter_groups(metric, batch.objects["uid"])
        return batch.take(keep.nonzero().squeeze(1))

    def _metric(self, results: list[RewardResult]) -> Tensor:
        name = self.config.algorithm.filter_groups.metric
        if name is None or name in _SCORE_NAMES:
            return self._outcomes(results)
        values: list[float] = []
        for result in results:
            if name in result.components:
                values.append(float(result.components[name]))
            elif name == "acc":
                values.append(float(result.correct))
            elif result.error is not None:  # a grader that failed names no components
                values.append(self.config.reward.error_score)
            else:
                known = ", ".join(sorted(result.components)) or "none"
                raise UserError(
                    f"algorithm.filter_groups.metric={name}: the grader reports no such component (it has {known}): "
                    "take one of these, acc, or null for the score"
                )
        return torch.tensor(values)

    def _go_on(self, step: int, rounds: int, found: int) -> None:
        """Before a further round: say how far it is, or stop at the limit."""
        wanted, limit = self.config.data.train_batch_size, self.config.algorithm.filter_groups.max_num_gen_batches
        line = f"step {step}: {found} of {wanted} prompts have samples that differ after {rounds} generation batches"
        if limit and rounds >= limit:
            raise TrainingStopped(
                f"{line}: are the prompts too easy or too hard? Raise algorithm.filter_groups.max_num_gen_batches="
                f"{limit}, data.gen_batch_size or actor_rollout_ref.rollout.n, or give other data"
            )
        self._say(line)
