"""PPO and its critic-free relatives: collect a batch, evaluate it, shape rewards, compute advantages, update.

The trainer holds no model. It sees roles through worker groups (in this process or under Ray) and one batch that gains
columns as it passes through them. `train_step` reads in the order in which things happen.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from valor.agents.episode import last_rows
from valor.algorithms import ADVANTAGES
from valor.collector.branches import add_branch_values
from valor.collector.collector import Collector
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.controller.placement import Placement
from valor.controller.start import start_pools
from valor.data.batch import Batch, Episodes
from valor.data.prompts import PromptDataset
from valor.models.load import check_critic
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase
from valor.trainer.advantage import (
    RewardShaping,
    check_components,
    compute_advantages,
    leave_out_by_critics,
    reads_log_probs,
    right_answers,
    rows_to_train_on,
)
from valor.trainer.checkpoints import Checkpoint
from valor.trainer.checks import placed
from valor.trainer.old_log_probs import OldLogProbs, corrected, off_policy
from valor.trainer.recorder import PPORecorder
from valor.trainer.run import Run
from valor.trainer.step_metrics import (
    Aside,
    batch_metrics,
    critic_diagnostics,
    old_log_prob_metrics,
    throughput_metrics,
)
from valor.trainer.updates import Critics, Updates
from valor.trainer.validation import headline, validation_metrics
from valor.workers.host import Tracer
from valor.workers.roles import critic_names, role_specs

_COLLECTOR_DIR = "collector"  # in a checkpoint


class PPORun(Run):
    """PPO with a critic, and every critic-free relative of it.

    Bad input, or no place for the run, raises UserError when the object is made; nothing has been written then.
    `placement`: the run's, where it is known.
    """

    config: PPOConfig
    record: PPORecorder
    roles: Pools
    collector: Collector
    updates: Updates
    critics: Critics
    aside: Aside  # of the present step

    def __init__(self, config: PPOConfig, command: str, placement: Placement | None = None) -> None:
        self.placement = placement or placed(config)
        with phase("tokenizer, data and graders"):
            self.inputs = inputs = RunInputs(config)
        check_critic(config, inputs.tokenizer)
        check_components(config, inputs)
        super().__init__(config, inputs.tokenizer, PPORecorder(config, inputs.tokenizer, command))
        self.sampler, self.total_steps = inputs.sampler, inputs.total_steps
        self.shaping = RewardShaping(config.algorithm, config.trainer.seed)
        self.old = OldLogProbs.of(config)

    def start(self, stack: ExitStack, *, resuming: bool) -> Pools:
        stack.callback(self.inputs.close)
        specs = role_specs(
            self.role_config,
            total_steps=self.total_steps,
            eos_token_ids=self.inputs.eos_token_ids,
            separator_id=self.inputs.separator_id,
        )
        roles = start_pools(self.placement, specs, self.config.ray_kwargs.ray_init.model_dump())
        stack.callback(roles.close)
        self.collector = Collector(self.config, self.inputs, roles, self.record.say)
        stack.callback(self.collector.close)
        self.updates = Updates(self.config, roles, self.skips, self.record.say)
        self.critics = Critics(self.config, roles, self.updates)
        if len(self.placement.pools) > 1:
            self.record.say(self.placement.table(roles.roles))
        if self.config.trainer.v1.runs_ahead and not self.old.corrects:
            self.record.say(
                "samples may be of older weights, and nothing corrects for that: "
                "algorithm.rollout_correction.rollout_is=token, or algorithm.adv_estimator=vtrace"
            )
        return roles

    @property
    def trained_roles(self) -> Sequence[str]:
        return ["actor", *critic_names(self.config)]

    @property
    def finished(self) -> bool:
        return self.config.trainer.val_only or super().finished

    def before_steps(self) -> dict[str, Any]:
        trainer = self.config.trainer
        if not (self.inputs.val and (trainer.val_only or (trainer.val_before_train and self.step == 0))):
            return {}
        metrics = self.validate()
        self.record.log(self.step, metrics)
        return metrics

    def after_steps(self) -> None:
        if not self.config.trainer.val_only:
            super().after_steps()

    def _next_step(self) -> dict[str, Any]:
        profiler, step = self.config.global_profiler, self.step + 1
        if step not in (profiler.steps or ()):
            return super()._next_step()
        folder = Path(profiler.save_path) / f"step_{step}"
        with self.roles.traced(Tracer(folder, profiler.contents, self.config.traced_roles)):
            return super()._next_step()

    def train_step(self) -> dict[str, Any]:
        """One batch of prompts through all phases; returns the step's metrics and histograms."""
        algorithm, timer = self.config.algorithm, Timer()
        with timer("step"), Aside(self.placement.controller == "ray") as self.aside:
            batch, metrics = self.collector.next_batch(self.step, timer)
            self.updates.check(batch)
            if algorithm.branch_values.share:
                with timer("gen_branches"):
                    metrics |= add_branch_values(self.collector, batch, self.step)
            # Roles in pools of their own work at the same time; in one pool, one after the other. Advantages that
            # read no log-probs do not wait for them.
            passes = [self.roles.submit("critic", self.compute_values, batch, timer)]
            early = None
            if self.aside.beside and not reads_log_probs(self.config):
                early = self.aside.submit(self.with_advantages, batch, passes[:])
            passes += [
                self.roles.submit("actor", self.compute_old_log_probs, batch, timer),
                self.roles.submit("ref", self.compute_ref_log_probs, batch, timer),
            ]
            for done in passes:
                columns, found = done.result()
                batch, metrics = batch.union(columns), metrics | found
            with timer("adv"):
                shaped, found = early.result() if early else self.with_advantages(batch)
            batch, metrics = batch.union(shaped), metrics | found
            if self.aside.beside:
                self.aside.measure(self.record.samples, self.step, batch)
            trained, found = rows_to_train_on(batch, algorithm, self.config.trainer.seed, self.step)
            metrics |= found
            updates = [
                self.roles.submit("critic", self.update_critic, trained, timer),
                self.roles.submit("actor", self.update_actor, trained, timer),
            ]
            for update in updates:
                metrics |= update.result()
            with timer("metrics"):
                metrics |= self.aside.metrics()
        if not self.aside.beside:  # in this process it would only make the step longer
            self.record.samples(self.step, batch)
        metrics |= throughput_metrics(batch, timer, self.placement.world_size) | self.roles.peak_memory()
        if "wait" in timer.seconds:
            metrics["trainer/idle_ratio"] = timer.seconds["wait"] / timer.seconds["step"]
        return metrics | {"training/global_step": self.step, "training/epoch": self.sampler.epoch}

    def with_advantages(
        self, batch: Batch, passes: Sequence[Future[tuple[Batch, dict[str, float]]]] = ()
    ) -> tuple[Batch, dict[str, Any]]:
        """The batch with the columns of `passes`, once they are there, rewards, advantages and returns [B, T]."""
        algorithm, metrics = self.config.algorithm, dict[str, Any]()
        for done in passes:
            batch = batch.union(done.result()[0])
        episodes = Episodes(batch)
        whole = episodes.joined()
        metrics |= self.shaping.shape_rewards(whole, self.step)
        whole["advantages"], whole["returns"] = compute_advantages(
            whole, algorithm, self.config.reward.error_score, metrics
        )
        metrics |= leave_out_by_critics(whole, algorithm)
        if self.config.actor_rollout_ref.actor.positive_nll_coef:
            whole["positive"] = right_answers(whole)
        self.aside.measure(batch_metrics, whole)
        self.aside.measure(critic_diagnostics, whole, self.config)
        return episodes.split(whole), metrics

    def compute_old_log_probs(self, batch: Batch, timer: Timer) -> tuple[Batch, dict[str, float]]:
        """`old_log_probs` [B, T]: the actor's before the update, with the correction for their distance from the
        rollout's; the rollout's own in bypass mode; none where the one update of a batch has them anyway."""
        if self.old.bypass:
            return Batch({"old_log_probs": batch["rollout_log_probs"]}), {}
        if not self.old.recompute:
            return Batch(), {}
        with timer("old_log_prob"), phase("old log-probs", len(batch), unit="sample"):
            algorithm = self.config.algorithm
            estimator = ADVANTAGES[algorithm.adv_estimator]
            columns = self.roles["actor"].compute_log_probs(
                batch,
                with_sum_pi_squared=estimator.capability.needs_sum_pi_squared,
                with_full_kl=algorithm.exact_kl_in_reward,
            )
            self.aside.measure(old_log_prob_metrics, batch.union(columns))
            if self.old.correct_batch:
                correction, metrics = corrected(batch, columns["old_log_probs"], algorithm.rollout_correction)
                return columns.union(correction), metrics
            if self.config.trainer.v1.runs_ahead:
                self.aside.measure(off_policy, batch, columns["old_log_probs"])
            return columns, {}

    def compute_ref_log_probs(self, batch: Batch, timer: Timer) -> tuple[Batch, dict[str, float]]:
        """`ref_log_probs` [B, T], where a KL term needs them."""
        if not self.config.needs_ref_log_probs:
            return Batch(), {}
        with timer("ref"), phase("reference log-probs", len(batch), unit="sample"):
            return self.roles["ref"].compute_log_probs(batch), {}

    def compute_values(self, batch: Batch, timer: Timer) -> tuple[Batch, dict[str, float]]:
        """`values` [B, T], where there is a critic; in one pass with its update, where that can be."""
        if not self.critics.names:
            return Batch(), {}
        if self.critics.in_one_pass(batch, self.step):
            rewarded = batch.union(Batch())
            self.shaping.shape_rewards(rewarded, self.step)
            with timer("update_critic"):
                return self.critics.update_with_values(rewarded, self.step)
        with timer("values"), phase("values", len(batch), unit="sample"):
            return self.critics.compute_values(
                batch, with_end=self.config.algorithm.truncation_bootstrap, with_quantiles=self.config.learns_quantiles
            )

    def update_critic(self, batch: Batch, timer: Timer) -> dict[str, float]:
        """Improve the critic, if that has not come with its values."""
        if not self.critics.names or self.critics.in_one_pass(batch, self.step):
            return {}
        with timer("update_critic"):
            return self.critics.update(batch, self.step)

    def update_actor(self, batch: Batch, timer: Timer) -> dict[str, float]:
        """Improve the policy, once the critic has warmed up."""
        if self.step <= self.config.trainer.critic_warmup:
            return {}
        with timer("update_actor"):
            return self.updates.run("actor", batch, self.step)

    def validate(self) -> dict[str, float]:
        """Generate and score the validation set, if there is one: `val-core/*` metrics; remembers the best step."""
        if self.inputs.val is None:
            return {}
        timer = Timer()
        with timer("testing"):
            batch, scores, metrics = self._measured(self.inputs.val)
        self.record.validation(self.step, batch, scores, headline(metrics))
        return metrics | {"timing_s/testing": timer.seconds["testing"]}

    def evaluate(self, files: Sequence[str]) -> dict[str, float]:
        """`val-core/*` of the present weights on the prompts of these files; nothing is recorded."""
        return self._measured(self.inputs.validation_prompts(files))[2]

    def _measured(self, prompts: PromptDataset) -> tuple[Batch, list[float], dict[str, float]]:
        """Responses to prompts as in validation, their episodes' scores, and the metrics."""
        batch, results = self.collector.validation_batch(self.step, prompts)
        scores, of_episodes = [r.score for r in results], last_rows(batch).objects
        metrics = validation_metrics(
            of_episodes["uid"],
            of_episodes["data_source"],
            scores,
            [r.correct for r in results],
            [r.components.get("pred") for r in results],
        )
        return batch, scores, metrics

    def state_dict(self) -> dict[str, Any]:
        random = torch.get_rng_state().numpy().tobytes().hex()
        return super().state_dict() | {"shaping": self.shaping.state_dict(), "torch_rng": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.shaping.load_state_dict(state["shaping"])
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))

    def resume(self, checkpoint: Checkpoint) -> None:
        super().resume(checkpoint)
        self.collector.load(checkpoint.folder / _COLLECTOR_DIR)

    def _write_roles(self, folder: Path) -> None:
        super()._write_roles(folder)
        self.collector.save(folder / _COLLECTOR_DIR, self.step)
