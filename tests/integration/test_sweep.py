"""A sweep of real runs, killed in the middle: the second start finishes it and gives what an undisturbed one gives."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml
from runs import assert_same_run, read_metrics

from forked import VALOR
from valor.cli import main as valor
from valor.controller import jobs
from valor.lab.sweep_plan import RESERVED, key_of

pytestmark = pytest.mark.slow


def command(file: Path, out: Path) -> list[str]:
    return ["lab", "sweep", str(file), "--out", str(out)]


def without_times(out: Path) -> dict:
    results = json.loads((out / "results.json").read_text())
    for arm in results["arms"]:
        for run in arm["finished"].values():
            del run["seconds"]
    return results


@pytest.fixture
def runs_fork(forks, monkeypatch):
    """Runs of sweeps of this process start in a moment; those of other processes start as a user's do."""

    def start(job, environment):
        job.folder.mkdir(parents=True, exist_ok=True)
        return forks.start(VALOR, *job.command[3:], log=job.folder / jobs.LOG_FILE)

    monkeypatch.setattr(jobs, "_start", start)


@pytest.mark.usefixtures("runs_fork")
@pytest.mark.long
def test_a_killed_sweep_finishes_repeats_nothing_and_gives_the_same_table(forks, overrides, tmp_path):
    base = [one for one in overrides(tmp_path, "trainer.save_freq=1") if key_of(one) not in RESERVED]
    arms = {"short": {"algorithm.lam": 0.9}, "long": None}
    file = tmp_path / "killed.yaml"
    file.write_text(yaml.safe_dump({"base": base, "arms": arms, "seeds": [0], "control": "long"}, sort_keys=False))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert valor(command(file, whole)) == 0

    sweep = forks.start(f"import os\nos.setsid()\n{VALOR}", *command(file, cut))
    second = cut / "long" / "seed_0"
    end = time.monotonic() + 900
    while not (second / "global_step_1").exists() and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.wait()
    while any(str(second) in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < end, "its run goes on"
        time.sleep(0.05)
    status = {arm: json.loads((cut / arm / "seed_0" / "result.json").read_text())["status"] for arm in arms}
    assert status == {"short": "finished", "long": "running"}
    assert not (second / "huggingface").exists()
    first = (cut / "short" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns

    assert valor(command(file, cut)) == 0
    assert (cut / "short" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns == first
    assert "resumed from" in (second / "console.log").read_text()
    assert (cut / "table.md").read_bytes() == (whole / "table.md").read_bytes()
    assert without_times(cut) == without_times(whole)
    for arm in arms:
        assert_same_run(cut / arm / "seed_0", whole / arm / "seed_0")


@pytest.mark.usefixtures("runs_fork")
@pytest.mark.long
def test_the_example_of_progress_under_another_policy_runs(overrides, tmp_path, monkeypatch):
    """All four arms, those whose prover another has trained after it; fewer steps, and the tests' model and data."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    tree = yaml.safe_load((root / "examples" / "lab" / "progress.yaml").read_text())
    file, out = tmp_path / "progress.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(tree | {"seeds": [0]}, sort_keys=False))
    small = [one for one in overrides(tmp_path) if key_of(one) not in RESERVED]
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=2"]
    assert valor([*command(file, out), *small, "critic.ppo_mini_batch_size=4", *steps]) == 0
    for name in tree["arms"]:
        assert read_metrics(out / name / "seed_0")[-1]["step"] == 2
    for name, prover in (("own", "start"), ("other", "ppo")):
        said = (out / name / "seed_0" / "console.log").read_text()
        assert f"1 x progress under {out}/{prover}/seed_0/huggingface/critic" in said
