"""What a run leaves in its folder: metrics, samples, checkpoints, the resolved config and the report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from valor.collector.rollouts import rollout_records, write_rollouts
from valor.config import PPOConfig, SupervisedConfig, dump_yaml
from valor.data.batch import Batch
from valor.report import build_report
from valor.tracking.console import get_console
from valor.tracking.generations import Sample, token_strings, write_samples
from valor.tracking.loggers import RunInfo, Tracker
from valor.tracking.progress_console import show_progress
from valor.tracking.rundir import write_atomically, write_run_info
from valor.trainer.changes import digests_of, settings_of
from valor.trainer.checkpoints import CheckpointStore

_PER_TOKEN = {
    "advantages": "advantages",
    "values": "values",
    "returns": "returns",
    "log_probs": "rollout_log_probs",
}
_EVERYTHING = 2**62  # as a resume point: no step is later, so a validation alone takes no record away


class RunRecorder:
    """The run folder `trainer.default_local_dir`; nothing is written before `opened`.

    `loggers`: where metrics go. `best`: {"step", "value"} of the best validation so far.
    """

    def __init__(self, config: PPOConfig | SupervisedConfig, command: str, loggers: Sequence[str]) -> None:
        self.config = config
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.checkpoints = CheckpointStore(self.run_dir, config.trainer.max_ckpt_to_keep)
        self.best: dict[str, float] | None = None
        self.best_is_new = False  # and wants a checkpoint of its own
        self._command, self._loggers = command, loggers
        self._tracker: Tracker | None = None
        self._console = get_console()

    @contextmanager
    def opened(self, step: int, total_steps: int) -> Iterator[None]:
        """Start recording after `step` (0: a fresh run): configuration, what was typed, versions; progress is shown,
        and metrics are written, inside the block."""
        trainer = self.config.trainer
        _ = self.identity  # of the files as they are now, not as they will be when it is saved
        info = RunInfo(
            run_dir=self.run_dir,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            config=self.config.model_dump(mode="json"),
            total_steps=total_steps,
            resume_step=step or None,
        )
        with Tracker(self._loggers, info) as self._tracker, show_progress(self._console):
            write_atomically(self.run_dir / "config.yaml", dump_yaml(self.config))
            versions = {package: version(package) for package in ("torch", "transformers", "ray")}
            versions["python"] = platform.python_version()
            write_run_info(self.run_dir, name=trainer.experiment_name, command=self._command, versions=versions)
            yield

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's metrics and histograms to every logger."""
        assert self._tracker is not None, "log() outside opened()"
        self._tracker.log(step, metrics)

    def say(self, line: str) -> None:
        """A line on the console, above the bars."""
        self._console.print(line, markup=False)

    def save_checkpoint(self, state: dict[str, Any], write_roles: Callable[[Path], None]) -> Path:
        """A complete `global_step_N`; the best one outlives `max_ckpt_to_keep` where it is to be kept."""
        keep = {int(self.best["step"])} if self.best and self.keeps_best else set()
        self.best_is_new = False
        state = state | {"best": self.best} | self.identity
        return self.checkpoints.save(self.kind, state, write_roles, keep)

    @property
    def kind(self) -> str:
        """What kind of run this is, in a word: PPO, SFT, …"""
        return type(self.config).__name__.removesuffix("Config")

    @cached_property
    def identity(self) -> dict[str, dict[str, Any]]:
        """What makes this run this run: its `settings`, and `digests` of the files that they name."""
        return {"settings": settings_of(self.config), "digests": digests_of(self.config)}

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best step stays."""
        return False

    def finish(self) -> None:
        """What is written when the run has ended."""


class PPORecorder(RunRecorder):
    """Of runs whose policy generates: also samples, the best validation, and the report."""

    config: PPOConfig

    def __init__(self, config: PPOConfig, tokenizer: Any, command: str) -> None:
        loggers = [*config.trainer.logger]
        if config.trainer.report and "file" not in loggers:
            loggers.append("file")  # the report is built from it
        super().__init__(config, command, loggers)
        self._tokenizer = tokenizer

    def opened(self, step: int, total_steps: int) -> Any:
        return super().opened(_EVERYTHING if self.config.trainer.val_only else step, total_steps)

    @property
    def keeps_best(self) -> bool:
        return self.config.trainer.keep_best

    def samples(self, step: int, batch: Batch) -> None:
        """The first `trainer.log_generations` rows of a training batch, with what each token was worth."""
        rows = [self._sample(batch, i) for i in range(min(self.config.trainer.log_generations, len(batch)))]
        if rows:
            write_samples(self.run_dir, step, rows)
        self._write(self.config.trainer.rollout_data_dir, step, batch, batch["token_level_scores"].sum(-1).tolist())

    def validation(self, step: int, batch: Batch, scores: Sequence[float], value: float | None) -> None:
        """Samples of a validation pass, and whether `value` is the best so far."""
        count = min(self.config.trainer.log_val_generations, len(batch))
        rows = [self._sample(batch, i, reward=scores[i]) for i in range(count)]
        if rows:
            write_samples(self.run_dir, step, rows, split="val")
        self._write(self.config.trainer.validation_data_dir, step, batch, scores)
        if value is not None and (self.best is None or value > self.best["value"]):
            self.best = {"step": step, "value": value}
            self.best_is_new = self.keeps_best and step > 0

    def finish(self) -> None:
        """report.html, from what lies in the folder."""
        if self.config.trainer.report:
            build_report(self.run_dir)

    def _write(self, folder: str | None, step: int, batch: Batch, scores: Sequence[float]) -> None:
        """Every row of a batch as a line of JSON that `read_rollouts` can read back, when a folder is given."""
        if folder is not None:
            file = Path(folder).expanduser() / f"{step}.jsonl"
            write_rollouts(file, rollout_records(batch, scores, step, self._tokenizer))

    def _sample(self, batch: Batch, i: int, reward: float | None = None) -> Sample:
        length = int(batch["response_lengths"][i])
        ids = batch["responses"][i, :length].tolist()
        prompt = batch["prompts"][i, : int(batch["prompt_lengths"][i])].tolist()
        numbers = {
            field: batch[column][i, :length].tolist() if column in batch else None
            for field, column in _PER_TOKEN.items()
        }
        return Sample(
            prompt=self._tokenizer.decode(prompt),
            tokens=token_strings(ids, self._tokenizer.decode),
            reward=float(batch["token_level_scores"][i].sum()) if reward is None else reward,
            uid=batch.objects["uid"][i],
            data_source=batch.objects["data_source"][i],
            ground_truth=batch.objects["ground_truth"][i],
            finish_reason=batch.objects["finish_reason"][i],
            mask=[int(m) for m in batch["response_mask"][i, :length]],
            reward_info=batch.objects["reward_info"][i] if "reward_info" in batch else {},
            **numbers,
        )
