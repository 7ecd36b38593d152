"""The loop of every run that learns from given texts: one role, a shuffled batch, an optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Protocol

from valor.config import SupervisedConfig, TrainerConfig
from valor.controller import WorkerGroup, resolve_pool, start_group
from valor.data.batch import Batch
from valor.data.sampler import PromptSampler
from valor.errors import TrainingStopped
from valor.tracking.console import format_number, format_seconds, get_console
from valor.tracking.metrics import Timer
from valor.tracking.progress import part, phase
from valor.trainer.batch_metrics import memory_notice
from valor.trainer.checkpoints import CheckpointStore
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.recorder import recording
from valor.trainer.signals import StopRequest
from valor.workers.host import RoleSpec

_CONSOLE_LINES = 20  # of a whole run: its steps are short


class Samples(Protocol):
    """A data set; its batches have the columns that engines read and, in `meta`, the counts that losses divide by."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch: ...


class SupervisedTrainer(ABC):
    """Trains one role on one data set; validation, checkpoints and a Hugging Face directory at the end.

    A subclass says what the role is and how it is measured. Bad input raises UserError when the object is made; nothing
    has been written then.

    Args:
        config: the validated tree.
        command: what was typed, for the record.
        tokenizer: saved beside the model.
        train, val: the data sets (val None: nothing is measured).
    """

    role: ClassVar[str]  # its name in checkpoints and exports
    title: ClassVar[str]
    unit: ClassVar[str]  # what a batch's loss is a mean over; the batch's meta has num_<unit>
    shown: ClassVar[dict[str, str]]  # metrics of the console's lines, and their short names
    group: WorkerGroup

    def __init__(
        self, config: SupervisedConfig, command: str, tokenizer: Any, train: Samples, val: Samples | None
    ) -> None:
        self.config, self.command = config, command
        trainer, data = config.trainer, config.data
        self.pool, self.controller = resolve_pool(
            TrainerConfig(**trainer.model_dump(include={"device", "n_gpus_per_node", "num_threads"}))
        )
        self.tokenizer, self.train, self.val = tokenizer, train, val
        self.sampler = PromptSampler(len(train), data.train_batch_size, seed=trainer.seed, shuffle=data.shuffle)
        self.total_steps = trainer.total_training_steps or self.sampler.steps_per_epoch * trainer.total_epochs
        self.run_dir = Path(trainer.default_local_dir).expanduser()
        self.checkpoints = CheckpointStore(self.run_dir, trainer.max_ckpt_to_keep)
        self.step = 0
        self.skipped_in_a_row = 0

    @abstractmethod
    def role_spec(self) -> RoleSpec:
        """The role, whose worker has `update(batch)`."""

    @abstractmethod
    def measure(self, samples: Samples) -> dict[str, float]:
        """Metrics of the present weights on validation samples."""

    def fit(self) -> int:
        """Run to the last step. Returns 0, or 128 + n when signal n asked to stop (progress is saved)."""
        trainer = self.config.trainer
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            self.group = start_group(self.pool, {self.role: self.role_spec()}, controller=self.controller)
            stack.callback(self.group.close)
            self._resume()
            # The console's line per step is made for runs whose steps are long; `_print` speaks instead.
            loggers = [name for name in trainer.logger if name != "console"]
            tracker = stack.enter_context(
                recording(self.config, loggers, self.command, step=self.step, total_steps=self.total_steps)
            )
            stack.enter_context(phase(self.title, self.total_steps, unit="step"))
            while self.step < self.total_steps and stop.signum is None:
                with part(self.step, self.total_steps):
                    metrics = self.train_step()
                self.step += 1
                last = self.step == self.total_steps
                if last or _due(self.step, trainer.test_freq):
                    metrics |= self.validate()
                if last or stop.signum is not None or _due(self.step, trainer.save_freq):
                    self.checkpoints.save(self.step, self._state(), self._write_roles, keep=set())
                tracker.log(self.step, metrics)
                self._print(metrics, last)
            if self.step >= self.total_steps:
                self.export()
        return 0 if stop.signum is None else 128 + stop.signum

    def train_step(self) -> dict[str, float]:
        """One optimizer step on the next batch; its metrics."""
        timer = Timer()
        with timer("step"):
            batch = self.train.batch(self.sampler.next_batch())
            metrics = self.group[self.role].update(batch)
        self._watch_skips(metrics)
        if line := memory_notice(metrics, "max_token_len_per_gpu"):
            get_console().print(f"step {self.step + 1}: {line}", markup=False)
        tokens = int((batch["prompt_lengths"] + batch["response_lengths"]).sum())
        return {f"train/{name}": value for name, value in metrics.items()} | {
            f"train/{self.unit}": batch.meta[f"num_{self.unit}"],
            "timing_s/step": timer.seconds["step"],
            "perf/throughput": tokens / timer.seconds["step"] / self.pool.world_size,
            "training/epoch": self.sampler.epoch,
            "training/global_step": self.step + 1,
            **self.group.peak_memory(),
        }

    def validate(self) -> dict[str, float]:
        """`val/*` over all validation samples; nothing where there are none."""
        if self.val is None:
            return {}
        with phase("validation", len(self.val), unit="sample"):
            return {f"val/{name}": value for name, value in self.measure(self.val).items()}

    @property
    def export_dir(self) -> Path:
        """Where the trained model lies when the run has ended."""
        return self.run_dir / "huggingface" / self.role

    def export(self) -> None:
        """The trained model and its tokenizer as a plain Hugging Face directory."""
        self.group[self.role].export(self.export_dir)
        self.tokenizer.save_pretrained(self.export_dir)
        get_console().print(f"model saved as a Hugging Face model: {self.export_dir}", markup=False)

    def _print(self, metrics: Mapping[str, float], last: bool) -> None:
        every = max(1, self.total_steps // _CONSOLE_LINES)
        measured = any(name.startswith("val/") for name in metrics)
        if "console" not in self.config.trainer.logger or not (last or measured or _due(self.step, every)):
            return
        numbers = "  ".join(
            f"{name} {format_number(metrics[key])}" for key, name in self.shown.items() if key in metrics
        )
        seconds = format_seconds(metrics["timing_s/step"])
        get_console().print(f"step {self.step}/{self.total_steps}  {numbers}  {seconds} a step", markup=False)

    def _watch_skips(self, metrics: Mapping[str, float]) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics["skipped"] else 0
        if self.skipped_in_a_row >= self.config.trainer.max_skipped_updates:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} updates in a row had non-finite gradients (last: step {self.step + 1}): "
                "lower optim.lr, or resume from the last checkpoint"
            )

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def _write_roles(self, folder: Path) -> None:
        self.group[self.role].save(folder / self.role)
        self.tokenizer.save_pretrained(folder / TOKENIZER_DIR)

    def _resume(self) -> None:
        trainer = self.config.trainer
        folder = self.checkpoints.resume_folder(trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            return
        state = self.checkpoints.load_state(folder)
        self.group[self.role].load(folder / self.role)
        self.step, self.skipped_in_a_row = state["step"], state["skipped_in_a_row"]
        self.sampler.load_state_dict(state["sampler"])
        get_console().print(f"resumed from {folder} after step {self.step}", markup=False)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
