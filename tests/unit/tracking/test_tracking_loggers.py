"""Loggers: the file format, resume, TensorBoard, Weights & Biases, the console lines, and user mistakes."""

import errno
import importlib.util
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import types
import typing

import numpy as np
import pytest
import torch

from valor.errors import UserError
from valor.tracking import loggers
from valor.tracking.console import format_seconds, summary_line
from valor.tracking.loggers import Logger, RunInfo, Tracker, find_logger
from valor.tracking.metrics import Histogram, histogram
from valor.tracking.rundir import read_run_info, rewind, samples_file, write_run_info

SPREAD = Histogram(low=0.0, high=1.0, counts=[1, 2])
STEP = {
    "critic/score/mean": 0.534,
    "critic/rewards/mean": 0.52,
    "actor/kl_loss": 0.00123,
    "critic/vf_explained_var": 0.63,
    "response_length/mean": 213.7,
    "response_length/clip_ratio": 0.031,
    "timing_s/step": 18.4,
    "perf/throughput": 1240.2,
}


def records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_file_holds_exact_numbers_flushed_per_step(tmp_path):
    with Tracker(["file"], RunInfo(tmp_path)) as tracker:
        tracker.log(1, {"loss": 0.1 + 0.2, "count": 3, "skipped": True, "np": np.float32(0.5), "t": torch.tensor(2.0)})
        assert records(tmp_path) == [{"step": 1, "loss": 0.1 + 0.2, "count": 3, "skipped": 1, "np": 0.5, "t": 2.0}]
        tracker.log(2, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf})
    assert records(tmp_path)[1] == {"step": 2, "loss": None, "grad_norm": None, "low": None}


@pytest.mark.parametrize("bad", ["0.5", None, [1.0, 2.0]])
def test_a_metric_that_is_no_number_is_named(tmp_path, bad):
    with Tracker([], RunInfo(tmp_path)) as tracker, pytest.raises(ValueError, match="'actor/pg_loss' is not a number"):
        tracker.log(1, {"actor/pg_loss": bad})


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    with Tracker(["file"], RunInfo(tmp_path)) as tracker:
        for step in range(6):
            tracker.log(step, {"loss": float(step)})
            samples_file(tmp_path, step).parent.mkdir(exist_ok=True)
            samples_file(tmp_path, step).write_text("{}\n")
    samples_file(tmp_path, 5, "val").write_text("{}\n")
    (tmp_path / "samples" / "notes.jsonl").write_text("the user's own\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with Tracker(["file"], RunInfo(tmp_path, resume_step=3)) as tracker:
        tracker.log(4, {"loss": 40.0})
    assert [(one["step"], one["loss"]) for one in records(tmp_path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    left = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert left == ["notes.jsonl", "step_0.jsonl", "step_1.jsonl", "step_2.jsonl", "step_3.jsonl"]


def test_a_fresh_run_sets_the_records_of_earlier_ones_aside(tmp_path):
    for run in range(3):
        with Tracker(["file"], RunInfo(tmp_path)) as tracker:
            tracker.log(1, {"run": run})
    assert records(tmp_path) == [{"step": 1, "run": 2}]
    assert records(tmp_path / "previous" / "1") == [{"step": 1, "run": 0}]
    assert records(tmp_path / "previous" / "2") == [{"step": 1, "run": 1}]


def test_rewind_of_an_empty_folder_does_nothing(tmp_path):
    rewind(tmp_path, 3)
    rewind(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_run_info_merges(tmp_path):
    assert read_run_info(tmp_path) == {}
    write_run_info(tmp_path, command="valor ppo", status="running")
    write_run_info(tmp_path, status="finished")
    assert read_run_info(tmp_path) == {"command": "valor ppo", "status": "finished"}


def test_unknown_logger_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"no logger is called 'tensorbord'; did you mean tensorboard\?"):
        Tracker(["file", "tensorbord"], RunInfo(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("spec", [None, types.SimpleNamespace(origin=None)], ids=["absent", "a folder wandb/"])
def test_missing_package_names_the_extra(monkeypatch, spec):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"pip install 'valor-rl\[wandb\]'"):
        find_logger("wandb")


def test_tensorboard_events_read_back_and_resume_purges(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(["tensorboard"], RunInfo(tmp_path)) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"actor/pg_loss": step / 10, "critic/values/histogram": SPREAD})
    with Tracker(["tensorboard"], RunInfo(tmp_path, resume_step=1)) as tracker:
        tracker.log(2, {"actor/pg_loss": 7.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    assert [(one.step, round(one.value, 6)) for one in events.Scalars("actor/pg_loss")] == [(1, 0.1), (2, 7.0)]
    [spread] = [one.histogram_value for one in events.Histograms("critic/values/histogram")]
    assert (spread.bucket_limit, spread.bucket, spread.num, spread.sum) == ([0.5, 1.0], [1.0, 2.0], 3, 1.75)


def test_a_histogram_counts_what_the_mask_lets_through():
    array, mask = np.array([[0.0, 0.75, 1.0], [9.0, np.nan, 1.0]]), np.array([[1, 1, 1], [0, 1, 0]])
    assert histogram(array, mask, bins=2) == SPREAD
    assert histogram(torch.tensor(array), torch.tensor(mask), bins=2) == SPREAD
    assert histogram(array, mask * 0) is None
    assert histogram(np.full(5, 0.25), np.ones(5)) == Histogram(0.25, 0.25, [5])


def test_the_file_keeps_histograms_as_objects(tmp_path):
    with Tracker(["file"], RunInfo(tmp_path)) as tracker:
        tracker.log(1, {"loss": 1.0, "critic/values/histogram": SPREAD})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    spread = {"low": 0.0, "high": 1.0, "counts": [1, 2]}
    assert json.loads(line) == {"step": 1, "loss": 1.0, "critic/values/histogram": spread}


class FakeWandb(types.ModuleType):
    """The few calls we make of wandb; `inits` holds the arguments of init."""

    class Error(Exception):
        pass

    def __init__(self, refuse: str = "") -> None:
        super().__init__("wandb")
        self.refuse, self.inits, self.logged = refuse, [], []
        self.Histogram = lambda np_histogram: ("histogram", np_histogram)

    def init(self, **arguments):
        if self.refuse:
            raise self.Error(self.refuse)
        self.inits.append(arguments)
        return types.SimpleNamespace(
            id=arguments["id"] or "abc123",
            define_metric=lambda *args, **kwargs: None,
            log=self.logged.append,
            finish=lambda: None,
        )


def use_wandb(monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=name))


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    fake = FakeWandb()
    use_wandb(monkeypatch, fake)
    info = {"project": "p", "experiment": "e", "config": {"a": 1}}
    for resume_step in (None, 4, None):
        with Tracker(["wandb"], RunInfo(tmp_path, resume_step=resume_step, **info)) as tracker:
            tracker.log(5, {"loss": 1.0, "spread": SPREAD})
    assert [(one["id"], one["resume"]) for one in fake.inits] == [(None, None), ("abc123", "allow"), (None, None)]
    assert fake.inits[0]["project"] == "p" and fake.inits[0]["config"] == {"a": 1}
    spread = ("histogram", ([1, 2], [0.0, 0.5, 1.0]))
    assert fake.logged == [{"loss": 1.0, "spread": spread, "training/global_step": 5}] * 3


def test_wandb_that_refuses_leaves_the_records_alone(tmp_path, monkeypatch):
    use_wandb(monkeypatch, FakeWandb(refuse="api_key not configured (no-tty)\nmore"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"api_key not configured \(no-tty\)\): run `wandb login`"):
        Tracker(["file", "wandb"], RunInfo(tmp_path))
    assert records(tmp_path) == [{"step": 1}]


def test_a_service_that_fails_ends_no_run(tmp_path, monkeypatch, capsys):
    fake = FakeWandb()

    def unreachable(*_):
        raise ConnectionError("no route to api.wandb.ai\nmore")

    fake.init = lambda **_: types.SimpleNamespace(
        id="1", define_metric=lambda *_, **__: None, log=unreachable, finish=unreachable
    )
    use_wandb(monkeypatch, fake)
    with Tracker(["wandb", "file"], RunInfo(tmp_path)) as tracker:
        tracker.log(1, {"loss": 1.0})
    assert records(tmp_path) == [{"step": 1, "loss": 1.0}]
    said = capsys.readouterr().out
    assert "wandb has not got step 1, and the run goes on: no route to api.wandb.ai\n" in said and "end" in said


def test_mlflow_gets_names_that_it_takes(tmp_path, monkeypatch):
    logged = {}
    fake = types.ModuleType("mlflow")
    for name in ("set_tracking_uri", "set_experiment", "log_dict", "end_run"):
        setattr(fake, name, lambda *args: None)
    fake.start_run = lambda **how: types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))
    fake.log_metrics = lambda values, step: logged.update(values)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=name))
    with Tracker(["mlflow"], RunInfo(tmp_path)) as tracker:
        tracker.log(1, {"val-core//home/me/data/reward/mean@1": 0.5, "loss": 1.0})
    assert logged == {"val-core/home/me/data/reward/mean_1": 0.5, "loss": 1.0}


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


SERVICES = [pytest.param(name, marks=needs(name)) for name in ("trackio", "mlflow", "swanlab")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_keeps_every_step_and_goes_on_in_the_same_run(name, tmp_path):
    """In a process of its own, without a network: services hold threads and settings of their process."""
    code = f"""
import sys
from pathlib import Path
from valor.tracking.loggers import RunInfo, Tracker
from valor.tracking.metrics import Histogram
for resume_step, step in ((None, 1), (1, 2)):
    info = RunInfo(Path("run"), "proj", "first", {{"actor": {{"lr": 1e-6}}}}, resume_step=resume_step)
    with Tracker(["{name}"], info) as tracker:
        tracker.log(step, {{"val-core/x/mean@8": 0.25 * step, "spread": Histogram(0.0, 1.0, [1, 2])}})
"""
    home = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "SWANLAB_MODE": "offline"}
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **home, **quiet}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    number = (tmp_path / "run" / f"{name}_run_id").read_text().strip()
    assert READ[name](tmp_path, number) == [(1, 0.25), (2, 0.5)]


def read_trackio(folder, number):
    (database,) = (folder / "trackio").glob("proj*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics where run_name = ? order by step", [number])
        return [(step, json.loads(metrics)["val-core/x/mean@8"]) for step, metrics in rows]


def read_mlflow(folder, number):
    with sqlite3.connect(folder / "run" / "mlflow.db") as connection:
        return [*connection.execute("select step, value from metrics where key = 'val-core/x/mean_8' order by step")]


def read_swanlab(folder, number):
    """Its own binary records, a file for each process: the name of the metric, and beside it the number."""
    files = sorted((folder / "run" / "swanlog").rglob(f"run-{number}.swanlab"))
    records = [path.read_bytes() for path in files]
    assert all(b"val-core/x/mean@8" in one for one in records)
    return [(step, v) for step, v in ((1, 0.25), (2, 0.5)) if struct.pack("<d", v) in records[step - 1]]


READ = {"trackio": read_trackio, "mlflow": read_mlflow, "swanlab": read_swanlab}


def traced_by_wandb(folder):
    (file,) = (folder / "run" / "wandb").rglob("samples/train*.table.json")
    table = json.loads(file.read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def traced_by_mlflow(folder):
    (file,) = (folder).rglob("samples/train_3.json")
    table = json.loads(file.read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def traced_by_trackio(folder):
    (database,) = (folder / "trackio").glob("proj*.db")
    with sqlite3.connect(database) as connection:
        rows = [*connection.execute("select messages, metadata from traces where step = 3 order by key")]
    traces = [(*json.loads(messages), json.loads(metadata)) for messages, metadata in rows]
    return [{"prompt": asked["content"], "response": said["content"], **facts} for asked, said, facts in traces]


TRACED = {"wandb": traced_by_wandb, "mlflow": traced_by_mlflow, "trackio": traced_by_trackio}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in TRACED])
def test_a_service_gets_samples_with_each_token_s_value(name, tmp_path):
    """Read back from what the library itself has written, without a network."""
    code = f"""
from pathlib import Path
from valor.tracking.generations import Sample
from valor.tracking.loggers import RunInfo, Tracker
samples = [
    Sample("1+1=", ["2", "<end>"], 1.0, ground_truth="2", values=[0.25, 0.875]),
    Sample("Quote \\"it\\" é", ["no"], 0.0),
]
with Tracker(["{name}"], RunInfo(Path("run"), "proj", "first")) as tracker:
    tracker.trace(3, "train", samples)
    tracker.log(3, {{"loss": 1.0}})
"""
    home = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline"}
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **home, **quiet}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    first, second = TRACED[name](tmp_path)
    assert (first["step"], first["prompt"], first["response"], first["reward"]) == (3, "1+1=", "2<end>", 1.0)
    assert (first["ground_truth"], first["last_value"]) == ("2", 0.875)
    assert json.loads(first["values"]) == [["2", 0.25], ["<end>", 0.875]]
    assert second["prompt"] == 'Quote "it" é' and json.loads(second["values"]) == [["no", None]]
    assert second["last_value"] is None


class Kept(Logger):
    logged: typing.ClassVar[list] = []

    def __init__(self, run):
        self.experiment = run.experiment

    def log(self, step, metrics, histograms):
        self.logged.append((self.experiment, step, dict(metrics)))


def test_loggers_of_ones_own(tmp_path):
    source = "from valor.tracking.loggers import ConsoleLogger\nclass Mine(ConsoleLogger):\n    pass\n"
    (tmp_path / "mine.py").write_text(source)
    assert find_logger(f"{tmp_path}/mine.py:Mine").__name__ == "Mine"
    with Tracker([f"{__name__}:Kept"], RunInfo(tmp_path / "run", experiment="e")) as tracker:
        tracker.log(3, {"loss": 1.0})
    assert Kept.logged == [("e", 3, {"loss": 1.0})]
    with pytest.raises(UserError, match=r"trainer\.logger: .*mine\.py has no 'Mien'; did you mean Mine\?"):
        find_logger(f"{tmp_path}/mine.py:Mien")


def test_summary_line():
    assert summary_line(12, STEP, 100) == (
        "step  12/100  reward 0.534  kl 0.0012  ev 0.63  len 214 (3% cut)  18.4 s  1,240 tok/s"
    )
    assert summary_line(3, {"val-core/openai/gsm8k/acc/mean@1": 0.712}) == "step 3  val 0.712"
    two = {
        "val-core/openai/gsm8k/acc/mean@8": 0.5,
        "val-core/x/math/acc/mean@8": 0.25,
        "val-core/x/math/acc/maj@8": 1.0,
    }
    assert summary_line(3, two).endswith("val gsm8k 0.500  val math 0.250")
    clash = {"val-core/a/math/acc/mean@1": 0.5, "val-core/b/math/acc/mean@1": 0.25}
    assert summary_line(3, clash).endswith("val a/math 0.500  val b/math 0.250")
    assert "reward nan" in summary_line(1, {"critic/score/mean": math.nan})
    assert "ev" not in summary_line(1, {"critic/vf_explained_var": math.nan})  # there is nothing to explain


def test_console_prints_one_line(tmp_path, capsys):
    with Tracker(["console"], RunInfo(tmp_path, total_steps=100)) as tracker:
        tracker.log(12, STEP)
    assert capsys.readouterr().out == summary_line(12, STEP, 100) + "\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.844, "0.84 s"),
        (18.44, "18.4 s"),
        (99.96, "1 min 40 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7440, "2 h 04 min"),
    ],
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


def test_a_record_that_does_not_fit_on_the_disk_leaves_the_old_one_alone(tmp_path, monkeypatch):
    write_run_info(tmp_path, name="old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("valor.tracking.rundir.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_run_info(tmp_path, name="new")
    assert read_run_info(tmp_path) == {"name": "old"} and [file.name for file in tmp_path.iterdir()] == ["run.json"]
