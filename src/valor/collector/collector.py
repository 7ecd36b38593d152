"""The first half of a step: prompts in, graded episodes out, as one batch."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.agents.episode import episode_metrics, last_rows, place_rewards
from valor.collector.ahead import PromptSupply
from valor.collector.generation import PROMPT_OBJECTS, Generation, prompt_batch, sampling_params
from valor.collector.grading import Grading, without_broken
from valor.collector.inputs import RunInputs
from valor.collector.supply import BatchSupply, Supply
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, Episodes
from valor.data.curriculum import outcomes
from valor.data.images import IMAGES
from valor.data.prompts import PromptRow
from valor.errors import StepRefused, TrainingStopped, UserError
from valor.rewards.executor import RewardResult
from valor.rewards.manager import summarize
from valor.rewards.worker import NOT_GRADED
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase

_SCORE_NAMES = (None, "seq_reward", "seq_final_reward")  # verl's ways to say "the score, with all that it gets"


class Collector:
    """Draws prompts, has the rollout role answer them and the graders score the answers."""

    def __init__(self, config: PPOConfig, inputs: RunInputs, roles: Pools, say: Callable[[str], None]) -> None:
        self.config, self.inputs, self.roles, self._say = config, inputs, roles, say
        self.rollout = config.actor_rollout_ref.rollout
        self.grading = Grading(config, inputs, roles)
        self.generation = Generation(config, inputs, roles, say)
        v1 = config.trainer.v1
        self._runs_ahead = v1.runs_ahead
        by_prompts = v1.runs_ahead and not v1.by_batches
        self.supply: Supply = (PromptSupply if by_prompts else BatchSupply)(self.generation, self.grading)
        self._estimator = algorithms.ADVANTAGES[config.algorithm.adv_estimator]

    def save(self, folder: Path, step: int) -> None:
        """Write the samples, and the prompts, that are ahead of training after `step`."""
        if self._runs_ahead or self.supply.again:
            self.supply.save(folder, step)

    def load(self, folder: Path, *, anew: bool) -> None:
        """See `Supply.load`."""
        if folder.is_dir():
            self.supply.load(folder, anew=anew)

    def close(self) -> None:
        self.supply.close()

    def next_batch(self, step: int, timer: Timer) -> tuple[Batch, dict[str, Any]]:
        """`data.train_batch_size` prompts with `rollout.n` scored responses each, the samples of a prompt together.

        With dynamic sampling (`algorithm.filter_groups`, DAPO) prompts whose samples all agree are dropped and further
        ones are drawn until there are enough; surplus ones are left out. `reward/*` are about everything generated.
        """
        filtering, wanted = self.config.algorithm.filter_groups.enable, self.config.data.train_batch_size
        self.generation.files.begin(str(step))
        parts: list[Batch] = []
        results: list[RewardResult] = []
        sources: list[str] = []
        uids: list[str] = []
        prompts = 0
        while prompts < wanted:
            if parts:
                self._say(_check_limit(step, len(parts), prompts, self.config))
            batch, graded = self.graded(self.supply.take(wanted - prompts, step, timer), timer)
            if line := _failing_tool(batch, self.rollout.multi_turn.max_tool_error_ratio):
                self._say(line)
            results += graded
            ends = last_rows(batch).objects
            sources += ends["data_source"]
            uids += ends["uid"]
            parts.append(_informative_rows(batch, graded, self._outcomes(graded), self.config) if filtering else batch)
            prompts += len(Episodes(parts[-1]).rows) // self.rollout.n
        metrics: dict[str, Any]
        metrics, line = summarize(sources, results)
        self._say(line)
        if self.inputs.reward_texts is not None:
            metrics["reward_model/cut_texts"] = sum(r.components.get("rm_cut", False) for r in results)
        if filtering:
            drawn = len(results) // self.rollout.n
            metrics |= {
                "training/filter_groups/num_gen_batches": len(parts),
                "training/filter_groups/prompts": drawn,
                "training/filter_groups/kept_ratio": prompts / drawn,
                "training/filter_groups/surplus_prompts": prompts - wanted,
                "training/filter_groups/score_before": sum(r.score for r in results) / len(results),
            }
        # A sample without a grade says nothing about how difficult its prompt is.
        pairs = zip(uids, results, strict=True)
        judged = [(uid, r) for uid, r in pairs if r.error is None and NOT_GRADED not in r.components]
        metrics |= self.inputs.sampler.update(outcomes(self.inputs.train, judged))
        batch = parts[0]
        if len(parts) > 1 or prompts > wanted:
            batch = Batch.concat(parts)
            batch = batch.take([i for rows in Episodes(batch).rows[: wanted * self.rollout.n] for i in rows])
        metrics |= episode_metrics(batch)
        batch.meta |= {"temperature": self.rollout.temperature, "global_step": step}
        if self._estimator.capability.needs_greedy_baseline:
            with timer("gen_baseline"):
                batch["reward_baselines"] = self._greedy_rewards(batch)
        if self._runs_ahead:
            metrics |= self.supply.metrics(batch)
        if not (self._runs_ahead and self.config.rollout_apart):
            self.roles["rollout"].sleep()
        return batch, metrics

    def validation_batch(
        self, step: int, rows: Iterable[PromptRow], first: int = 0
    ) -> tuple[Batch, list[RewardResult]]:
        """Responses to validation prompts after `step`, and their grades (without penalties for length). `first`: how
        many prompts of the same pass came before these."""
        with self.supply.paused():
            self.generation.files.begin(f"val_{step}")
            prompts = prompt_batch(list(rows), self.config, None, first)
            params = sampling_params(self.config, validation=True)
            with phase("validation", len(prompts), unit="sample"):
                sink = self.grading.sink(prompts, validation=True)
                batch = self.generation.answer(prompts, params, sink=sink)
            ends = last_rows(batch)
            with phase("reward", len(ends), unit="sample"):
                results = self.grading.validation(ends)
            if any(result.error is not None for result in results):
                self._say(f"validation: {summarize(ends.objects['data_source'], results)[1]}")
            _add_reward_info(batch, results)
            self.roles["rollout"].sleep()
            return batch, results

    def responses(self, rows: Sequence[PromptRow], step: int, at_once: int) -> Batch:
        """`rollout.n` scored responses to each of `rows`, drawn as in step `step`, `at_once` prompts at a time."""
        parts = list[Batch]()
        for i in range(0, len(rows), at_once):
            prompts = prompt_batch(rows[i : i + at_once], self.config, step, i)
            with phase("rollout", len(prompts), unit="sample"):
                sink = self.grading.sink(prompts)
                batch = self.generation.answer(prompts, sampling_params(self.config), sink=sink)
            parts.append(self.graded(batch, Timer())[0])
        return Batch.concat(parts)

    def graded(self, batch: Batch, timer: Timer) -> tuple[Batch, list[RewardResult]]:
        """The batch with `token_level_scores` [R, T], `reward_info` and the graders' columns."""
        batch = without_broken(batch)
        with timer("reward"), phase("reward", len(batch), unit="sample"):
            results, columns = self.grading.training(batch)
        batch = batch.union(Batch(columns))
        _add_reward_info(batch, results)
        binary = self.config.algorithm.reward_binarize
        batch["token_level_scores"] = place_rewards(self._outcomes(results), batch, at_end=binary)
        return batch, results

    def _greedy_rewards(self, batch: Batch) -> Tensor:
        """Score [B] of the greedy response to each row's prompt (ReMax's baseline), one response a prompt."""
        n = self.rollout.n
        objects = (*PROMPT_OBJECTS, *[IMAGES] * (IMAGES in batch))
        prompts = batch.select(("prompts", "prompt_lengths", "episode_key", *objects))
        params = replace(sampling_params(self.config), temperature=0.0)
        self.generation.files.begin(f"greedy_{batch.meta['global_step']}")
        rows = Episodes(batch).rows
        prompts = prompts.take([of_episode[0] for of_episode in rows[::n]])
        with phase("greedy baseline", len(prompts), unit="sample"):
            greedy = self.generation.answer(prompts, params, sink=self.grading.sink(prompts))
        scores = self._outcomes(self.grading.training(greedy)[0]).repeat_interleave(n)
        return scores.repeat_interleave(torch.tensor([len(of_episode) for of_episode in rows]))

    def _outcomes(self, results: Sequence[RewardResult]) -> Tensor:
        """Scores [B] as the algorithm takes them: under `reward_binarize` 0 or 1, less DAPO's penalty for length."""
        algorithm, buffer = self.config.algorithm, self.config.reward.reward_kwargs.overlong_buffer_cfg
        if not algorithm.reward_binarize:
            return torch.tensor([r.score for r in results])
        penalties = [r.components.get("overlong_reward", 0.0) if buffer.enable else 0.0 for r in results]
        scores = torch.tensor([r.score - penalty for r, penalty in zip(results, penalties, strict=True)])
        return algorithms.binarize(scores, algorithm.reward_threshold) + torch.tensor(penalties)


def _add_reward_info(batch: Batch, results: Sequence[RewardResult]) -> None:
    """`reward_info`: what the grader of a row's episode said beside the score; `NOT_GRADED` and why if it failed."""
    infos = [r.components if r.error is None else {NOT_GRADED: r.error} for r in results]
    pairs = zip(infos, Episodes(batch).rows, strict=True)
    batch.objects["reward_info"] = [info for info, rows in pairs for _ in rows]


def _failing_tool(batch: Batch, limit: float) -> str | None:
    """A line on the tool with the most failed calls, where at least half of its calls failed. StepRefused: a larger
    share than `limit` of all calls failed, those that the policy got wrong left out."""
    rows = Episodes(batch).rows if "episode_info" in batch else ()
    calls = [call for of in rows for call in batch.objects["episode_info"][of[0]].get("calls", ())]
    failures = [call for call in calls if call["error"] is not None]
    if not failures:
        return None
    ((name, failed),) = Counter(call["name"] for call in failures).most_common(1)
    count = sum(call["name"] == name for call in calls)
    ((text, _),) = Counter(" ".join(call["text"].split()) for call in failures if call["name"] == name).most_common(1)
    what = "tool calls that cannot be read" if name is None else f"tool {name}"
    line = f"{what}: {failed} of {count} calls failed; most often: {text[:300]}"
    valid = [call["error"] for call in calls if call["error"] in (None, "exception", "timeout", "failed")]
    if len(valid) - valid.count(None) > limit * len(valid):
        raise StepRefused(
            f"{line}; more than actor_rollout_ref.rollout.multi_turn.max_tool_error_ratio={limit:g} allows"
        )
    return line if 2 * failed >= count else None


def _informative_rows(batch: Batch, results: Sequence[RewardResult], scores: Tensor, config: PPOConfig) -> Batch:
    """The rows of prompts whose episodes differ in `algorithm.filter_groups.metric`. `scores` [E]: of training."""
    metric, episodes = _metric(results, scores, config), Episodes(batch)
    rows, takes_part = episodes.rows, episodes.sums(batch["response_mask"])
    prompts = [batch.objects["uid"][of_episode[0]] for of_episode in rows]
    informative = algorithms.filter_groups(metric, prompts, takes_part).nonzero().squeeze(1).tolist()
    return batch.take([row for number in informative for row in rows[number]])


def _metric(results: Sequence[RewardResult], scores: Tensor, config: PPOConfig) -> Tensor:
    name = config.algorithm.filter_groups.metric
    if name in _SCORE_NAMES:
        return scores
    if name == "score":
        return torch.tensor([r.score - r.components.get("overlong_reward", 0.0) for r in results])
    values: list[float] = []
    for result in results:
        value = result.components.get(name, result.correct if name == "acc" else None)
        if value is None and result.error is not None:  # a grader that failed names no components
            value = config.reward.error_score
        if not isinstance(value, bool | int | float):
            known = sorted({n for r in results for n, v in r.components.items() if isinstance(v, bool | int | float)})
            raise UserError(
                f"algorithm.filter_groups.metric={name} is not a number that the grader reports of every sample (it "
                f"reports {', '.join(known) or 'none'}): return it beside score each time, or take acc, or null for "
                "the score"
            )
        values.append(float(value))
    return torch.tensor(values)


def _check_limit(step: int, rounds: int, prompts: int, config: PPOConfig) -> str:
    """Before a further round: how far the step is. TrainingStopped at `algorithm.filter_groups.max_num_gen_batches`."""
    wanted, limit = config.data.train_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    line = f"step {step}: {prompts} of {wanted} prompts have samples that differ after {rounds} generation batches"
    if limit and rounds >= limit:
        raise TrainingStopped(
            f"{line}: are the prompts too easy or too hard? Raise algorithm.filter_groups.max_num_gen_batches="
            f"{limit}, data.gen_batch_size or actor_rollout_ref.rollout.n, or give other data"
        )
    return line
