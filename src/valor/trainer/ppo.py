"""The training loop: generate, score, evaluate, estimate advantages, update critic and actor, again.

The trainer holds no model. It sees roles through a worker group (in this process or under Ray) and one batch that
gains columns as it passes through them; `train_step` reads in the order in which things happen.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from valor import algorithms
from valor.algorithms import mismatch_sums
from valor.config import PPOConfig
from valor.controller import Placement, Pools, start_pools
from valor.data.batch import Batch
from valor.errors import TrainingStopped
from valor.tracking.console import format_seconds
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase, report_progress
from valor.trainer.advantage import estimate_advantages, resample, to_train_on
from valor.trainer.batch_metrics import batch_metrics, throughput_metrics
from valor.trainer.critics import Critics, critic_names
from valor.trainer.diagnostics import diagnostics
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.generation import Generation
from valor.trainer.inputs import RunInputs
from valor.trainer.old_log_probs import OldLogProbs, corrected, needs_sum_pi_squared
from valor.trainer.recorder import RunRecorder
from valor.trainer.roles import role_specs
from valor.trainer.shaping import RewardShaping
from valor.trainer.side_by_side import side_by_side
from valor.trainer.signals import StopRequest
from valor.trainer.updates import Updates
from valor.trainer.validation import headline, validation_metrics

__all__ = ["PPOTrainer", "TrainingStopped"]


class PPOTrainer:
    """PPO with a critic, and every critic-free relative of it, for one configuration.

    Args:
        config: the validated tree.
        inputs: tokenizer, data and graders, already checked, so that bad input stops before anything starts.
        placement: where the roles run.
        command: what was typed, for the record.
    """

    group: Pools
    generation: Generation
    updates: Updates
    critics: Critics

    def __init__(self, config: PPOConfig, inputs: RunInputs, placement: Placement, command: str) -> None:
        self.config = config
        self.inputs = inputs
        self.placement = placement
        self.record = RunRecorder(config, inputs.tokenizer, command)
        self.step = 0
        self.shaping = RewardShaping(config.algorithm, config.trainer.seed)
        self.trained_roles = ["actor", *critic_names(config)]
        self.greedy_baseline = algorithms.ADVANTAGES[config.algorithm.adv_estimator].capability.needs_greedy_baseline
        self.old = OldLogProbs.of(config)

    def fit(self) -> int:
        """Run to the last step. Returns 0, or 128 + n when signal n asked to stop (progress is saved)."""
        trainer = self.config.trainer
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            stack.callback(self.inputs.close)
            self.group = start_pools(
                self.placement,
                role_specs(self.config, total_steps=self.inputs.total_steps, eos_token_ids=self.inputs.eos_token_ids),
                self.config.ray_kwargs.ray_init.model_dump(),
            )
            stack.callback(self.group.close)
            self.generation = Generation(self.config, self.inputs, self.group, self.record.say)
            self.updates = Updates(self.config, self.group, self.record.say)
            self.critics = Critics(self.config, self.group, self.updates)
            if len(self.placement.pools) > 1:
                self.record.say(self.placement.table(self.group.roles))
            self._resume()
            stack.enter_context(self.record.opened(self.step, self.inputs.total_steps))
            stack.enter_context(phase("training", self.inputs.total_steps, unit="step"))
            report_progress(self.step)
            if self.inputs.val and (trainer.val_only or (trainer.val_before_train and self.step == 0)):
                self.record.log(self.step, self.validate())
            while self.step < self.inputs.total_steps and stop.signum is None and not trainer.val_only:
                self.step += 1
                last = self.step == self.inputs.total_steps
                metrics = self.train_step()
                if last or _due(self.step, trainer.test_freq):
                    metrics |= self.validate()
                # Logged before it is saved: a run killed in between repeats the step, and its line with it.
                self.record.log(self.step, metrics)
                if last or stop.signum is not None or self.record.best_is_new or _due(self.step, trainer.save_freq):
                    self.save()
                report_progress(self.step)
            if not trainer.val_only and self.step >= self.inputs.total_steps:
                self._export()
            self.record.finish()
            return 0 if stop.signum is None else 128 + stop.signum

    def train_step(self) -> dict[str, Any]:
        """One batch of prompts through all phases; returns the step's metrics and histograms."""
        algorithm, timer = self.config.algorithm, Timer()
        metrics: dict[str, Any]
        with timer("step"):
            batch, metrics = self.generation.training_batch(self.step, timer)
            if self.greedy_baseline:
                with timer("gen_baseline"):
                    batch["reward_baselines"] = self.generation.greedy_rewards(batch)
            self.group["rollout"].sleep()
            batch, found = self._evaluated(batch, timer)
            metrics |= found
            with timer("adv"):
                metrics |= self.shaping.shape(batch, self.step)
                batch["advantages"], batch["returns"] = estimate_advantages(
                    batch, algorithm, error_score=self.config.reward.error_score
                )
                metrics |= batch_metrics(batch) | diagnostics(batch, self.config)
            trained = to_train_on(batch, algorithm)
            if algorithm.use_pf_ppo:
                trained, drawn = resample(trained, algorithm.pf_ppo, self.config.trainer.seed, self.step)
                metrics |= drawn
            metrics |= self._trained(trained, timer)
        self._watch_mismatch(metrics)
        self.record.samples(self.step, batch)
        metrics |= throughput_metrics(batch, timer, self.placement.world_size) | self.group.peak_memory()
        return metrics | {"training/global_step": self.step, "training/epoch": self.inputs.sampler.epoch}

    def validate(self) -> dict[str, float]:
        """Generate and score the validation set, if there is one: `val-core/*` metrics; remembers the best step."""
        if self.inputs.val is None:
            return {}
        timer = Timer()
        with timer("testing"):
            batch, results = self.generation.validation_batch()
            self.group["rollout"].sleep()
        scores = [r.score for r in results]
        metrics = validation_metrics(
            batch.objects["uid"],
            batch.objects["data_source"],
            scores,
            [r.correct for r in results],
            [r.components.get("pred") for r in results],
        )
        self.record.validation(self.step, batch, scores, headline(metrics))
        return metrics | {"timing_s/testing": timer.seconds["testing"]}

    def save(self) -> None:
        """Write a complete checkpoint of this step."""
        timer = Timer()
        with timer("save"), phase("checkpoint"):
            folder = self.record.save_checkpoint(self.step, self._state(), self._write_roles)
        self.record.say(f"saved {folder} in {format_seconds(timer.seconds['save'])}")

    def _evaluated(self, batch: Batch, timer: Timer) -> tuple[Batch, dict[str, float]]:
        """The batch with old and reference log-probs and values, as far as the run needs them, and what they tell."""

        def old_log_probs() -> tuple[Batch, dict[str, float]]:
            with timer("old_log_prob"), phase("old log-probs", len(batch), unit="sample"):
                return self._old_log_probs(batch)

        def reference() -> tuple[Batch, dict[str, float]]:
            with timer("ref"), phase("reference log-probs", len(batch), unit="sample"):
                return self.group["ref"].compute_log_probs(batch), {}

        def values() -> tuple[Batch, dict[str, float]]:
            with timer("values"), phase("values", len(batch), unit="sample"):
                return self.critics.evaluate(batch, with_end=self.config.algorithm.truncation_bootstrap)

        passes = []
        if self.old.bypass:
            batch["old_log_probs"] = batch["rollout_log_probs"]
        elif self.old.recompute:
            passes.append(("actor", old_log_probs))
        if self.config.needs_ref_log_probs:
            passes.append(("ref", reference))
        if self.critics.names:
            passes.append(("critic", values))
        metrics: dict[str, float] = {}
        for columns, found in side_by_side(self.group, passes):
            batch, metrics = batch.union(columns), metrics | found
        return batch, metrics

    def _trained(self, batch: Batch, timer: Timer) -> dict[str, float]:
        """Update critic and actor."""

        def critic() -> dict[str, float]:
            with timer("update_critic"):
                return self.critics.train(batch, self.step)

        def actor() -> dict[str, float]:
            with timer("update_actor"):
                return self.updates.run("actor", batch, self.step)

        roles = [("critic", critic)] if self.critics.names else []
        roles += [("actor", actor)] if self.step > self.config.trainer.critic_warmup else []
        metrics: dict[str, float] = {}
        for found in side_by_side(self.group, roles):
            metrics |= found
        return metrics

    def _old_log_probs(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The actor's log-probs before the update, their distance from the rollout's, and the correction for it."""
        columns = self.group["actor"].compute_log_probs(
            batch,
            with_sum_pi_squared=needs_sum_pi_squared(self.config),
            with_full_kl=self.config.algorithm.exact_kl_in_reward,
        )
        on, old = batch["response_mask"], columns["old_log_probs"]
        count = max(float(on.sum()), 1.0)
        metrics = {"actor/entropy": float((columns["entropy"] * on).sum() / count)}
        metrics |= {k: v.item() for k, v in mismatch_sums(old, batch["rollout_log_probs"], on, count).items()}
        if self.old.correct_batch:
            correction, found = corrected(batch, old, self.config.algorithm.rollout_correction)
            return columns.union(correction), metrics | found
        return columns, metrics

    def _watch_mismatch(self, metrics: dict[str, Any]) -> None:
        """Say so when the rollout engine and the training forward have come apart."""
        gap, limit = metrics.get("training/rollout_probs_diff_mean"), self.config.trainer.rollout_probs_diff_warn
        if gap is not None and gap > limit:
            self.record.say(
                f"step {self.step}: rollout and training probabilities differ by {gap:.3f} on average, more than "
                f"trainer.rollout_probs_diff_warn={limit}: the samples are off-policy by this much"
            )

    def _state(self) -> dict[str, Any]:
        """What the driver must remember besides the models."""
        return {
            "step": self.step,
            "sampler": self.inputs.sampler.state_dict(),
            "shaping": self.shaping.state_dict(),
            "skipped_in_a_row": self.updates.skipped_in_a_row,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def _write_roles(self, folder: Path) -> None:
        for role in self.trained_roles:
            self.group[role].save(folder / role)
        self.inputs.tokenizer.save_pretrained(folder / TOKENIZER_DIR)

    def _resume(self) -> None:
        """Continue from the checkpoint that `trainer.resume_mode` names, if there is one."""
        trainer, store = self.config.trainer, self.record.checkpoints
        folder = store.resume_folder(trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            return
        state = store.load_state(folder)
        for role in self.trained_roles:
            self.group[role].load(folder / role)
        self.step = state["step"]
        self.inputs.sampler.load_state_dict(state["sampler"])
        self.shaping.load_state_dict(state["shaping"])
        self.updates.skipped_in_a_row = state["skipped_in_a_row"]
        self.record.best = state["best"]
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
        self.record.say(f"resumed from {folder} after step {self.step}")

    def _export(self) -> None:
        """The trained models as plain Hugging Face directories."""
        for role in self.trained_roles:
            folder = self.record.run_dir / "huggingface" / role
            self.group[role].export(folder)
            self.inputs.tokenizer.save_pretrained(folder)
            self.record.say(f"{role} saved as a Hugging Face model: {folder}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
