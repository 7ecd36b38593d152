"""What every training run does, whatever it trains: start, resume, take steps, log, save, stop, export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from valor.config import PPOConfig, SupervisedConfig
from valor.controller.group import Roles
from valor.data.sampler import PromptSampler
from valor.errors import TrainingStopped
from valor.tracking.console import format_seconds
from valor.tracking.metrics import Timer
from valor.tracking.progress import phase, report_progress
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.recorder import RunRecorder
from valor.trainer.signals import StopRequest


class Run(ABC):
    """A loop of training steps around roles, with everything that a run owes its user.

    A subclass says which roles there are (`start`), what a step is (`train_step`), and what is measured (`validate`).
    It sets `sampler` and `total_steps` at the latest in `start`.
    """

    title: ClassVar[str] = "training"
    roles: Roles
    sampler: PromptSampler
    total_steps: int

    def __init__(self, config: PPOConfig | SupervisedConfig, tokenizer: Any, record: RunRecorder) -> None:
        self.config, self.tokenizer, self.record = config, tokenizer, record
        self.step = 0
        self.skips = SkippedUpdates(config.trainer.max_skipped_updates, record.say)

    @abstractmethod
    def start(self, stack: ExitStack, *, resuming: bool) -> Roles:
        """Start the processes. What has to end with the run, the processes among it, goes on the stack."""

    @abstractmethod
    def train_step(self) -> dict[str, Any]:
        """Train on one batch, as step `self.step`; the step's metrics."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the present weights on validation data; none where there is no such data."""

    @property
    @abstractmethod
    def trained_roles(self) -> Sequence[str]:
        """Roles whose weights are saved and exported."""

    def fit(self) -> int:
        """Run to the last step. Returns 0, or 128 + n when signal n asked to stop (progress is saved)."""
        trainer, store = self.config.trainer, self.record.checkpoints
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            checkpoint = store.resume_folder(trainer.resume_mode, trainer.resume_from_path)
            self.roles = self.start(stack, resuming=checkpoint is not None)
            if checkpoint is not None:
                self.resume(checkpoint)
            stack.enter_context(self.record.opened(self.step, self.total_steps))
            stack.enter_context(phase(self.title, self.total_steps, unit="step"))
            report_progress(self.step)
            self.before_steps()
            while not self.finished and stop.signum is None:
                self.step += 1
                metrics = self.train_step()
                if self.validates_now():
                    metrics |= self.validate()
                # Logged before it is saved: a run killed in between repeats the step, and its line with it.
                self.log(metrics)
                if self.finished or stop.signum is not None or self.record.best_is_new or self.due(trainer.save_freq):
                    self.save()
                report_progress(self.step)
            self.after_steps()
            self.record.finish()
            return 0 if stop.signum is None else 128 + stop.signum

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.step >= self.total_steps

    def due(self, every: int) -> bool:
        """Whether something that is done `every` so many steps (0 or less: never) is due after this one."""
        return every > 0 and self.step % every == 0

    def validates_now(self) -> bool:
        """After the last step, and every `trainer.test_freq` steps."""
        return self.finished or self.due(self.config.trainer.test_freq)

    def before_steps(self) -> None:  # noqa: B027  # most runs have nothing to do there
        """What is done once before the first step of this process."""

    def after_steps(self) -> None:
        """What is done once at the end: a run that has done all its steps exports its models."""
        if self.finished:
            self.export()

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of this step."""
        self.record.log(self.step, metrics)

    def save(self) -> None:
        """Write a complete checkpoint of this step."""
        timer = Timer()
        with timer("save"), phase("checkpoint"):
            folder = self.record.save_checkpoint(self.step, self.state_dict(), self._write_roles)
        self.record.say(f"saved {folder} in {format_seconds(timer.seconds['save'])}")

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        state = self.record.checkpoints.load_state(folder)
        for role in self.trained_roles:
            self.roles[role].load(folder / role)
        self.load_state_dict(state)
        self.record.best = state["best"]
        self.record.say(f"resumed from {folder} after step {self.step}")

    def state_dict(self) -> dict[str, Any]:
        """What the driver must remember besides the models, as JSON."""
        return {"step": self.step, "sampler": self.sampler.state_dict(), "skipped_in_a_row": self.skips.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.step, self.skips.in_a_row = state["step"], dict(state["skipped_in_a_row"])
        self.sampler.load_state_dict(state["sampler"])

    def export(self) -> None:
        """The trained models as plain Hugging Face directories."""
        for role in self.trained_roles:
            folder = self.export_dir(role)
            self.roles[role].export(folder)
            self.tokenizer.save_pretrained(folder)
            self.record.say(f"{role} saved as a Hugging Face model: {folder}")

    def export_dir(self, role: str) -> Path:
        """Where the role's model lies when the run has ended."""
        return self.record.run_dir / "huggingface" / role

    def _write_roles(self, folder: Path) -> None:
        for role in self.trained_roles:
            self.roles[role].save(folder / role)
        self.tokenizer.save_pretrained(folder / TOKENIZER_DIR)


class SkippedUpdates:
    """Counts each role's optimizer steps without effect (non-finite gradients), and stops a run that only skips.

    `in_a_row` is part of a checkpoint.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self.in_a_row: dict[str, int] = {}

    def count(self, role: str, skipped: bool, step: int) -> None:
        """Note one update. TrainingStopped after `limit` skipped ones in a row."""
        skips = self.in_a_row[role] = self.in_a_row.get(role, 0) + 1 if skipped else 0
        if skips:
            self._say(f"step {step}: non-finite gradient in the {role}, update skipped ({skips} in a row)")
        if skips >= self._limit:
            raise TrainingStopped(
                f"{skips} updates in a row had non-finite gradients ({role}, step {step}): "
                "lower the learning rate, check the rewards for NaN, or resume from the last checkpoint"
            )
