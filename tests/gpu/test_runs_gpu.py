"""Whole runs of a tiny model on GPUs, placed in every way that the machine has."""

import importlib.util
import json
import math
import subprocess
import sys

import pytest

from valor.lab import arithmetic

pytestmark = pytest.mark.gpu

HAS_VLLM = importlib.util.find_spec("vllm") is not None
OFFLOAD = [
    f"{role}.fsdp_config.{what}_offload=true"
    for role in ("actor_rollout_ref.actor", "critic")
    for what in ("param", "optimizer")
]
PACKED = "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps of PPO under overrides, in a process of its own; the metrics of each step."""
    root = tmp_path_factory.mktemp("runs")
    model = arithmetic.make_model(root / "model", seed=0)
    files = arithmetic.make_data(root / "data", seed=0, num_val=64, num_demonstrations=1, num_sft_val=1)

    def start(name: str, *overrides: str) -> list[dict[str, float]]:
        command = [
            *(sys.executable, "-m", "valor.trainer.main_ppo"),
            f"data.train_files={files.train}",
            "data.train_batch_size=32",
            "data.max_prompt_length=32",
            "data.max_response_length=16",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.rollout.n=4",
            "trainer.device=cuda",
            "trainer.n_gpus_per_node=1",
            "trainer.report=false",
            "trainer.logger=[file]",
            "trainer.total_training_steps=3",
            f"trainer.default_local_dir={root / name}",
            *overrides,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        assert all(math.isfinite(row["actor/grad_norm"]) for row in rows if row["step"])
        return [row for row in rows if row["step"]]

    return start


def test_a_seeded_run_is_repeated_and_its_engines_agree(run):
    rows, again = (run(name, PACKED, "trainer.full_determinism=true") for name in ("once", "again"))
    assert [row["actor/pg_loss"] for row in rows] == [row["actor/pg_loss"] for row in again]
    assert all(row["training/rollout_probs_diff_mean"] < 0.01 for row in rows)


def test_offloading_changes_no_loss(run):
    plain, moved = run("plain", PACKED), run("moved", PACKED, *OFFLOAD)
    for mine, other in zip(moved, plain, strict=True):
        assert mine["critic/vf_loss"] == pytest.approx(other["critic/vf_loss"], rel=0.05)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: pip install 'valor-rl[vllm]'")
def test_vllm_sleeps_while_others_load_and_agrees_with_training(run):
    rows = run("vllm", PACKED, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=bfloat16")
    assert all(row["training/rollout_probs_diff_mean"] < 0.02 for row in rows)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("pools", [False, True])
def test_two_gpus_as_one_pool_or_two(run, pools):
    apart = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    rows = run(f"two-{pools}", PACKED, *(apart if pools else ["trainer.n_gpus_per_node=2"]))
    assert all(row["training/rollout_probs_diff_mean"] < 0.01 for row in rows)
