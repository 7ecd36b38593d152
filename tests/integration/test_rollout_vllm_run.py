"""Whole runs with rollout.name=vllm: the native engine's run with another engine in its place."""

import json
from pathlib import Path

import pytest
from runs import read_metrics

from valor.trainer.main_ppo import main

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS = "trainer.total_training_steps=3"
VLLM = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"]


@pytest.fixture(scope="module")
def native_run(overrides, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("engines") / "native"
    assert main(overrides(run_dir, STEPS)) == 0
    return run_dir


def assert_same_training(native: Path, run_dir: Path) -> None:
    """Equal samples and losses, and log-probs that are the trainer's after every update."""
    one, other = read_metrics(native), read_metrics(run_dir)
    assert len(one) == len(other) == 4
    for a, b in zip(one[1:], other[1:], strict=True):
        assert a["critic/score/mean"] == b["critic/score/mean"]
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-3)
        assert b["training/rollout_log_probs_diff_max"] < 1e-4
    timed = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["timing_s/update_weights"] > 0 for row in timed[1:])


def test_in_this_process(native_run, overrides, tmp_path):
    assert main(overrides(tmp_path / "run", STEPS, *VLLM)) == 0
    assert_same_training(native_run, tmp_path / "run")


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ray_processes(tensor_parallel, native_run, overrides, tmp_path):
    """Two replicas, or one that is split in two."""
    split = f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}"
    assert main(overrides(tmp_path / "run", STEPS, *VLLM, split, "trainer.n_gpus_per_node=2")) == 0
    assert_same_training(native_run, tmp_path / "run")


def test_what_does_not_fit_is_one_line(overrides, tmp_path, capsys):
    for override, words in (
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=4", "2 key-value heads"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.blok_size=16", "did you mean block_size"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "set it to 1"),
    ):
        assert main(overrides(tmp_path / "run", STEPS, *VLLM, override)) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error, error
