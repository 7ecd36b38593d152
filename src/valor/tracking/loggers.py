"""Destinations of a step's metrics: console, metrics.jsonl, TensorBoard, services, plug-ins."""

import importlib
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import normpath
from typing import Any

from valor.errors import UserError, did_you_mean
from valor.tracking.console import say, summary_line
from valor.tracking.generations import Sample, Split
from valor.tracking.metrics import Histogram
from valor.tracking.rundir import METRICS_FILE, TENSORBOARD_DIR, rewind
from valor.user_files import load_object

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")


class Logger:
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        raise NotImplementedError

    def trace(self, step: int, split: Split, samples: Sequence[Sample]) -> None:
        """Take a few samples of a step; only services do."""

    def close(self) -> None:
        """Close what is open."""


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

    UserError, before anything is written: a name is unknown or its package is missing.
    """

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        makers = [find_logger(name) for name in dict.fromkeys(names)]
        run.run_dir.mkdir(parents=True, exist_ok=True)
        # Services may refuse (no login), so they start before the run folder's records are touched.
        local = (ConsoleLogger, FileLogger, TensorboardLogger)
        self._loggers = [make(run) for make in makers if make not in local]
        rewind(run.run_dir, run.resume_step)
        self._loggers += [make(run) for make in makers if make in local]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of `step` (numbers, one-element arrays or histograms); on return they are flushed."""
        histograms = {key: value for key, value in metrics.items() if isinstance(value, Histogram)}
        numbers = {key: _number(key, value) for key, value in metrics.items() if key not in histograms}
        self._each(f"step {step}", lambda logger: logger.log(step, numbers, histograms))

    def trace(self, step: int, split: Split, samples: Sequence[Sample]) -> None:
        """Send samples of a step to every logger that takes them."""
        takers = (logger for logger in self._loggers if isinstance(logger, Logger))
        self._each(f"samples of step {step}", lambda logger: logger.trace(step, split, samples), takers)

    def __exit__(self, *exc: object) -> None:
        self._each("the run's end", lambda logger: logger.close())

    def _each(self, subject: str, send: Callable[[Any], None], loggers: Iterable[Any] | None = None) -> None:
        """`send` to each logger. A service whose server fails misses it; errors of other loggers are raised."""
        for logger in self._loggers if loggers is None else loggers:
            try:
                send(logger)
            except Exception as error:
                if not isinstance(logger, Service):
                    raise
                say(f"{logger.name} has not got {subject}, and the run goes on: {_first_line(error)}")


class ConsoleLogger(Logger):
    """Prints `summary_line` of each step, without its histograms; above the progress bars while they are shown."""

    def __init__(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        say(summary_line(step, metrics, self._total_steps))


class FileLogger(Logger):
    """Appends a JSON line per step to metrics.jsonl; a non-finite value becomes null, a histogram an object."""

    def __init__(self, run: RunInfo) -> None:
        self._path = run.run_dir / METRICS_FILE
        self._path.open("a").close()  # where nothing can be written, that is an error before the first step

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        record: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        record |= {key: {"low": h.low, "high": h.high, "counts": h.counts} for key, h in histograms.items()}
        with self._path.open("a", encoding="utf-8") as file:  # for each line: the folder may have been moved away
            file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")


class TensorboardLogger(Logger):
    """Event files under tensorboard/; on resume TensorBoard hides what an earlier process wrote after that step."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(run.run_dir / TENSORBOARD_DIR), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        for key, h in histograms.items():
            centres, edges = (h.edges[:-1] + h.edges[1:]) / 2, h.edges[1:].tolist()
            number, total, squares = (float(centres**power @ h.counts) for power in (0, 1, 2))
            self._writer.add_histogram_raw(key, h.low, h.high, number, total, squares, edges, h.counts, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Service(Logger):
    """A logger of an optional package: its name, and what to do when it refuses to start.

    A resumed run continues the same run of the service, whose id is stored in the run folder as `<name>_run_id`.
    """

    name: str
    advice: str
    folder_option, folder = "dir", ""  # an argument of the service's `init`, and the folder inside the run's
    run: Any

    def __init__(self, run: RunInfo) -> None:
        self.package: Any = importlib.import_module(self.name)
        id_file = run.run_dir / f"{self.name}_run_id"
        resumed = run.resume_step is not None and id_file.exists()
        try:
            number = self.start(run, id_file.read_text(encoding="utf-8").strip() if resumed else None)
        except Exception as error:
            raise UserError(f"{self.name} could not start ({_first_line(error)}): {self.advice}") from error
        id_file.write_text(f"{number}\n", encoding="utf-8")

    def start(self, run: RunInfo, number: str | None) -> str:
        """Begin a run of the service, or continue the one with this id; its id."""
        folder = {self.folder_option: str(run.run_dir / self.folder)}
        facts = {"project": run.project, "name": run.experiment, "config": dict(run.config)}
        self.run = self.package.init(**facts, **folder, id=number, resume="allow" if number else None)
        return self.run.id

    def histograms(self, histograms: Mapping[str, Histogram]) -> dict[str, Any]:
        """Histograms as Weights & Biases and Trackio take them."""
        make = self.package.Histogram
        return {key: make(np_histogram=(h.counts, h.edges.tolist())) for key, h in histograms.items()}

    def close(self) -> None:
        self.run.finish()


class WandbLogger(Service):
    """A Weights & Biases run; WANDB_MODE=offline writes under wandb/ without a network.

    The x-axis is `training/global_step`: W&B's own counter refuses to go back when a run resumes earlier.
    """

    name = "wandb"
    advice = "run `wandb login`, or set WANDB_MODE=offline"

    def start(self, run: RunInfo, number: str | None) -> str:
        number = super().start(run, number)
        self.run.define_metric("*", step_metric="training/global_step")
        return number

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self.run.log({**metrics, **self.histograms(histograms), "training/global_step": step})

    def trace(self, step: int, split: Split, samples: Sequence[Sample]) -> None:
        """A table a step."""
        rows = [sample_row(step, sample) for sample in samples]
        table = self.package.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        self.run.log({f"samples/{split}": table, "training/global_step": step})


class SwanlabLogger(Service):
    """A SwanLab run; SWANLAB_MODE=offline (or local) writes under swanlog/ without a network. It has no histograms."""

    name = "swanlab"
    advice = "run `swanlab login`, or set SWANLAB_MODE=offline"
    folder_option, folder = "log_dir", "swanlog"

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self.package.log(dict(metrics), step=step)

    def trace(self, step: int, split: Split, samples: Sequence[Sample]) -> None:
        """Texts, one a sample."""
        texts = [self.package.Text(json.dumps(sample_row(step, one), ensure_ascii=False, indent=1)) for one in samples]
        self.package.log({f"samples/{split}": texts}, step=step)

    def close(self) -> None:
        self.package.finish()


class TrackioLogger(Service):
    """A Trackio run in the local database (`trackio show` opens it; TRACKIO_DIR moves it), or in TRACKIO_SPACE_ID.

    Trackio knows runs by their names, so the name of a new run has its folder and the time in it.
    """

    name = "trackio"
    advice = "set TRACKIO_DIR to a folder that can be written, or leave 'trackio' out of trainer.logger"

    def start(self, run: RunInfo, number: str | None) -> str:
        name = number or f"{run.experiment}-{run.run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        resume = "must" if number else "never"
        self.run = self.package.init(run.project, name, config=dict(run.config), resume=resume, embed=False)
        return name

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self.run.log({**metrics, **self.histograms(histograms)}, step=step)

    def trace(self, step: int, split: Split, samples: Sequence[Sample]) -> None:
        """A trace a sample: question and answer as messages, the other facts as its metadata."""
        for i, sample in enumerate(samples):
            facts = sample_row(step, sample)
            said = [{"role": "user", "content": facts.pop("prompt")}]
            said.append({"role": "assistant", "content": facts.pop("response")})
            self.run.log({f"samples/{split}/{i}": self.package.Trace(messages=said, metadata=facts)}, step=step)


class MlflowLogger(Service):
    """An MLflow run at MLFLOW_TRACKING_URI, else in mlflow.db of the run folder (`mlflow ui --backend-store-uri`).

    MLflow has no histograms, and names without `@` and empty parts: `val//data/x/mean@8` becomes `val/data/x/mean_8`.
    """

    name = "mlflow"
    advice = "check MLFLOW_TRACKING_URI"

    def start(self, run: RunInfo, number: str | None) -> str:
        local = f"sqlite:///{(run.run_dir / 'mlflow.db').resolve()}"
        self.package.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or local)
        self.package.set_experiment(run.project)
        self.run = self.package.start_run(run_id=number, run_name=run.experiment)
        if number is None:
            self.package.log_dict(dict(run.config), "config.json")
        return self.run.info.run_id

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        values = {normpath(_NOT_IN_MLFLOW.sub("_", key)): float(value) for key, value in metrics.items()}
        self.package.log_metrics(values, step=step)

    def trace(self, step: int, split: Split, samples: Sequence[Sample]) -> None:
        """An artifact a step, which MLflow shows as a table."""
        rows = [sample_row(step, sample) for sample in samples]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self.package.log_table(columns, artifact_file=f"samples/{split}_{step}.json")

    def close(self) -> None:
        self.package.end_run()


LOGGERS: dict[str, Callable[[RunInfo], Logger]] = {
    "console": ConsoleLogger,
    "file": FileLogger,
    "tensorboard": TensorboardLogger,
    **{logger.name: logger for logger in (WandbLogger, TrackioLogger, MlflowLogger, SwanlabLogger)},
}
"""The names of `trainer.logger`."""


def sample_row(step: int, sample: Sample) -> dict[str, Any]:
    """Step, prompt, response, reward and ground truth, and as one JSON text each token with its value (null: none)."""
    values = sample.values or [None] * len(sample.tokens)
    tokens = [[text, value and float(f"{value:.4g}")] for text, value in zip(sample.tokens, values, strict=True)]
    texts = {"prompt": sample.prompt, "response": "".join(sample.tokens)}
    truth = "" if sample.ground_truth is None else str(sample.ground_truth)
    last = next((value for value in reversed(values) if value is not None), None)
    numbers = {"reward": float(sample.reward), "last_value": last}
    return {"step": step, **texts, **numbers, "ground_truth": truth, "values": json.dumps(tokens, ensure_ascii=False)}


def find_logger(name: str) -> Callable[[RunInfo], Logger]:
    """What makes the logger `name` of `trainer.logger`: one of LOGGERS, or `file.py:Name` or `package.module:Name`.

    UserError: there is none, or its package is not installed.
    """
    logger = LOGGERS.get(name)
    if isinstance(logger, type) and issubclass(logger, Service):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: merely a folder of that name
            raise UserError(
                f"trainer.logger: '{name}' needs a package that is not installed: pip install 'valor-rl[{name}]', or "
                f"leave '{name}' out"
            )
    if logger is None and not {":", "."} & {*name}:
        hint = did_you_mean(name, LOGGERS) or f"; there are {', '.join(LOGGERS)}, and package.module:Name"
        raise UserError(f"trainer.logger: no logger is called {name!r}{hint}")
    return logger or load_object(name, "trainer.logger")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _number(key: str, value: Any) -> float | int:
    """A Python number; ValueError naming the key if `value` is not one number."""
    if hasattr(value, "item"):  # NumPy scalars, one-element arrays and tensors
        value = value.item()
    if not isinstance(value, int | float):
        raise ValueError(f"metric {key!r} is not a number: {value!r}")
    return int(value) if isinstance(value, bool) else value
