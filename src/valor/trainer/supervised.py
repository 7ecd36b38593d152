"""Runs that learn from given texts: one role, a shuffled batch, an optimizer step; and fine-tuning."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

from valor.config import SFTConfig, SupervisedConfig, TrainerConfig
from valor.controller.group import Pools
from valor.controller.placement import resolve_pool, startable
from valor.controller.start import start_pools
from valor.data.demonstrations import DemonstrationDataset
from valor.data.preferences import PreferenceDataset
from valor.data.prompts import check_fits
from valor.data.sampler import PromptSampler
from valor.engines.microbatch import plan_micro_batches
from valor.models.load import load_model_config, load_model_tokenizer
from valor.tracking.console import summary_line
from valor.tracking.metrics import Timer
from valor.tracking.progress import part, phase
from valor.trainer.recorder import RunRecorder
from valor.trainer.run import Run
from valor.workers.host import RoleSpec
from valor.workers.sft import SFTWorker

_CONSOLE_LINES = 20  # of a whole run: its steps are short

Samples = DemonstrationDataset | PreferenceDataset


class SupervisedRun(Run):
    """Trains one role on one data set, with validation, checkpoints and a Hugging Face directory at the end.

    A subclass defines the role and its metrics. Bad input raises UserError when the object is made; nothing has been
    written then.
    """

    role: ClassVar[str]  # its name in checkpoints and exports
    unit: ClassVar[str]  # what a batch's loss is a mean over; the batch's meta has num_<unit>
    config: SupervisedConfig

    def __init__(
        self, config: SupervisedConfig, command: str, tokenizer: Any, train: Samples, val: Samples | None
    ) -> None:
        # A line on the console after every step is for runs whose steps are long; `log` prints some.
        loggers = [name for name in config.trainer.logger if name != "console"]
        super().__init__(config, tokenizer, RunRecorder(config, command, loggers))
        trainer, data = config.trainer, config.data
        self.placement = startable(resolve_pool(TrainerConfig(**trainer.model_dump())))
        self.train, self.val, self.trained_roles = train, val, [self.role]
        self.sampler = PromptSampler(len(train), data.train_batch_size, seed=trainer.seed, shuffle=data.shuffle)
        self.total_steps = trainer.total_training_steps or self.sampler.steps_per_epoch * trainer.total_epochs

    @abstractmethod
    def role_spec(self) -> RoleSpec:
        """The role, whose worker has `update(batch)`."""

    @abstractmethod
    def measure(self, samples: Samples) -> dict[str, float]:
        """Metrics of the present weights on validation samples."""

    def start(self, stack: ExitStack, *, resuming: bool) -> Pools:
        roles = start_pools(self.placement, {self.role: self.role_spec()})
        stack.callback(roles.close)
        return roles

    def train_step(self) -> dict[str, Any]:
        timer = Timer()
        with timer("step"), part(self.step - 1, self.total_steps):
            batch = self.train.batch(self.sampler.next_batch())
            self.skips.updating = True
            metrics = self.roles[self.role].update(batch)
        self.skips.count(self.role, bool(metrics["skipped"]), self.step)
        tokens = int((batch["prompt_lengths"] + batch["response_lengths"]).sum())
        return {f"train/{name}": value for name, value in metrics.items()} | {
            f"train/{self.unit}": batch.meta[f"num_{self.unit}"],
            "timing_s/step": timer.seconds["step"],
            "perf/throughput": tokens / timer.seconds["step"] / self.placement.world_size,
            "training/epoch": self.sampler.epoch,
            "training/global_step": self.step,
            **self.roles.peak_memory(),
        }

    def validate(self) -> dict[str, float]:
        """`val/*` over all validation samples; nothing where there are none."""
        if self.val is None:
            return {}
        with phase("validation", len(self.val), unit="sample"):
            return {f"val/{name}": value for name, value in self.measure(self.val).items()}

    def validation_batches(self, samples: Samples) -> Iterator[list[int]]:
        """Indices of all samples in batches of one micro-batch a process, so that a long sample pads no others."""
        budget = self.config.data.max_token_len_per_gpu * self.placement.world_size
        groups = plan_micro_batches(samples.lengths, max_tokens=budget)
        for i, group in enumerate(groups):
            with part(i, len(groups)):
                yield sorted(group)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics; about twenty lines a run on the console."""
        super().log(metrics)
        shown = self.due(max(1, self.total_steps // _CONSOLE_LINES)) or any(k.startswith("val/") for k in metrics)
        if "console" in self.config.trainer.logger and (shown or self.finished):
            self.record.say(summary_line(self.step, metrics, self.total_steps))


class SFTRun(SupervisedRun):
    """The policy learns demonstrations."""

    role = "actor"  # the policy's name in checkpoints and exports, as in a PPO run
    title = "supervised training"
    unit = "tokens"
    config: SFTConfig

    def __init__(self, config: SFTConfig, command: str) -> None:
        data, seed, tokenizer = config.data, config.trainer.seed, load_model_tokenizer(config.model, chat=True)
        self.fits = partial(check_fits, config.model.path, load_model_config(config.model).get_text_config())
        train = DemonstrationDataset(data, tokenizer, "train", seed, self.fits)
        val = DemonstrationDataset(data, tokenizer, "val", seed, self.fits) if data.val_files else None
        super().__init__(config, command, tokenizer, train, val)

    def evaluate(self, files: Sequence[str]) -> dict[str, float]:
        """`loss` and `token_accuracy` of the present weights on the demonstrations in these files."""
        data = self.config.data.model_copy(update={"val_files": list(files), "val_max_samples": -1})
        return self.measure(DemonstrationDataset(data, self.tokenizer, "val", self.config.trainer.seed, self.fits))

    def role_spec(self) -> RoleSpec:
        return RoleSpec(SFTWorker, {"config": self.config, "total_steps": self.total_steps})

    def measure(self, samples: Samples) -> dict[str, float]:
        """`loss` and `token_accuracy`."""
        results: list[tuple[dict[str, float], float]] = []
        for indices in self.validation_batches(samples):
            batch = samples.batch(indices)
            results.append((self.roles[self.role].evaluate(batch), batch.meta["num_tokens"]))
        total = sum(count for _, count in results)
        return {name: sum(means[name] * (count / total) for means, count in results) for name in results[0][0]}
