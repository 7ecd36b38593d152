"""Records of a run in its folder: metrics, samples, checkpoints, the resolved configuration and the report."""

import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from valor.collector.rollouts import rollout_records, write_rollouts
from valor.config import PPOConfig, SupervisedConfig, dump_yaml
from valor.config.tree import flatten
from valor.data.batch import Batch, Episodes
from valor.data.images import IMAGES, shown_images
from valor.report.page import build_report
from valor.report.run_data import read_steps
from valor.tracking.console import sample_line, say, show_progress
from valor.tracking.diagnosis import Diagnosis
from valor.tracking.generations import Sample, Split, token_strings, write_samples
from valor.tracking.loggers import RunInfo, Tracker
from valor.tracking.rundir import METRICS_FILE, keep_locked, write_atomically, write_run_info
from valor.trainer.changes import digests_of, settings_of
from valor.trainer.checkpoints import CheckpointStore

_PER_TOKEN = {
    **{name: name for name in ("advantages", "values", "returns", "teacher_log_probs")},
    "log_probs": "rollout_log_probs",
}
_OBJECTS = ("uid", "data_source", "ground_truth", "finish_reason")
_REPEATED = re.compile(r"(<[^<>\s]+>)\1+")  # an image has a token a feature
_FIRST_REPORT, _REPORT_EVERY = 5.0, 20.0  # seconds
_NO_REWIND = 2**62  # as the step to resume after: no record is of a later step, so none is deleted


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class RunRecorder:
    """Writes to the run folder `trainer.default_local_dir`; nothing before `opened`.

    loggers: names of those that get the metrics. best: {"step", "value"} of the best validation so far. start: the
    folder in which the process was started, which user code may leave.
    """

    def __init__(self, config: PPOConfig | SupervisedConfig, command: str, loggers: Sequence[str]) -> None:
        self.config = config
        self.start = Path.cwd()
        self.run_dir = self.start / Path(config.trainer.default_local_dir).expanduser()
        self.checkpoints = CheckpointStore(self.run_dir, config.trainer.max_ckpt_to_keep)
        self.best: dict[str, float] | None = None
        self.best_is_new = False  # and wants a checkpoint of its own
        self.keeps_best = False  # that checkpoint stays
        self.kind = type(config).__name__.removesuffix("Config")  # of run, in a word: PPO, SFT, …
        self._command, self._loggers = command, loggers
        self._tracker: Tracker | None = None
        self._failed: set[str] = set()

    @contextmanager
    def opened(self, step: int, total_steps: int) -> Iterator[None]:
        """Record inside the block, from `step` on (0: a fresh run): metrics, configuration, command line, versions."""
        trainer = self.config.trainer
        _ = self.identity  # digests of the files as they are now, not as they will be at the next checkpoint
        info = RunInfo(
            run_dir=self.run_dir,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            config=self.config.model_dump(mode="json"),
            total_steps=total_steps,
            resume_step=step or None,
        )
        self._diagnosis = Diagnosis(flatten(info.config))
        with Tracker(self._loggers, info) as self._tracker, show_progress():
            path = self.run_dir / METRICS_FILE
            with self.beside("the diagnosis"):
                for earlier, metrics in (read_steps(path) if path.is_file() else {}).items():
                    self._diagnosis.add(earlier, metrics)
            write_atomically(self.run_dir / "config.yaml", dump_yaml(self.config))
            versions = {package: _version(package) for package in ("torch", "transformers", "ray")}
            versions["python"] = platform.python_version()
            facts = {"name": trainer.experiment_name, "command": self._command, "versions": versions, "stopped": None}
            write_run_info(self.run_dir, **facts)
            yield

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one step's metrics and histograms to every logger, and what they diagnose to the console."""
        assert self._tracker is not None, "log() outside opened()"
        keep_locked(self.run_dir, self.say)
        self._tracker.log(step, metrics)
        with self.beside("the diagnosis"):
            for finding in self._diagnosis.add(step, metrics):
                self.say(f"step {step}: {finding.text}; {finding.remedy}")

    say = staticmethod(say)

    @contextmanager
    def beside(self, what: str) -> Iterator[None]:
        """A run does not end because what only describes it fails inside: that is said, once."""
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                say(f"{what} failed, and the run goes on: {type(error).__name__}: {error}")
            self._failed.add(what)

    def save_checkpoint(self, state: dict[str, Any], write_roles: Callable[[Path], None]) -> Path:
        """Write `global_step_N`. With `keep_best` the best one outlives `max_ckpt_to_keep`."""
        keep = {int(self.best["step"])} if self.best and self.keeps_best else set()
        self.best_is_new = False
        state = state | {"best": self.best} | self.identity
        return self.checkpoints.save(self.kind, state, write_roles, keep)

    @cached_property
    def identity(self) -> dict[str, dict[str, Any]]:
        """The `settings` of the run, and `digests` of the files that they name: a resumed run is compared by them."""
        return {"settings": settings_of(self.config), "digests": digests_of(self.config)}

    def finish(self) -> None:
        """Write what belongs to the end of the run."""


class PPORecorder(RunRecorder):
    """Of runs whose policy generates: also samples, the best validation, and the report."""

    config: PPOConfig

    def __init__(self, config: PPOConfig, tokenizer: Any, command: str) -> None:
        loggers = [*config.trainer.logger]
        if config.trainer.report and "file" not in loggers:
            loggers.append("file")  # the report is built from it
        super().__init__(config, command, loggers)
        self.keeps_best = config.trainer.keep_best
        self._tokenizer = tokenizer

    @contextmanager
    def opened(self, step: int, total_steps: int) -> Iterator[None]:
        """Also writes report.html: now and then while the run goes on, and when it ends, however that is."""
        with super().opened(_NO_REWIND if self.config.trainer.val_only else step, total_steps):
            self._next_report = time.monotonic() + _FIRST_REPORT
            try:
                yield
            except BaseException as reason:
                with suppress(Exception):  # the error that ended the run matters, not one of its report
                    keep_locked(self.run_dir, self.say)
                    write_run_info(self.run_dir, stopped=str(reason) or type(reason).__name__)
                    self.finish()
                raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().log(step, metrics)
        began = time.monotonic()
        if self.config.trainer.report and began >= self._next_report:
            with self.beside("the report"):
                build_report(self.run_dir, live=True)
            now = time.monotonic()
            self._next_report = now + max(_REPORT_EVERY, 50 * (now - began))  # at most 2 % of the time

    def samples(self, step: int, batch: Batch) -> None:
        """Write the first `trainer.log_generations` episodes of a training batch with each token's numbers."""
        trainer, scores = self.config.trainer, Episodes(batch).sums(batch["token_level_scores"]).tolist()
        self._write("train", step, batch, scores, trainer.log_generations, trainer.rollout_data_dir)

    def validation(self, step: int, batch: Batch, scores: Sequence[float], value: float | None) -> None:
        """Write samples of a validation pass with the episodes' scores; remember `value` if it is the best so far."""
        trainer = self.config.trainer
        self._write("val", step, batch, scores, trainer.log_val_generations, trainer.validation_data_dir)
        if value is not None and (self.best is None or value > self.best["value"]):
            self.best = {"step": step, "value": value}
            self.best_is_new = self.keeps_best and step > 0

    def finish(self) -> None:
        if self.config.trainer.report:
            self.say(f"report: {build_report(self.run_dir)}")

    def _write(
        self, split: Split, step: int, batch: Batch, scores: Sequence[float], count: int, folder: str | None
    ) -> None:
        """The first `count` episodes as samples, and `trainer.trace_generations` of them for services; with a `folder`
        also every row, with its episode's score, as a line of JSON that `read_rollouts` reads back."""
        rows, traced = Episodes(batch).rows, self.config.trainer.trace_generations
        first = batch.take([row for episode in rows[: max(count, traced)] for row in episode])
        samples = [self._sample(first, *pair) for pair in zip(Episodes(first).rows, scores, strict=False)]
        if traced and samples:
            assert self._tracker is not None, "samples outside opened()"
            self._tracker.trace(step, split, samples[:traced])
        if shown := samples[:count]:
            write_samples(self.run_dir, step, shown, split=split)
            every = self.config.trainer.console_sample_freq
            if split == "train" and every > 0 and (step - 1) % every == 0:
                self.say(sample_line(step, shown[0].prompt, "".join(shown[0].tokens), shown[0].reward))
        if folder is not None:
            row_scores = [score for score, episode in zip(scores, rows, strict=True) for _ in episode]
            file = self.start / Path(folder).expanduser() / f"{step}.jsonl"
            write_rollouts(file, rollout_records(batch, row_scores, step, self._tokenizer))

    def _sample(self, batch: Batch, rows: Sequence[int], reward: float) -> Sample:
        """The episode of these rows."""
        lengths = batch["response_lengths"].tolist()

        def joined(column: str) -> list[Any]:
            return [x for i in rows for x in batch[column][i, : lengths[i]].tolist()]

        mask, first = joined("response_mask"), rows[0]
        numbers = {
            field: [x if is_policys else None for x, is_policys in zip(joined(column), mask, strict=True)]
            for field, column in _PER_TOKEN.items()
            if column in batch
        }
        tokens = [token_strings(batch["responses"][i, : lengths[i]].tolist(), self._tokenizer.decode) for i in rows]
        of_loop: dict[str, Any] = {}
        if "episode" in batch:
            starts = [*accumulate(map(len, tokens))]
            later = [{"at": at, "prompt": self._prompt(batch, i)} for at, i in zip(starts, rows[1:], strict=False)]
            turns = of_loop["turns"] = joined("turn_ids")
            rewards = [*zip(turns, joined("turn_rewards"), strict=True)]
            info = batch.objects["episode_info"][first]
            of_loop["episode"] = {
                "calls": info.get("calls", []),
                **({"compactions": info["compactions"]} if info.get("compactions") else {}),
                "turn_rewards": [
                    sum((reward for at, reward in rewards if at == turn), 0.0)
                    for turn in range(1, max(turns, default=0) + 1)
                ],
                "outcome": batch.objects["outcome"][first],
                "error": batch.objects["episode_error"][first],
                "rows": later,
            }
        return Sample(
            prompt=self._prompt(batch, first),
            tokens=[*chain.from_iterable(tokens)],
            reward=reward,
            mask=[int(m) for m in mask],
            reward_info=batch.objects["reward_info"][first] if "reward_info" in batch else {},
            **{name: batch.objects[name][first] for name in _OBJECTS},
            **numbers,
            **of_loop,
            images=shown_images(batch.objects[IMAGES][first]) if IMAGES in batch else None,
        )

    def _prompt(self, batch: Batch, i: int) -> str:
        text = self._tokenizer.decode(batch["prompts"][i, : int(batch["prompt_lengths"][i])].tolist())
        return _REPEATED.sub(r"\1", text) if IMAGES in batch else text
