"""The training loop: generate, score, evaluate, estimate advantages, update critic and actor, again.

The trainer holds no model. It sees roles through a worker group (in this process or under Ray) and one batch that
gains columns as it passes through them; `train_step` reads in the order in which things happen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig
from valor.controller import ResourcePool, WorkerGroup, start_group
from valor.data.batch import Batch
from valor.data.sampler import shuffled
from valor.tracking.console import format_seconds
from valor.tracking.metrics import Timer
from valor.tracking.progress import part, phase, report_progress
from valor.trainer.advantage import estimate_advantages, place_scores, shape_rewards
from valor.trainer.batch_metrics import batch_metrics, mean_of, throughput_metrics
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.inputs import RunInputs
from valor.trainer.prompts import PROMPT_OBJECTS, prompt_batch, training_params, validation_params
from valor.trainer.recorder import RunRecorder
from valor.trainer.roles import role_specs
from valor.trainer.signals import StopRequest
from valor.trainer.validation import headline, validation_metrics
from valor.workers.actor import mismatch_sums
from valor.workers.model_role import ROW_FIELDS


class TrainingStopped(RuntimeError):
    """The run ended itself: its message is the reason (too many non-finite gradients in a row)."""


class PPOTrainer:
    """PPO with a critic, and every critic-free relative of it, for one configuration.

    Args:
        config: the validated tree.
        inputs: tokenizer, data and graders, already checked, so that bad input stops before anything starts.
        pool, controller: where the roles run.
    """

    group: WorkerGroup

    def __init__(self, config: PPOConfig, inputs: RunInputs, pool: ResourcePool, controller: str) -> None:
        self.config = config
        self.inputs = inputs
        self.pool, self.controller = pool, controller
        self.record = RunRecorder(config, inputs.tokenizer)
        self.step = 0
        self.skipped_in_a_row = 0
        self.kl_controller = None
        if config.algorithm.use_kl_in_reward:
            control = config.algorithm.kl_ctrl
            self.kl_controller = algorithms.make_kl_controller(
                control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
            )
        actor = config.actor_rollout_ref.actor
        mini_batches = math.ceil(config.data.train_batch_size / actor.ppo_mini_batch_size)
        self.greedy_baseline = algorithms.ADVANTAGES[config.algorithm.adv_estimator].capability.needs_greedy_baseline
        # A batch that gets one update is on-policy: its old log-probs are the current ones, no pass is spent on them.
        self.bypass = config.algorithm.rollout_correction.bypass_mode
        self.on_policy = mini_batches * actor.ppo_epochs == 1 and not self.bypass
        self.recompute_log_probs = not self.bypass and (not self.on_policy or config.algorithm.use_kl_in_reward)

    def fit(self) -> int:
        """Run to the last step. Returns 0, or 128 + n when signal n asked to stop (progress is saved)."""
        trainer = self.config.trainer
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            stack.callback(self.inputs.close)
            self.group = start_group(
                self.pool,
                role_specs(self.config, total_steps=self.inputs.total_steps, eos_token_ids=self.inputs.eos_token_ids),
                controller=self.controller,
                ray_init=self.config.ray_kwargs.ray_init.model_dump(),
            )
            stack.callback(self.group.close)
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

    def train_step(self) -> dict[str, float]:
        """One batch of prompts through all phases; returns the step's metrics."""
        timer = Timer()
        metrics: dict[str, float] = {}
        with timer("step"):
            with timer("gen"):
                batch = self._generate()
            with timer("reward"), phase("reward", len(batch), unit="sample"):
                batch = self._score(batch, metrics)
            if self.greedy_baseline:
                with timer("gen_baseline"):
                    batch["reward_baselines"] = self._greedy_rewards(batch)
            if self.bypass:
                batch["old_log_probs"] = batch["rollout_log_probs"]
            elif self.recompute_log_probs:
                with timer("old_log_prob"), phase("old log-probs", len(batch), unit="sample"):
                    batch = batch.union(self.group["actor"].compute_log_probs(batch))
                    on = batch["response_mask"]
                    metrics["actor/entropy"] = float((batch["entropy"] * on).sum() / on.sum())
                    gap = mismatch_sums(batch["old_log_probs"], batch["rollout_log_probs"], on, float(on.sum()))
                    metrics |= {k: v.item() for k, v in gap.items()}
            if "ref" in self.group:
                with timer("ref"), phase("reference log-probs", len(batch), unit="sample"):
                    batch = batch.union(self.group["ref"].compute_log_probs(batch))
            if "critic" in self.group:
                with timer("values"), phase("values", len(batch), unit="sample"):
                    batch = batch.union(self.group["critic"].compute_values(batch))
            with timer("adv"):
                batch["token_level_rewards"], kl = shape_rewards(batch, self.config.algorithm, self.kl_controller)
                batch["advantages"], batch["returns"] = estimate_advantages(batch, self.config.algorithm)
                metrics |= kl | batch_metrics(batch)
            if "critic" in self.group and not self.config.critic.freeze:
                with timer("update_critic"):
                    metrics |= self._update("critic", batch)
            if self.step > self.config.trainer.critic_warmup:
                with timer("update_actor"):
                    metrics |= self._update("actor", batch)
        self._watch_mismatch(metrics)
        self.record.samples(self.step, batch)
        metrics |= throughput_metrics(batch, timer, self.pool.world_size)
        return metrics | {"training/global_step": self.step, "training/epoch": self.inputs.sampler.epoch}

    def validate(self) -> dict[str, float]:
        """Generate and score the validation set, if there is one: `val-core/*` metrics; remembers the best step."""
        if self.inputs.val is None:
            return {}
        rollout = self.config.actor_rollout_ref.rollout
        timer = Timer()
        parts: list[Batch] = []
        with timer("testing"):
            for rows in self.inputs.validation_chunks():
                prompts = prompt_batch(
                    rows, samples_per_prompt=rollout.val_kwargs.n, seed=self.config.trainer.seed, step=None
                )
                with phase("validation", len(prompts), unit="sample"):
                    parts.append(self._respond(prompts, validation_params(rollout)))
            batch = Batch.concat(parts)
            results, _ = self.inputs.score(batch)
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

    def _generate(self) -> Batch:
        rows = [self.inputs.train[i] for i in self.inputs.sampler.next_batch()]
        rollout = self.config.actor_rollout_ref.rollout
        prompts = prompt_batch(rows, samples_per_prompt=rollout.n, seed=self.config.trainer.seed, step=self.step)
        with phase("rollout", len(prompts), unit="sample"):
            batch = self._respond(prompts, training_params(rollout))
        batch.meta |= {"temperature": rollout.temperature, "global_step": self.step}
        return batch

    def _respond(self, prompts: Batch, params: Any) -> Batch:
        columns = prompts.select(("prompts", "prompt_lengths", "sample_key", "uid"))
        batch = prompts.union(self.group["rollout"].generate(columns, params))
        return self.inputs.with_text(batch)

    def _score(self, batch: Batch, metrics: dict[str, float]) -> Batch:
        results, summary = self.inputs.score(batch)
        metrics |= summary.metrics
        self.record.say(summary.line)
        batch.objects["reward_info"] = [r.components for r in results]
        batch["token_level_scores"] = place_scores(batch, [r.score for r in results])
        return batch

    def _greedy_rewards(self, batch: Batch) -> Tensor:
        """Score [B] of the greedy response to each row's prompt (ReMax's baseline), one response a prompt."""
        n = self.config.actor_rollout_ref.rollout.n
        prompts = batch.select(("prompts", "prompt_lengths", "sample_key", *PROMPT_OBJECTS))
        params = replace(training_params(self.config.actor_rollout_ref.rollout), temperature=0.0)
        with phase("greedy baseline", len(batch) // n, unit="sample"):
            greedy = self._respond(prompts.take(range(0, len(batch), n)), params)
        results, _ = self.inputs.score(greedy)
        return torch.tensor([r.score for r in results]).repeat_interleave(n)

    def _update(self, role: str, batch: Batch) -> dict[str, float]:
        """All epochs and mini-batches of one role, one optimizer step each; counts skipped steps in a row."""
        parts: list[dict[str, float]] = []
        mini_batches = list(self._mini_batches(role, batch))
        with phase(f"train {role}", len(mini_batches), unit="mini-batch"):
            for done, mini_batch in enumerate(mini_batches):
                with part(done, len(mini_batches)):
                    metrics = self.group[role].update(mini_batch)
                self._watch_skips(role, metrics)
                parts.append(metrics)
        return {k if "/" in k else f"{role}/{k}": v for k, v in mean_of(parts).items()}

    def _mini_batches(self, role: str, batch: Batch) -> Iterator[Batch]:
        """Rows of each optimizer step, with the global counts its loss divides by."""
        settings = self.config.critic if role == "critic" else self.config.actor_rollout_ref.actor
        rows_per_step = settings.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        columns = [*ROW_FIELDS, "response_mask", *self._columns(role)]
        updates = settings.ppo_epochs * math.ceil(len(batch) / rows_per_step)
        for epoch in range(settings.ppo_epochs):
            order = list(range(len(batch)))
            if settings.shuffle:
                order = shuffled(len(batch), settings.data_loader_seed, self.step, epoch).tolist()
            for start in range(0, len(batch), rows_per_step):
                updates -= 1
                first = epoch == 0 and start == 0
                # Before the first update the weights are still those that sampled: the gap can be measured for free.
                measure = role == "actor" and first and not self.recompute_log_probs
                names = [*columns, "rollout_log_probs"] if measure else columns
                mini_batch = batch.select(dict.fromkeys(names)).take(order[start : start + rows_per_step])
                if role == "actor" and self.config.algorithm.adv_whitening == "mini_batch":
                    mini_batch["advantages"] = algorithms.masked_whiten(
                        mini_batch["advantages"], mini_batch["response_mask"]
                    )
                mask = mini_batch["response_mask"]
                mini_batch.meta |= {
                    "num_tokens": float(mask.sum()),
                    "num_sequences": float(mask.any(-1).sum()),
                    "last_of_step": updates == 0,
                }
                yield mini_batch

    def _columns(self, role: str) -> list[str]:
        if role == "critic":
            return ["values", "returns"]
        names = ["advantages"]
        if not self.on_policy:
            names.append("old_log_probs")
        if self.config.actor_rollout_ref.actor.use_kl_loss:
            names.append("ref_log_probs")
        return names

    def _watch_skips(self, role: str, metrics: dict[str, float]) -> None:
        """Stop the run after `trainer.max_skipped_updates` optimizer steps in a row had non-finite gradients."""
        if not metrics["skipped"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        limit = self.config.trainer.max_skipped_updates
        self.record.say(
            f"step {self.step}: non-finite gradient in the {role}, update skipped ({self.skipped_in_a_row} in a row)"
        )
        if self.skipped_in_a_row >= limit:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} updates in a row had non-finite gradients ({role}, step {self.step}): "
                "lower the learning rate, check the rewards for NaN, or resume from the last checkpoint"
            )

    def _watch_mismatch(self, metrics: dict[str, float]) -> None:
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
            "kl_controller": self.kl_controller.state_dict() if self.kl_controller else None,
            "skipped_in_a_row": self.skipped_in_a_row,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def _write_roles(self, folder: Path) -> None:
        for role in ("actor", "critic"):
            if role in self.group:
                self.group[role].save(folder / role)
        self.inputs.tokenizer.save_pretrained(folder / TOKENIZER_DIR)

    def _resume(self) -> None:
        """Continue from the checkpoint that `trainer.resume_mode` names, if there is one."""
        trainer, store = self.config.trainer, self.record.checkpoints
        folder = store.resume_folder(trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            return
        state = store.load_state(folder)
        for role in ("actor", "critic"):
            if role in self.group:
                self.group[role].load(folder / role)
        self.step = state["step"]
        self.inputs.sampler.load_state_dict(state["sampler"])
        if self.kl_controller and state["kl_controller"]:
            self.kl_controller.load_state_dict(state["kl_controller"])
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.record.best = state["best"]
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
        self.record.say(f"resumed from {folder} after step {self.step}")

    def _export(self) -> None:
        """The trained models as plain Hugging Face directories."""
        for role in ("actor", "critic"):
            if role in self.group:
                folder = self.record.run_dir / "huggingface" / role
                self.group[role].export(folder)
                self.inputs.tokenizer.save_pretrained(folder)
                self.record.say(f"{role} saved as a Hugging Face model: {folder}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
