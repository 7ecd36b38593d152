"""Where a step's metrics go: console, metrics.jsonl, TensorBoard, services, plug-ins; one `Tracker` writes to all."""

import importlib.util
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from valor.errors import UserError, did_you_mean
from valor.tracking.console import say, summary_line
from valor.tracking.metrics import Histogram
from valor.tracking.rundir import METRICS_FILE, TENSORBOARD_DIR, rewind
from valor.user_files import load_object


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


class Tracker(AbstractContextManager["Tracker"]):
    """Sends each step's metrics to every named logger; first removes records of steps after `resume_step`.

    UserError, before anything is written: a name is unknown or its package is missing. A context manager.
    """

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        makers = [find_logger(name) for name in dict.fromkeys(names)]
        run.run_dir.mkdir(parents=True, exist_ok=True)
        # Services may refuse (no login), so they come before the run folder's records are touched.
        ours = (ConsoleLogger, FileLogger, TensorboardLogger)
        self._loggers = [make(run) for make in makers if make not in ours]
        rewind(run.run_dir, run.resume_step)
        self._loggers += [make(run) for make in makers if make in ours]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of `step` (numbers, one-element arrays or histograms); on return they are flushed."""
        histograms = {key: value for key, value in metrics.items() if isinstance(value, Histogram)}
        plain = {key: _plain_number(key, value) for key, value in metrics.items() if key not in histograms}
        for logger in self._loggers:
            logger.log(step, plain, histograms)

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
            number, total, squares = (float(one.centres**power @ one.counts) for power in (0, 1, 2))
            edges = one.edges[1:].tolist()
            self._writer.add_histogram_raw(key, one.low, one.high, number, total, squares, edges, one.counts, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


LOGGERS: dict[str, Callable[[RunInfo], Logger] | str] = {
    "console": ConsoleLogger,
    "file": FileLogger,
    "tensorboard": TensorboardLogger,
    "wandb": "valor.tracking.services:WandbLogger",
    "trackio": "valor.tracking.services:TrackioLogger",
    "mlflow": "valor.tracking.services:MlflowLogger",
    "swanlab": "valor.tracking.services:SwanlabLogger",
}
"""What a name in `trainer.logger` stands for. Other packages add theirs by an entry point in the group of this name."""

ENTRY_POINTS = "valor.loggers"


def find_logger(name: str) -> Callable[[RunInfo], Logger]:
    """What makes the logger that `trainer.logger` calls `name`: one of LOGGERS, an entry point of another package, or
    `file.py:Name` or `package.module:Name`. UserError: there is none, or its package is not installed."""
    made = LOGGERS.get(name)
    if isinstance(made, str):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: merely a folder of that name
            raise UserError(
                f"trainer.logger: '{name}' needs a package that is not installed: pip install 'valor-rl[{name}]', or "
                f"leave '{name}' out"
            )
    if made is None:
        plugged = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
        made = plugged.get(name, name)
        if made is name and not {":", "."} & {*name}:
            known = [*LOGGERS, *plugged]
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}, and package.module:Name"
            raise UserError(f"trainer.logger: no logger is called {name!r}{hint}")
    return load_object(made, "trainer.logger") if isinstance(made, str) else made


def _plain_number(key: str, value: Any) -> float | int:
    """A Python number; ValueError naming the key if `value` is not one number."""
    if hasattr(value, "item"):  # NumPy scalars, one-element arrays and tensors
        value = value.item()
    if not isinstance(value, int | float):
        raise ValueError(f"metric {key!r} is not a number: {value!r}")
    return int(value) if isinstance(value, bool) else value
