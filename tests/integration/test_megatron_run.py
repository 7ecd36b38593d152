"""`valor ppo` with strategy=megatron for actor, critic and reward model, on four and on two processes: the numbers of
FSDP2 on one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from runs import read_metrics, weights

from tiny_reward_models import make_classifier
from valor.trainer.main_ppo import main

if find_spec("megatron") is None:
    pytest.skip("needs megatron-core: pip install 'valor-rl[megatron]'", allow_module_level=True)

pytestmark = pytest.mark.slow

ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
SHORT = ["trainer.total_training_steps=3", "actor_rollout_ref.rollout.dtype=float32"]
MEGATRON = [
    "actor_rollout_ref.actor.strategy=megatron",
    f"{ACTOR}.dtype=float32",
    "actor_rollout_ref.model.external_lib=megatron_on_cpu",
    "reward.reward_model.strategy=megatron",
    "reward.reward_model.fsdp_config.dtype=float32",
]
LAYOUTS = {
    "tp2-pp2": [
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.tensor_model_parallel_size=2",
        f"{ACTOR}.pipeline_model_parallel_size=2",
        # three layers in two stages
        f"+{ACTOR}.override_transformer_config.num_layers_in_first_pipeline_stage=1",
        f"+{CRITIC}.override_transformer_config.num_layers_in_first_pipeline_stage=2",
    ],
    "dp2": ["trainer.n_gpus_per_node=2"],
}


@pytest.fixture(scope="module")
def runs(overrides, tmp_path_factory) -> Path:
    root, here = tmp_path_factory.mktemp("megatron_runs"), Path(__file__).parent
    judge = {"enable": "true", "model_path": make_classifier(root / "judge", num_key_value_heads=2), "rule_weight": 1}
    short = [*SHORT, *(f"reward.reward_model.{name}={value}" for name, value in judge.items())]
    assert main(overrides(root / "fsdp2", *short, "reward.reward_model.fsdp_config.dtype=float32")) == 0
    commands = [overrides(root / name, *short, *MEGATRON, *layout) for name, layout in LAYOUTS.items()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", here / "megatron_runs.py", json.dumps(commands)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_has_the_numbers_of_fsdp2(runs, layout):
    expected, found = read_metrics(runs / "fsdp2"), read_metrics(runs / layout)
    assert len(found) == len(expected) == 4
    for theirs, ours in zip(expected, found, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, dict):  # a histogram, whose bins have edges
                assert sum(ours[name]["counts"]) == sum(value["counts"])
                continue
            assert ours[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (theirs["step"], name)
    for role in ("actor", "critic"):
        theirs, ours = weights(runs / "fsdp2", role), weights(runs / layout, role)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=0.0)


def test_without_a_gpu_it_is_one_line(overrides, tmp_path, capsys):
    arguments = overrides(tmp_path / "cpu", *SHORT, "actor_rollout_ref.actor.strategy=megatron")
    assert main(arguments) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("strategy=megatron needs a GPU, as megatron-core allocates on nothing else: use strategy=fsdp2")
    )
