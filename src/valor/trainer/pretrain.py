"""Critic pre-training: values fitted to the outcomes of rollouts whose policy stands still."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from valor import algorithms
from valor.algorithms import value_quality
from valor.collector.inputs import RunInputs
from valor.collector.rollouts import (
    PRETRAIN_STREAM,
    correct,
    draw_rollouts,
    outcomes,
    policy_group,
    read_rollouts,
    rollout_records,
    same_prompt,
    write_rollouts,
)
from valor.config import CriticPretrainConfig
from valor.controller.group import Pools
from valor.controller.start import start_pools
from valor.data.balance import grouped
from valor.data.batch import Batch, Episodes
from valor.data.prompts import check_fits
from valor.data.sampler import PromptSampler, shuffled
from valor.errors import UserError
from valor.models.load import check_critic, load_model_config, load_policy_tokenizer
from valor.tracking.metrics import Timer, explained_variance, summarize
from valor.tracking.progress import phase
from valor.trainer.checks import placed
from valor.trainer.recorder import PPORecorder
from valor.trainer.run import Run
from valor.trainer.step_metrics import critic_diagnostics
from valor.trainer.updates import Critics, Updates
from valor.workers.roles import critic_names, role_specs

ROLLOUTS_FILE = "rollouts.jsonl"
_HOLDOUT_STREAM = 3  # last word of a random key


class CriticPretrainRun(Run):
    """Rollouts once, then epochs of the critic's updates of PPO with returns of λ = 1: the outcome itself.

    A step is `data.train_batch_size` prompts with all their rollouts. After each epoch the critic is judged on prompts
    that it has not learnt from, and exported when it explains them better than ever before (as loaded: epoch 0).
    """

    config: CriticPretrainConfig
    record: PPORecorder
    critics: Critics

    def __init__(self, config: CriticPretrainConfig, command: str) -> None:
        self.placement = placed(config)
        self.inputs = RunInputs(config) if config.generator else None
        tokenizer = self.inputs.tokenizer if self.inputs else load_policy_tokenizer(config)
        check_critic(config, tokenizer)
        super().__init__(config, tokenizer, PPORecorder(config, tokenizer, command))

    def start(self, stack: ExitStack, *, resuming: bool) -> Pools:
        """The rollouts, by processes that have ended when the critic's start."""
        self._split(self._rollouts(resuming=resuming))
        specs = role_specs(self.role_config, total_steps=self.total_steps, eos_token_ids=[])
        specs = {name: spec for name, spec in specs.items() if name in self.trained_roles}
        roles = start_pools(self.placement, specs, self.config.ray_kwargs.ray_init)
        stack.callback(roles.close)
        self.critics = Critics(self.config, roles, Updates(self.config, roles, self.skips, self.record.say))
        return roles

    @property
    def trained_roles(self) -> Sequence[str]:
        return critic_names(self.config)

    def before_steps(self) -> dict[str, Any]:
        """What the critic knows as it was loaded."""
        metrics = self.validate() if self.step == 0 else {}
        if metrics:
            self.record.log(0, metrics)
        return metrics

    def after_steps(self) -> None:
        best = self.record.best
        assert best is not None, "judged before the first step"
        at = f"epoch {best['step'] / self.steps_per_epoch:.3g}" if best["step"] else "as loaded: no epoch was better"
        folder = self.export_dir("critic")
        self.record.say(f"best critic ({at}, held-out explained variance {best['value']:.3f}): {folder}")

    def validates_now(self) -> bool:
        return self.finished or self.step % self.steps_per_epoch == 0

    def train_step(self) -> dict[str, Any]:
        """Values of a batch as they are, then its updates."""
        timer = Timer()
        with timer("step"):
            prompts = self.sampler.next_batch()
            batch = self.train.take([row for prompt in prompts for row in self.rows_of[prompt]])
            with timer("values"), phase("values", len(batch), unit="sample"):
                values, metrics = self.critics.compute_values(batch)
            batch = batch.union(values)
            whole = Episodes(batch).joined()
            mask = whole["response_mask"]
            metrics |= {
                **summarize("critic/score", whole["scores"]),
                **summarize("critic/values", whole["values"], mask),
                **summarize("critic/returns", whole["returns"], mask),
                "critic/vf_explained_var": explained_variance(whole["values"], whole["returns"], mask),
                **critic_diagnostics(whole, self.config),
            }
            with timer("update_critic"):
                metrics |= self.critics.update(batch, self.step)
        tokens = int((batch["prompt_lengths"] + batch["response_lengths"]).sum())
        metrics |= timer.metrics({"values": tokens, "update_critic": tokens})
        metrics["perf/throughput"] = tokens / timer.seconds["step"] / self.placement.world_size
        metrics |= self.roles.peak_memory()
        return metrics | {"training/global_step": self.step, "training/epoch": self.sampler.epoch}

    def validate(self) -> dict[str, float]:
        """`critic/holdout/*` on the prompts kept back: explained variance, mean |V - R|, and the AUC of the value at
        the last token against right and wrong. Exports the critic when its explained variance is the best so far."""
        with phase("held out", len(self.held), unit="sample"):
            values = self.critics.compute_values(self.held)[0].select(["values"])
        whole = Episodes(self.held.union(values)).joined()
        values, returns, mask = whole["values"], whole["returns"], whole["response_mask"]
        fit = explained_variance(values, returns, mask)
        metrics = {
            "critic/holdout/vf_explained_var": fit,
            "critic/holdout/abs_error": float(((values - returns).abs() * mask).sum() / mask.sum()),
            "critic/holdout/auc": value_quality.auc(algorithms.value_at_end(values, mask), correct(whole)),
        }
        if self.record.best is None or fit > self.record.best["value"]:
            self.record.best = {"step": self.step, "value": fit}
            for role in self.trained_roles:
                self.write_model(role)
        numbers = ", ".join(f"{key.rpartition('/')[2]} {value:.3f}" for key, value in metrics.items())
        self.record.say(f"step {self.step}/{self.total_steps}, held out: {numbers}")
        return metrics

    def _rollouts(self, *, resuming: bool) -> Batch:
        """From the given files; else from the policy, and kept in the run's folder for a resumed run to read."""
        kept, given = self.record.run_dir / ROLLOUTS_FILE, self.config.pretrain.rollouts
        if given or (resuming and kept.exists()):
            critic = self.config.critic.model
            fits = partial(check_fits, critic.path, load_model_config(critic).get_text_config())
            return read_rollouts(given or [str(kept)], self.tokenizer, fits)
        assert self.inputs is not None, "made where no files are given"
        group = policy_group(self.config, self.inputs, self.placement, self.record.say)
        with closing(self.inputs), group as collector:
            rows = list(self.inputs.train)
            batch = draw_rollouts(collector, rows, PRETRAIN_STREAM, self.config.data.train_batch_size)
        write_rollouts(kept, rollout_records(batch, batch["scores"].tolist(), 0, self.tokenizer))
        return batch

    def _split(self, rollouts: Batch) -> None:
        """`held`: all rollouts of some prompts; `train`: the others', row numbers by prompt in `rows_of`."""
        data, seed = self.config.data, self.config.trainer.seed
        rollouts["returns"] = outcomes(rollouts, self.config.algorithm.gamma)
        prompt_of = same_prompt(rollouts)
        count = max(prompt_of) + 1
        if count < 2:
            raise UserError("the rollouts are all of one prompt, and a critic is judged on prompts it has not seen")
        num_held = min(max(1, round(self.config.pretrain.holdout * count)), count - 1)
        held = set(shuffled(count, seed, 0, _HOLDOUT_STREAM)[:num_held].tolist())
        self.held = rollouts.take([i for i, prompt in enumerate(prompt_of) if prompt in held])
        self.train = rollouts.take([i for i, prompt in enumerate(prompt_of) if prompt not in held])
        for name, part in (("training", self.train), ("held-out", self.held)):
            returns = part["returns"][part["response_mask"] > 0]
            if returns.min() == returns.max():
                raise UserError(
                    f"the {_count(part)} {name} rollouts all have the return {returns[0]:g}, so there is nothing to "
                    "tell apart: take more prompts, or easier or harder ones"
                )
        self.rows_of = grouped(range(len(self.train)), same_prompt(self.train))
        self.sampler = PromptSampler(
            len(self.rows_of), data.train_batch_size, seed=data.seed, shuffle=data.shuffle, drop_last=False
        )
        self.steps_per_epoch = self.sampler.steps_per_epoch
        trainer = self.config.trainer
        self.total_steps = trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs
        self.record.say(
            f"{_count(self.train)} rollouts of {len(self.rows_of)} prompts to learn from, {_count(self.held)} of "
            f"{num_held} held out; mean score {float(Episodes(rollouts).joined()['scores'].mean()):.3f}"
        )


def _count(rollouts: Batch) -> int:
    return len(Episodes(rollouts).rows)
