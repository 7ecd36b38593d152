"""What a sweep runs, repeats and refuses, with commands that only leave metrics behind."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from valor.errors import UserError
from valor.lab.sweep import run_sweep
from valor.lab.sweep_plan import Sweep, SweepConfig, plan_sweep

pytestmark = pytest.mark.slow

LEAVES_METRICS = """
import json, pathlib, sys
folder, value = pathlib.Path(sys.argv[1]), float(sys.argv[2])
with open(folder / "metrics.jsonl", "w") as file:
    for step in (0, 1):
        file.write(json.dumps({"step": step, "val-core/x/reward/mean@1": value * step}) + "\\n")
"""


def make(out: Path, broken: str = "", lam: float = 0.9, seeds: tuple[int, ...] = (0, 1)) -> Sweep:
    """Arms a, b and c, of which c needs a's run; `broken`: the name of a run that fails."""
    arms = {"a": None, "b": {"algorithm.lam": lam}, "c": {"critic.model.path": "<run:a>/huggingface/critic"}}
    base = {"data": {"train_files": "t.parquet"}}
    config = SweepConfig.model_validate(
        {"name": "s", "base": base, "arms": arms, "seeds": list(seeds), "out": str(out)}
    )
    sweep = plan_sweep(config)
    runs = []
    for run in sweep.runs:
        code = "raise SystemExit('it broke')" if run.name == broken else LEAVES_METRICS
        command = (sys.executable, "-c", code, str(run.folder), str(run.seed + len(run.settings["critic.model.path"])))
        runs.append(replace(run, command=command))
    return replace(sweep, runs=tuple(runs))


def starts(sweep: Sweep) -> dict[str, float]:
    """When each run wrote its metrics."""
    paths = {run.name: run.folder / "metrics.jsonl" for run in sweep.runs}
    return {name: path.stat().st_mtime for name, path in paths.items() if path.exists()}


def test_a_finished_run_is_not_repeated(tmp_path, capsys):
    sweep = make(tmp_path)
    assert run_sweep(sweep) == 0
    before, table = starts(sweep), (tmp_path / "table.md").read_bytes()
    assert len(before) == 6 and table.decode() in capsys.readouterr().out
    assert run_sweep(sweep) == 0
    assert starts(sweep) == before and (tmp_path / "table.md").read_bytes() == table
    more = make(tmp_path, seeds=(0, 1, 2))
    assert run_sweep(more) == 0
    assert before.items() < starts(more).items()


def test_a_failure_is_told_the_others_go_on_and_the_next_start_repairs_it(tmp_path, capsys):
    broken = make(tmp_path, broken="a seed 1")
    assert run_sweep(broken) == 1
    out = capsys.readouterr().out
    assert "a seed 1: exit code 1: it broke" in out
    assert "* c seed 1: not run: it needs a seed 1, which failed" in (tmp_path / "table.md").read_text()
    assert set(starts(broken)) == {"a seed 0", "b seed 0", "c seed 0", "b seed 1"}
    assert run_sweep(make(tmp_path)) == 0
    assert "failed" not in (tmp_path / "table.md").read_text()


def test_a_run_without_the_metric_is_told_and_not_a_crash(tmp_path, capsys):
    sweep = make(tmp_path)
    sweep = replace(sweep, config=sweep.config.model_copy(update={"metric": "val-core/y/reward/mean@1"}))
    silent = replace(sweep.runs[1], command=(sys.executable, "-c", ""))
    assert run_sweep(replace(sweep, runs=(sweep.runs[0], silent, *sweep.runs[2:]))) == 1
    out = capsys.readouterr().out
    assert "a seed 0: it measured no val-core/y/reward/mean@1; did you mean val-core/x/reward/mean@1?" in out
    assert "b seed 0: it left no metrics.jsonl: trainer.logger must contain 'file'" in out


def test_an_interrupted_run_is_started_again(tmp_path):
    sweep = make(tmp_path)
    assert run_sweep(sweep) == 0
    table = (tmp_path / "table.md").read_bytes()
    cut = sweep.runs[1]
    (cut.folder / "metrics.jsonl").unlink()
    cut.write("running")
    assert run_sweep(sweep) == 0
    assert (tmp_path / "table.md").read_bytes() == table


def test_runs_of_other_settings_are_refused(tmp_path):
    sweep = make(tmp_path)
    assert run_sweep(sweep) == 0
    before, changed = starts(sweep), make(tmp_path, lam=0.8)
    with pytest.raises(UserError) as caught:
        run_sweep(changed)
    assert str(caught.value) == (
        f"{tmp_path}/b/seed_0 was run with other settings (algorithm.lam: 0.9 -> 0.8, algorithm.lam_actor: 0.9 -> 0.8, "
        "algorithm.lam_critic: 0.9 -> 0.8): give another out, or delete what is to be repeated"
    )
    assert starts(sweep) == before


def test_a_record_says_what_ran(tmp_path):
    sweep = make(tmp_path)
    assert run_sweep(sweep) == 0
    record = json.loads((tmp_path / "b" / "seed_1" / "result.json").read_text())
    assert (record["status"], record["arm"], record["seed"]) == ("finished", "b", 1)
    assert record["settings"]["algorithm.lam"] == 0.9
