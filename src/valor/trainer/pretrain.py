"""Critic pre-training: values fitted to the outcomes of rollouts by a fixed policy."""

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
    """Draws rollouts once, then trains by PPO's critic updates on returns with λ = 1, the outcome itself.

    A step is `data.train_batch_size` prompts with all their rollouts. After each epoch the critic is evaluated on
    held-out prompts, and exported when its explained variance is the best so far (epoch 0: as loaded).
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
        self.trained_roles = critic_names(config)

    def start(self, stack: ExitStack, *, resuming: bool) -> Pools:
        """Draws the rollouts, by processes that have ended when the critic's start."""
        self._split(self._rollouts(resuming=resuming))
        specs = role_specs(self.config, total_steps=self.total_steps, eos_token_ids=[])
        specs = {name: spec for name, spec in specs.items() if name in self.trained_roles}
        roles = start_pools(self.placement, specs, self.config.ray_kwargs.ray_init)
        stack.callback(roles.close)
        self.critics = Critics(self.config, roles, Updates(self.config, roles, self.skips))
        return roles

    def before_steps(self) -> dict[str, Any]:
        """Evaluates the critic as it was loaded."""
        if self.step > 0:
            return {}
        metrics = self.validate()
        self.record.log(0, metrics)
        return metrics

    def after_steps(self) -> None:
        best = self.record.best
        assert best is not None, "evaluated before the first step"
        at = f"epoch {best['step'] / self.steps_per_epoch:.3g}" if best["step"] else "as loaded: no epoch was better"
        folder = self.record.run_dir / "huggingface" / "critic"
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
            episodes = Episodes(batch).joined()
            values, returns, mask = episodes["values"], episodes["returns"], episodes["response_mask"]
            metrics |= {
                **summarize("critic/score", episodes["scores"]),
                **summarize("critic/values", values, mask),
                **summarize("critic/returns", returns, mask),
                "critic/vf_explained_var": explained_variance(values, returns, mask),
                **critic_diagnostics(episodes, self.config),
            }
            with timer("update_critic"):
                metrics |= self.critics.update(batch, self.step)
        tokens = int((batch["prompt_lengths"] + batch["response_lengths"]).sum())
        metrics |= timer.metrics({"values": tokens, "update_critic": tokens})
        metrics["perf/throughput"] = tokens / timer.seconds["step"] / self.placement.world_size
        metrics |= self.roles.peak_memory()
        return metrics | {"training/global_step": self.step, "training/epoch": self.sampler.epoch}

    def validate(self) -> dict[str, float]:
        """`critic/holdout/*` on the held-out prompts: explained variance, mean |V - R|, and the AUC of the value at the
        last token against right and wrong. Exports the critic when its explained variance is the best so far."""
        with phase("held out", len(self.held_out), unit="sample"):
            values = self.critics.compute_values(self.held_out)[0].select(["values"])
        episodes = Episodes(self.held_out.union(values)).joined()
        values, returns, mask = episodes["values"], episodes["returns"], episodes["response_mask"]
        fit = explained_variance(values, returns, mask)
        metrics = {
            "critic/holdout/vf_explained_var": fit,
            "critic/holdout/abs_error": float(((values - returns).abs() * mask).sum() / mask.sum()),
            "critic/holdout/auc": value_quality.auc(algorithms.value_at_end(values, mask), correct(episodes)),
        }
        if self.record.best is None or fit > self.record.best["value"]:
            self.record.best = {"step": self.step, "value": fit}
            for role in self.trained_roles:
                self.write_model(role)
        numbers = ", ".join(f"{key.rpartition('/')[2]} {value:.3f}" for key, value in metrics.items())
        self.record.say(f"step {self.step}/{self.total_steps}, held out: {numbers}")
        return metrics

    def _rollouts(self, *, resuming: bool) -> Batch:
        """From `pretrain.rollouts`; else by the policy, and written to the run's folder for a resumed run to read."""
        file, files = self.record.run_dir / ROLLOUTS_FILE, self.config.pretrain.rollouts
        if files or (resuming and file.exists()):
            critic = self.config.critic.model
            fits = partial(check_fits, critic.path, load_model_config(critic).get_text_config())
            return read_rollouts(files or [str(file)], self.tokenizer, fits)
        assert self.inputs is not None, "made where no files are set"
        group = policy_group(self.config, self.inputs, self.placement, self.record.say)
        with closing(self.inputs), group as collector:
            rows = list(self.inputs.train)
            batch = draw_rollouts(collector, rows, PRETRAIN_STREAM, self.config.data.train_batch_size)
        write_rollouts(file, rollout_records(batch, batch["scores"].tolist(), 0, self.tokenizer))
        return batch

    def _split(self, rollouts: Batch) -> None:
        """`held_out`: all rollouts of some prompts; `train`: the others', row numbers by prompt in `rows_of`."""
        data, seed = self.config.data, self.config.trainer.seed
        rollouts["returns"] = outcomes(rollouts, self.config.algorithm.gamma)
        prompt_of = same_prompt(rollouts)
        count = max(prompt_of) + 1
        if count < 2:
            raise UserError("the rollouts are all of one prompt, and a critic is judged on prompts it has not seen")
        num_held_out = min(max(1, round(self.config.pretrain.holdout * count)), count - 1)
        prompts = {*shuffled(count, seed, 0, _HOLDOUT_STREAM)[:num_held_out].tolist()}
        self.held_out = rollouts.take([i for i, prompt in enumerate(prompt_of) if prompt in prompts])
        self.train = rollouts.take([i for i, prompt in enumerate(prompt_of) if prompt not in prompts])
        for name, part in (("training", self.train), ("held-out", self.held_out)):
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
            f"{_count(self.train)} rollouts of {len(self.rows_of)} prompts to learn from, {_count(self.held_out)} of "
            f"{num_held_out} held out; mean score {float(Episodes(rollouts).joined()['scores'].mean()):.3f}"
        )


def _count(rollouts: Batch) -> int:
    return len(Episodes(rollouts).rows)
