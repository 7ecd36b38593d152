"""The loop that every training run shares: start, resume, take steps, log, save, stop, export."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

from valor.config import PPOConfig, SupervisedConfig
from valor.controller.group import Pools
from valor.controller.placement import MAIN, Placement
from valor.data.sampler import PromptSampler
from valor.engines.checkpoint import MODEL_CONFIG_DIR
from valor.errors import Diverged, UserError
from valor.models.export import write_tokenizer
from valor.tracking.console import format_seconds
from valor.tracking.metrics import Histogram, Timer
from valor.tracking.progress import phase, report_progress
from valor.tracking.rundir import disk_errors, keep_locked, locked, write_run_info
from valor.trainer.changes import changes
from valor.trainer.checkpoints import Checkpoint, open_checkpoint
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.recorder import RunRecorder
from valor.trainer.signals import StopRequest

_SHOWN_CHANGES = 4  # in the one line of a refusal
_MUCH_SPACE = 1e9  # bytes
_SETTLE_SECONDS = 30.0  # for processes to end the call in which one of them has failed

Steps = Generator[dict[str, Any], None, int]
"""A run in progress: yields what is measured before the first step, then each step's metrics; returns the exit code."""


class Run(ABC):
    """A loop of training steps, with checkpoints, exact resume, validation, logging, signals and export.

    A subclass defines the roles (`start`), a step (`train_step`) and validation (`validate`), and sets no later than in
    `start`: `trained_roles`, whose weights are saved and exported, `sampler` and `total_steps`. `steps` runs it.
    Nothing is written before `steps` begins.
    """

    title: ClassVar[str] = "training"
    placement: Placement
    roles: Pools
    trained_roles: Sequence[str]
    sampler: PromptSampler
    total_steps: int

    def __init__(self, config: PPOConfig | SupervisedConfig, tokenizer: Any, record: RunRecorder) -> None:
        self.config, self.tokenizer, self.record = config, tokenizer, record
        self.step = 0
        self.skips = SkippedUpdates(config.trainer.max_skipped_updates, record.say)
        self.resume_from: Path | None = None  # a checkpoint, whatever trainer.resume_mode says
        self.stop = StopRequest(at_once=True)
        self._save_is_due = self._is_sampled_anew = self._is_measured_anew = False
        self._began = False  # whether there was a first step
        self._unsaved: dict[str, Any] | None = None  # the driver's state after the last complete step
        self._unmeasured: dict[str, Any] | None = None  # its metrics, where the run had ended before it was validated

    @abstractmethod
    def start(self, stack: ExitStack, *, resuming: bool) -> Pools:
        """Start the roles' processes. `stack` gets what has to be closed when the run ends, the processes included."""

    @abstractmethod
    def train_step(self) -> dict[str, Any]:
        """Train on one batch, as step `self.step`; returns the step's metrics."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the present weights on the validation data; empty without such data."""

    def fit(self) -> int:
        """All of `steps`; the exit code."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def steps(self) -> Steps:
        """Run to the last step. The exit code is 0, or 128 + n when signal n asked to stop (progress is saved).

        UserError: another run uses the folder, it cannot be written, its checkpoints are damaged or of another run.
        Diverged: the weights are lost; the last good checkpoint is not. Any exception that ends the run between its
        first and last step saves the last complete step, if possible, and gets a note that says how to go on.
        """
        try:
            with disk_errors(self.record.run_dir), locked(self.record.run_dir, self.record.say):
                return (yield from self._steps())
        except Diverged as reason:
            last_good = self.record.checkpoints.last_good
            raise Diverged(f"{reason}. That was in step {self.step}; {last_good}") from reason
        except (Exception, KeyboardInterrupt) as reason:
            way_on = self.record.checkpoints.way_on(self.config.trainer.resume_mode)
            if self._began and way_on not in str(reason):
                reason.add_note(way_on)
            raise

    def _steps(self) -> Steps:
        with ExitStack() as stack:
            stop = stack.enter_context(self.stop)
            checkpoint = self._find_checkpoint()
            with phase("processes and models"):
                self.roles = self.start(stack, resuming=checkpoint is not None)
            stop.raise_again()
            if checkpoint is not None:
                self.resume(checkpoint)
            if not self.finished:
                self.record.checkpoints.check_space(self._checkpoint_bytes())
                self._say_space()
            stack.enter_context(self.record.opened(self.step, self.total_steps))
            pool = self.placement.pools[MAIN]
            write_run_info(self.record.run_dir, threads=pool.num_threads)
            if pool.threads_note:
                self.record.say(pool.threads_note)
            stack.enter_context(phase(self.title, self.total_steps, unit="step"))
            report_progress(self.step)
            metrics = self.before_steps()
            stop.raise_again()
            yield metrics
            stopping = False
            while self._unmeasured or not (self.finished or stopping):
                stop.at_once = False
                with self._saved_at_an_early_end():
                    metrics, self._unmeasured = self._unmeasured or self._next_step(), None
                    report_progress(self.step)
                    if self.validates_now():
                        metrics |= self.validate()
                    # Logged before it is saved: a run killed in between repeats the step, and its line with it.
                    self.log(metrics)
                    self._unsaved = self._unsaved and self._unsaved | {"unmeasured": None}
                    stopping = stop.signum is not None  # read once: a later signal belongs to the next step
                    if self.finished or stopping or self.record.best_is_new or self.save_is_due():
                        self.save()
                        stopping = stop.signum is not None  # while it saved: there is nothing to finish
                    yield metrics
            stop.at_once = False
            self.after_steps()
            self.record.finish()
            if not self.finished:
                way_on = self.record.checkpoints.way_on(self.config.trainer.resume_mode)
                self.record.say(f"stopped after step {self.step} of {self.total_steps}: {way_on}")
            return 0 if stop.signum is None else 128 + stop.signum

    def _next_step(self) -> dict[str, Any]:
        # Copies: samplers and phases of the user's own may give what the next step changes in place.
        self._began, self._unsaved, self.skips.updating = True, deepcopy(self.state_dict()), False
        self.step += 1
        metrics = self.train_step()
        unmeasured = {
            name: vars(value) if isinstance(value, Histogram) else value
            for name, value in metrics.items()
            if isinstance(value, int | float | Histogram)
        }
        self._unsaved, self.skips.updating = deepcopy(self.state_dict()) | {"unmeasured": unmeasured}, False
        return metrics

    @contextmanager
    def _saved_at_an_early_end(self) -> Iterator[None]:
        """Saves the last complete step, if not saved yet, when anything but a loss of the weights ends the block."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as reason:
            state, last = self._unsaved, self.record.checkpoints.last
            # Skipped updates leave the weights as they were: better than nothing where there is no checkpoint.
            keeps = not isinstance(reason, Diverged) or (last is None and self.skips.all_skipped)
            if state is not None and keeps and state["step"] > (last.step if last else 0):
                self._save_early(state)
            raise

    def _save_early(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if self.skips.updating:
            state = state | {"part_of_next_step": True}
            self.record.say(f"the weights have a part of the updates of step {self.step + 1}, which had begun")
        try:
            if not all(self.roles[role].group.settled(_SETTLE_SECONDS) for role in self.trained_roles):
                raise TimeoutError("its processes are waiting for one that has failed")
            self.save(state)
        except Exception as error:
            self.record.say(f"step {self.step} could not be saved: {error}")

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    def due(self, every: int) -> bool:
        """Whether an action repeated every `every` steps (0 or less: never) is due after this one."""
        return every > 0 and self.step % every == 0

    def save_is_due(self) -> bool:
        """After every `trainer.save_freq` steps; put off while updates are skipped, since the weights may be why."""
        self._save_is_due |= self.due(self.config.trainer.save_freq)
        return self._save_is_due and not any(self.skips.in_a_row.values())

    def validates_now(self) -> bool:
        """After the last step, and every `trainer.test_freq` steps."""
        return self.finished or self.due(self.config.trainer.test_freq)

    def before_steps(self) -> dict[str, Any]:
        """Called once before the first step of this process; returns what it measures."""
        return {}

    def after_steps(self) -> None:
        """Called once at the end. A run that has taken all its steps exports its models."""
        if self.finished:
            for role in self.trained_roles:
                self.record.say(f"{role} exported: {self.write_model(role)}")

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.record.log(self.step, metrics)

    def save(self, state: dict[str, Any] | None = None) -> None:
        """Write a complete checkpoint. `state`: of the driver; default: its present one."""
        timer, self._unsaved, self.stop.saving = Timer(), None, True
        keep_locked(self.record.run_dir, self.record.say)
        self.record.checkpoints.check_space(self._checkpoint_bytes())
        with timer("save"), phase("checkpoint"):
            folder = self.record.save_checkpoint(state or self.state_dict(), self._write_roles)
        self._save_is_due = self.stop.saving = False
        self.record.say(f"saved {folder} in {format_seconds(timer.seconds['save'])}")

    def resume(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizers and the driver's state."""
        for role in self.trained_roles:
            if not (checkpoint.folder / role).is_dir():
                raise UserError(f"'{checkpoint.folder}' holds no {role}: resume from one of a run that trained it")
            self.roles[role].load(checkpoint.folder / role)
        self.load_state_dict(checkpoint.state)
        self.record.best = None if self._is_measured_anew else checkpoint.state["best"]
        unmeasured = checkpoint.state.get("unmeasured") or {}
        self._unmeasured = {k: Histogram(**v) if isinstance(v, dict) else v for k, v in unmeasured.items()}
        how = ", with a part of the next step's updates" if checkpoint.state.get("part_of_next_step") else ""
        if self.finished:
            how = ", its last: nothing is left to train (raise trainer.total_training_steps or total_epochs to go on)"
        self.record.say(f"resumed from {checkpoint.folder} after step {self.step}{how}")

    def _find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from. UserError: it is not of this run."""
        trainer, store = self.config.trainer, self.record.checkpoints
        if self.resume_from is not None:
            checkpoint = store.last = open_checkpoint(self.resume_from)
        else:
            checkpoint = store.find(trainer.resume_mode, trainer.resume_from_path, self.record.say)
        if checkpoint is not None:
            self._check_unchanged(checkpoint)
        return checkpoint

    def _check_unchanged(self, checkpoint: Checkpoint) -> None:
        """Say how this run differs from that of the checkpoint. UserError: it would not compute the same."""
        if checkpoint.kind != self.record.kind:
            raise UserError(
                f"'{checkpoint.folder}' is a checkpoint of a {checkpoint.kind} run, this is a {self.record.kind} run: "
                "choose another folder with trainer.default_local_dir"
            )
        differences = list(changes(type(self.config), checkpoint.state, self.record.identity))
        inexact = [change.line for change in differences if not change.exact]
        if inexact and self.config.trainer.resume_changed != "allow":
            more = f"; and {len(inexact) - _SHOWN_CHANGES} more" if len(inexact) > _SHOWN_CHANGES else ""
            raise UserError(
                f"this is not the run of '{checkpoint.folder}' ({'; '.join(inexact[:_SHOWN_CHANGES])}{more}): take "
                "that back, go on in spite of it with trainer.resume_changed=allow, or start afresh with "
                "trainer.resume_mode=disable"
            )
        self._is_sampled_anew = any(change.of_samples for change in differences)
        self._is_measured_anew = any(change.of_validation for change in differences)
        for change in differences:
            self.record.say(f"changed since {checkpoint.folder.name}: {change.line}")

    def _say_space(self) -> None:
        """How much of the disk the run's checkpoints will take, where that is much."""
        trainer, size = self.config.trainer, self._checkpoint_bytes()
        count = 1 + ((self.total_steps - 1) // trainer.save_freq if trainer.save_freq > 0 else 0)
        count = min(count, trainer.max_ckpt_to_keep or count)
        if size * count >= _MUCH_SPACE:
            each, free = size / 1e9, shutil.disk_usage(self.record.run_dir).free / 1e9
            self.record.say(
                f"disk: {count} x {each:.1f} GB of checkpoints (trainer.save_freq, trainer.max_ckpt_to_keep) and the "
                f"exported models, {free:.0f} GB are free"
            )

    def _checkpoint_bytes(self) -> int:
        return sum(self.roles[role].checkpoint_bytes() for role in self.trained_roles)

    def state_dict(self) -> dict[str, Any]:
        """The driver's state besides the models, as JSON."""
        return {"step": self.step, "sampler": self.sampler.state_dict(), "skipped_in_a_row": {**self.skips.in_a_row}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.skips.in_a_row = state["step"], dict(state["skipped_in_a_row"])
        self.sampler.load_state_dict(state["sampler"])

    def write_model(self, role: str, folder: Path | None = None) -> Path:
        """Export a role as a Hugging Face directory, by default in the run's folder; returns the directory."""
        folder = folder or self.record.run_dir / "huggingface" / role
        self.roles[role].export(folder)
        self._complete(folder)
        return folder

    def _complete(self, folder: Path) -> None:
        """Write what belongs to a model's directory beside its weights."""
        write_tokenizer(self.tokenizer, folder)

    def _write_roles(self, folder: Path) -> None:
        for role in self.trained_roles:
            self.roles[role].save(folder / role)
            plain = folder / role / MODEL_CONFIG_DIR
            if any(plain.glob("*.safetensors")):  # hf_model, whose weights the role has written
                self._complete(plain)
        self.tokenizer.save_pretrained(folder / TOKENIZER_DIR)


class SkippedUpdates:
    """Counts each role's optimizer steps without effect (non-finite gradients), and stops a run that only skips.

    `in_a_row` is part of a checkpoint. `updating`: whether an update of the present step has begun.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self.in_a_row: dict[str, int] = {}
        self.updating = False

    @property
    def all_skipped(self) -> bool:
        return max(self.in_a_row.values(), default=0) >= self._limit

    def count(self, role: str, skipped: bool, step: int) -> None:
        """Count one update. Diverged: it is the `limit`-th skipped one in a row."""
        skips = self.in_a_row[role] = self.in_a_row.get(role, 0) + 1 if skipped else 0
        if skips:
            self._say(f"step {step}: non-finite gradient in the {role}, update skipped ({skips} in a row)")
        if skips >= self._limit:
            raise Diverged(
                f"{skips} updates in a row had non-finite gradients ({role}): lower the learning rate, or check the "
                "rewards for NaN"
            )
