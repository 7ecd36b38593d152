"""Where a step's metrics go: console, metrics.jsonl, TensorBoard, Weights & Biases; one `Tracker` writes to all."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valor.errors import UserError, did_you_mean
from valor.tracking.console import say, summary_line
from valor.tracking.metrics import Histogram
from valor.tracking.rundir import METRICS_FILE, TENSORBOARD_DIR, rewind


class Logger(ABC):
    """One destination of metrics."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None: ...

    def close(self) -> None:  # noqa: B027  # most hold something open
        """Let go of what is held open."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run for the loggers; resume_step: last step of the loaded checkpoint, None for a new run."""

    run_dir: Path
    project: str = "valor"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    resume_step: int | None = None


class Tracker:
    """Sends each step's metrics to every named logger; first removes records of steps after `resume_step`.

    UserError, before anything is written: a name is unknown or its package is missing. A context manager.
    """

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        check_loggers(names)
        run.run_dir.mkdir(parents=True, exist_ok=True)
        # W&B may refuse (no login), so it comes before the run folder's records are touched.
        self._loggers = [LOGGERS[name](run) for name in dict.fromkeys(names) if name == "wandb"]
        rewind(run.run_dir, run.resume_step)
        self._loggers += [LOGGERS[name](run) for name in dict.fromkeys(names) if name != "wandb"]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of `step` (numbers, one-element arrays or histograms); on return they are flushed."""
        histograms = {key: value for key, value in metrics.items() if isinstance(value, Histogram)}
        plain = {key: _plain_number(key, value) for key, value in metrics.items() if key not in histograms}
        for logger in self._loggers:
            logger.log(step, plain, histograms)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        for logger in self._loggers:
            logger.close()


class ConsoleLogger(Logger):
    """Prints `summary_line` of each step, without its histograms; above the progress bars while they are shown."""

    def __init__(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        say(summary_line(step, metrics, self._total_steps))


class FileLogger(Logger):
    """Appends a JSON line per step to metrics.jsonl; a non-finite value becomes null, a histogram an object."""

    def __init__(self, run: RunInfo) -> None:
        self._file = (run.run_dir / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        record: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        record |= {key: {"low": one.low, "high": one.high, "counts": one.counts} for key, one in histograms.items()}
        self._file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorboardLogger(Logger):
    """Event files under tensorboard/; on resume TensorBoard hides what an earlier process wrote after that step."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(run.run_dir / TENSORBOARD_DIR), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        for key, one in histograms.items():
            self._writer.add_histogram_raw(
                key,
                min=one.low,
                max=one.high,
                num=sum(one.counts),
                sum=float(one.centres @ one.counts),
                sum_squares=float(one.centres**2 @ one.counts),
                bucket_limits=one.edges[1:].tolist(),
                bucket_counts=one.counts,
                global_step=step,
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """A Weights & Biases run, continued on resume; WANDB_MODE=offline writes under wandb/ without a network.

    The x-axis is `training/global_step`, because W&B's own counter refuses to go back when a run resumes earlier.
    """

    def __init__(self, run: RunInfo) -> None:
        wandb = importlib.import_module("wandb")  # an optional package, which a type checker need not find
        id_file = run.run_dir / "wandb_run_id"
        resumed = run.resume_step is not None and id_file.exists()
        try:
            self._run = wandb.init(
                project=run.project,
                name=run.experiment,
                config=dict(run.config),
                dir=str(run.run_dir),
                id=id_file.read_text(encoding="utf-8").strip() if resumed else None,
                resume="allow" if resumed else None,
            )
        except wandb.Error as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"wandb could not start ({reason}): run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        id_file.write_text(self._run.id + "\n", encoding="utf-8")
        self._histogram = wandb.Histogram
        self._run.define_metric("*", step_metric="training/global_step")

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        shown = {key: self._histogram(np_histogram=(one.counts, one.edges.tolist())) for key, one in histograms.items()}
        self._run.log({**metrics, **shown, "training/global_step": step})

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[[RunInfo], Logger]] = {
    "console": ConsoleLogger,
    "file": FileLogger,
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
}


def check_loggers(names: Sequence[str]) -> None:
    """UserError if a name in `trainer.logger` is unknown, or its package is not installed."""
    for name in names:
        if name not in LOGGERS:
            hint = did_you_mean(name, LOGGERS) or f"; there are {', '.join(LOGGERS)}"
            raise UserError(f"trainer.logger: no logger is called {name!r}{hint}")
    spec = importlib.util.find_spec("wandb") if "wandb" in names else None
    if "wandb" in names and (spec is None or spec.origin is None):  # no origin: merely a folder of that name
        raise UserError(
            "trainer.logger: 'wandb' needs a package that is not installed: pip install 'valor-rl[wandb]', or leave "
            "'wandb' out"
        )


def _plain_number(key: str, value: Any) -> float | int:
    """A Python number; ValueError naming the key if `value` is not one number."""
    if hasattr(value, "item"):  # NumPy scalars, one-element arrays and tensors
        value = value.item()
    if not isinstance(value, int | float):
        raise ValueError(f"metric {key!r} is not a number: {value!r}")
    return int(value) if isinstance(value, bool) else value
