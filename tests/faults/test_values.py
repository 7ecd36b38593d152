"""Scores and log-probs that are no numbers: one counted error each, never a weight update; too many end the run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from valor.agents.runner import EpisodeRunner
from valor.cli import main
from valor.rewards.worker import as_result

pytestmark = pytest.mark.slow

# What a grader does, by the number of the sample in the step.
GRADER = """
import math
import numpy as np
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    bad = int(ground_truth) % 3 == 0
    return {value} if bad else 1.0 * (len(solution_str) % 2)
"""
BAD = {
    "NaN": "math.nan",
    "infinity": "math.inf",
    "minus infinity": "-math.inf",
    "NaN of NumPy": "np.float32('nan')",
    "NaN in a dictionary": "{'score': math.nan, 'acc': True}",
    "a component": "{'score': 1.0, 'accuracy': math.nan}",
    "a component of NumPy": "{'score': 1.0, 'accuracy': np.array([math.inf])}",
    "text": "'1.0'",
    "nothing": "None",
    "a list": "[1.0, 2.0]",
    "half of a surrogate pair": "{'score': 1.0, 'error': '\\ud800'}",
    "an exception of half a pair": "exec('raise ValueError(chr(0xd800))')",
}


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def grader(tmp_path: Path, value: str) -> str:
    (tmp_path / "grader.py").write_text(GRADER.format(value=value))
    return f"reward.custom_reward_function.path={tmp_path / 'grader.py'}"


@pytest.mark.parametrize("name", BAD)
def test_one_error_each_and_finite_weights(name, ppo, tmp_path, capsys, counts):
    counts("values that are no numbers")
    run_dir = tmp_path / "run"
    more = "trainer.total_training_steps=2", "reward.max_error_ratio=1.0"
    assert main(ppo(run_dir, grader(tmp_path, BAD[name]), *more)) == 0
    rows = metrics(run_dir)
    assert all(0 < row["reward/errors"] < 8 for row in rows)
    assert all(not row["actor/skipped"] and not row["critic/skipped"] for row in rows)
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers))


def test_log_probs_of_an_engine(ppo, tmp_path, monkeypatch, counts):
    counts("values that are no numbers", 2)
    run = EpisodeRunner.run

    def broken(self, *args):
        episodes = run(self, *args)
        for sample, place, value in ((1, 0, math.nan), (3, -1, -math.inf)):
            (turn,) = episodes[sample].turns
            log_probs = [*turn.log_probs]
            log_probs[place] = value
            episodes[sample] = replace(episodes[sample], turns=(replace(turn, log_probs=log_probs),))
        return episodes

    monkeypatch.setattr(EpisodeRunner, "run", broken)
    run_dir = tmp_path / "run"
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    assert main(ppo(run_dir, bypass, "trainer.total_training_steps=2")) == 0
    for row in metrics(run_dir):
        assert row["reward/errors"] == 2 and not row["actor/skipped"]
        assert math.isfinite(row["training/rollout_log_probs_diff_max"])


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_with_too_many_errors_is_not_learnt_from(step, ppo, tmp_path, capsys, counts):
    """The run stops, saved as it was; with the grader mended the same command gives the run that never failed."""
    counts("steps whose graders fail")
    file = tmp_path / "grader.py"
    good = "def compute_score(*, solution_str, **_): return 1.0 * (len(solution_str) % 2)\n"
    bad = (
        "import pathlib\nDONE = pathlib.Path({!r})\ndef compute_score(*, solution_str, **_):\n"
        "    if DONE.exists(): raise ValueError('the judge has gone home')\n    return 1.0 * (len(solution_str) % 2)\n"
    )
    file.write_text(good)
    own = f"reward.custom_reward_function.path={file}"
    assert main(ppo(tmp_path / "whole", own)) == 0
    run_dir = tmp_path / "cut"
    last = run_dir / f"global_step_{step - 1}" / "trainer.json" if step > 1 else tmp_path
    file.write_text(bad.format(str(last)))
    command = ppo(run_dir, own, f"trainer.save_freq={1 if step > 1 else -1}")
    capsys.readouterr()
    assert main(command) == 1
    error = capsys.readouterr().err.strip()
    assert "could not be graded" in error and "the judge has gone home" in error and "max_error_ratio" in error
    assert len(error.splitlines()) == 1
    file.write_text(good)
    assert main([*command, "trainer.resume_changed=allow"]) == 0  # the grader is another one now
    for role in ("actor", "critic"):
        a, b = (folder / "huggingface" / role / "model.safetensors" for folder in (tmp_path / "whole", run_dir))
        assert a.read_bytes() == b.read_bytes()


def test_a_refused_step_is_saved_although_none_was_due(ppo, tmp_path, counts):
    counts("steps whose graders fail")
    (tmp_path / "grader.py").write_text(
        f"import os\ndef compute_score(**_):\n"
        f"    if os.path.exists({str(tmp_path / 'run' / 'samples' / 'step_2.jsonl')!r}): raise ValueError('late')\n"
        "    return 1.0\n"
    )
    own = f"reward.custom_reward_function.path={tmp_path / 'grader.py'}"
    assert main(ppo(tmp_path / "run", own, "trainer.save_freq=-1")) == 1
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]


@pytest.mark.parametrize("score", ["array([0.5])", "array(0.5)", "float16(0.5)"])
def test_a_score_of_numpy_is_a_number(score):
    numpy = pytest.importorskip("numpy")
    value = eval(f"numpy.{score}", {"numpy": numpy})
    assert as_result(value, 0.0, 0.0).score == as_result({"score": value}, 0.0, 0.0).score == 0.5
    for several in (numpy.array([0.5, 1.0]), numpy.array([[0.5]]), numpy.array([])):
        with pytest.raises(TypeError, match="not a number"):
            as_result(several, 0.0, 0.0)


def test_components_of_numpy_and_torch_are_values():
    numpy = pytest.importorskip("numpy")
    given = {
        "score": numpy.float32(0.5),
        "acc": numpy.bool_(True),
        "count": numpy.int64(3),
        "one": numpy.array([2.5]),
        "several": numpy.array([1, 2]),
        "tensor": torch.tensor(1.5),
    }
    result = as_result(given, 0.0, 0.0)
    assert result.error is None and result.score == 0.5 and result.correct
    assert result.components == {"acc": True, "count": 3, "one": 2.5, "several": "[1, 2]", "tensor": 1.5}
    assert type(result.components["acc"]) is bool
