"""PPO and its critic-free relatives: each step collects a batch and runs the phases of `phases/standard.py` on it.

The trainer holds no model. It calls roles through worker groups, in this process or under Ray, and passes one batch
through them, which gains columns.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from valor.agents.episode import last_rows
from valor.collector.collector import Collector
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.controller.start import start_pools
from valor.data.batch import Batch
from valor.data.prompts import PromptDataset
from valor.models.export import copy_processor
from valor.models.load import check_critic
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase
from valor.trainer.advantage import check_components
from valor.trainer.checkpoints import Checkpoint
from valor.trainer.checks import placed
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.old_log_probs import OldLogProbs
from valor.trainer.phases.base import Resources
from valor.trainer.phases.critic_prompts import check_critic_prompts
from valor.trainer.phases.distillation import check_routes
from valor.trainer.phases.schedule import Schedule
from valor.trainer.phases.standard import phases_of
from valor.trainer.recorder import PPORecorder
from valor.trainer.run import Run
from valor.trainer.served_teacher import check_served
from valor.trainer.step_metrics import throughput_metrics
from valor.trainer.updates import Critics, Updates
from valor.trainer.validation import Graded, headline, validation_metrics
from valor.workers.host import Tracer
from valor.workers.roles import role_specs

_COLLECTOR_DIR, _PHASES_DIR = "collector", "phases"  # in a checkpoint


class PPORun(Run):
    """PPO with a critic, or a critic-free relative.

    Bad input, or no place for the run, raises UserError when the object is made; nothing has been written then.
    """

    config: PPOConfig
    record: PPORecorder
    collector: Collector

    def __init__(self, config: PPOConfig, command: str) -> None:
        self.placement = placed(config)
        with phase("tokenizer, data and graders"):
            self.inputs = inputs = RunInputs(config)
        check_critic(config, inputs.tokenizer)
        check_components(config, inputs)
        check_routes(config, inputs)
        longest = config.data.max_prompt_length + config.data.max_response_length
        for name, teacher in config.distillation.served.items() if config.distillation.enabled else ():
            check_served(name, teacher, inputs.tokenizer, longest)
        check_critic_prompts(config, inputs)
        super().__init__(config, inputs.tokenizer, PPORecorder(config, inputs.tokenizer, command))
        self.sampler, self.total_steps = inputs.sampler, inputs.total_steps
        self.schedule = Schedule(phases_of(config))

    def start(self, stack: ExitStack, *, resuming: bool) -> Pools:
        stack.callback(self.inputs.close)
        specs = role_specs(
            self.config,
            total_steps=self.total_steps,
            eos_token_ids=self.inputs.eos_token_ids,
            separator_id=self.inputs.separator_id,
        )
        self.trained_roles = [name for name, spec in specs.items() if not spec.replaceable]
        roles = start_pools(self.placement, specs, self.config.ray_kwargs.ray_init)
        stack.callback(roles.close)
        self.collector = Collector(self.config, self.inputs, roles, self.record.say)
        stack.callback(self.collector.close)
        updates = Updates(self.config, roles, self.skips)
        self.schedule.bind(Resources(roles, self.collector, updates, Critics(self.config, roles, updates), self.record))
        if len(self.placement.pools) > 1:
            self.record.say(self.placement.table(roles.roles))
        if self.config.trainer.v1.runs_ahead and not OldLogProbs(self.config).corrects:
            self.record.say(
                "samples may be of older weights, and nothing corrects for that: "
                "algorithm.rollout_correction.rollout_is=token, or algorithm.adv_estimator=vtrace"
            )
        return roles

    @property
    def finished(self) -> bool:
        return self.config.trainer.val_only or super().finished

    def before_steps(self) -> dict[str, Any]:
        trainer = self.config.trainer
        if not (self.inputs.val and (trainer.val_only or (trainer.val_before_train and self.step == 0))):
            return {}
        metrics, self._unmeasured = self.validate(), None
        self.record.log(self.step, metrics)
        return metrics

    def after_steps(self) -> None:
        if not self.config.trainer.val_only:
            super().after_steps()

    def _next_step(self) -> dict[str, Any]:
        profiler, step = self.config.global_profiler, self.step + 1
        if step not in (profiler.steps or ()):
            return super()._next_step()
        folder = self.record.start / profiler.save_path / f"step_{step}"
        with self.roles.traced(Tracer(folder, profiler)):
            return super()._next_step()

    def train_step(self) -> dict[str, Any]:
        """Collects one batch and runs the phases on it; returns the step's metrics and histograms."""
        timer = Timer()
        with timer("step"):
            batch, metrics = self.collector.next_batch(self.step, timer)
            batch, measured = self.schedule.run(batch, self.step, timer, self.roles)
        metrics |= measured
        metrics |= throughput_metrics(batch, timer, self.placement.world_size) | self.roles.peak_memory()
        if "wait" in timer.seconds:
            metrics["trainer/idle_ratio"] = timer.seconds["wait"] / timer.seconds["step"]
        return metrics | {"training/global_step": self.step, "training/epoch": self.sampler.epoch}

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
        ends = last_rows(batch).objects
        graded = [
            Graded(uid, source, r.score, r.correct, r.components.get("pred"))
            for uid, source, r in zip(ends["uid"], ends["data_source"], results, strict=True)
        ]
        return batch, [sample.score for sample in graded], validation_metrics(graded)

    def state_dict(self) -> dict[str, Any]:
        random = torch.get_rng_state().numpy().tobytes().hex()
        return super().state_dict() | {"phases": self.schedule.state_dict(), "torch_rng": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state.get("phases") or {"rewards": state["shaping"]})  # its name before phases
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))

    def resume(self, checkpoint: Checkpoint) -> None:
        super().resume(checkpoint)
        self.collector.load(checkpoint.folder / _COLLECTOR_DIR, anew=self._is_sampled_anew)
        self.schedule.load(checkpoint.folder / _PHASES_DIR)

    def _complete(self, folder: Path) -> None:
        super()._complete(folder)
        self._write_processor(folder)

    def _write_processor(self, folder: Path) -> None:
        if self.config.data.image_key is not None:
            copy_processor(self.config.actor_rollout_ref.model.path, folder)

    def _write_roles(self, folder: Path) -> None:
        super()._write_roles(folder)
        self._write_processor(folder / TOKENIZER_DIR)
        self.collector.save(folder / _COLLECTOR_DIR, self.step)
        self.schedule.save(folder / _PHASES_DIR)
