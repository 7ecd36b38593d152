"""Loggers of other projects, one small adapter each: Weights & Biases, Trackio, MLflow, SwanLab.

A run that resumes goes on in the same run of the service, whose id lies in the run folder as `<service>_run_id`.
"""

import importlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from valor.errors import UserError
from valor.tracking.loggers import Logger, RunInfo
from valor.tracking.metrics import Histogram

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")


class Service(Logger):
    """A package that not everybody has: `package`, with what to do where it refuses to start."""

    name: str
    advice: str
    _run: Any

    def __init__(self, run: RunInfo) -> None:
        self.package: Any = importlib.import_module(self.name)
        id_file = run.run_dir / f"{self.name}_run_id"
        resumed = run.resume_step is not None and id_file.exists()
        try:
            number = self.start(run, id_file.read_text(encoding="utf-8").strip() if resumed else None)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{self.name} could not start ({reason}): {self.advice}") from error
        id_file.write_text(f"{number}\n", encoding="utf-8")

    def start(self, run: RunInfo, number: str | None) -> str:
        """Begin a run of the service, or go on with the one of this id; its id."""
        raise NotImplementedError

    def _init(self, run: RunInfo, number: str | None, **places: str) -> Any:
        """A run of Weights & Biases or SwanLab."""
        facts = {"project": run.project, "name": run.experiment, "config": dict(run.config)}
        return self.package.init(**facts, **places, id=number, resume="allow" if number else None)

    def close(self) -> None:
        self._run.finish()

    def shown(self, histograms: Mapping[str, Histogram]) -> dict[str, Any]:
        """Histograms as Weights & Biases and Trackio take them."""
        made = self.package.Histogram
        return {k: made(np_histogram=(one.counts, one.edges.tolist())) for k, one in histograms.items()}


class WandbLogger(Service):
    """A Weights & Biases run; WANDB_MODE=offline writes under wandb/ without a network.

    The x-axis is `training/global_step`, because W&B's own counter refuses to go back when a run resumes earlier.
    """

    name = "wandb"
    advice = "run `wandb login`, or set WANDB_MODE=offline"

    def start(self, run: RunInfo, number: str | None) -> str:
        self._run = self._init(run, number, dir=str(run.run_dir))
        self._run.define_metric("*", step_metric="training/global_step")
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self._run.log({**metrics, **self.shown(histograms), "training/global_step": step})


class TrackioLogger(Service):
    """A Trackio run in the local database (`trackio show` opens it; TRACKIO_DIR moves it), or in TRACKIO_SPACE_ID.

    Trackio knows runs by their names: a new run is called after its folder too, and the second of a name by a number.
    """

    name = "trackio"
    advice = "set TRACKIO_DIR to a folder that can be written, or leave 'trackio' out of trainer.logger"

    def start(self, run: RunInfo, number: str | None) -> str:
        name = number or f"{run.experiment}-{run.run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        resume = "must" if number else "never"
        self._run = self.package.init(run.project, name, config=dict(run.config), resume=resume, embed=False)
        return name

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self._run.log({**metrics, **self.shown(histograms)}, step=step)


class MlflowLogger(Service):
    """An MLflow run at MLFLOW_TRACKING_URI, else in mlflow.db of the run folder (`mlflow ui --backend-store-uri`).

    MLflow has no histograms, and does not take the `@` of `mean@8`: it is `mean_8` there.
    """

    name = "mlflow"
    advice = "check MLFLOW_TRACKING_URI"

    def start(self, run: RunInfo, number: str | None) -> str:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.run_dir / 'mlflow.db').resolve()}"
        self._client = self.package.MlflowClient(uri)
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        self._id = number or self._client.create_run(experiment, run_name=run.experiment).info.run_id
        if number is None:
            self._client.log_dict(self._id, dict(run.config), "config.json")
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        now, metric = int(time.time() * 1000), self.package.entities.Metric
        found = [metric(_NOT_IN_MLFLOW.sub("_", key), float(value), now, step) for key, value in metrics.items()]
        for start in range(0, len(found), 1000):  # the most that MLflow takes at once
            self._client.log_batch(self._id, found[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabLogger(Service):
    """A SwanLab run; SWANLAB_MODE=offline (or local) writes under swanlog/ without a network. It has no histograms."""

    name = "swanlab"
    advice = "run `swanlab login`, or set SWANLAB_MODE=offline"

    def start(self, run: RunInfo, number: str | None) -> str:
        self._run = self._init(run, number, log_dir=str(run.run_dir / "swanlog"))
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self.package.log(dict(metrics), step=step)

    def close(self) -> None:
        self.package.finish()
