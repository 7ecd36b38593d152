"""Command lines that people type today, as they are: each resolves, or stops with one clear line."""

import json
import os
import shlex

import pytest

from valor.config import LoadedConfig, PPOConfig, load
from valor.errors import UserError
from valor.trainer.checks import check, inert_settings

pytestmark = pytest.mark.slow

BASE = ["algorithm.adv_estimator=gae", "data.train_files=train.parquet"]
RUN = ["python3", "-m", "valor.trainer.main_ppo"]


def commands(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """The argument lists of the training commands, and those option lines that stand alone."""
    words = [shlex.split(os.path.expandvars(line)) for line in text.splitlines() if line.strip()]
    whole = [line[3:] for line in words if line[:3] == RUN]
    alone = [line for line in words if line[0] not in ("python", "python3", "bash")]
    return whole, alone


def resolve(argv: list[str]) -> LoadedConfig[PPOConfig]:
    loaded = load([*argv, "--dry-run"], PPOConfig, check)
    if loaded.unavailable:
        with pytest.raises(UserError) as caught:
            load(argv, PPOConfig, check)
        assert str(caught.value).splitlines() == list(loaded.unavailable)
    return loaded


@pytest.fixture
def reference(shared_dir):
    return commands((shared_dir / "commands" / "reference_commands.txt").read_text())


def test_whole_commands_resolve(reference):
    whole, _ = reference
    assert len(whole) == 14
    stops = {}
    for number, argv in enumerate(whole):
        loaded = resolve(argv)
        if loaded.unavailable:
            [line] = loaded.unavailable
            stops[number] = line.partition(" is not available in this version")[0]
    assert stops == {
        7: "The Megatron backend",
    }


def test_option_lines_resolve_on_a_base_command(reference):
    _, alone = reference
    assert len(alone) == 31
    stops = {" ".join(argv): resolve([*BASE, *argv]).unavailable for argv in alone}
    assert {argv: lines[0].partition(" is not")[0] for argv, lines in stops.items() if lines} == {
        "actor_rollout_ref.rollout.name=sglang": "The SGLang engine",
    }


def test_verl_scripts_resolve(shared_dir):
    scripts = json.loads((shared_dir / "commands" / "verl_scripts.json").read_text())
    stops = {}
    for script in scripts:
        loaded = resolve(script["overrides"])
        stops[script["script"].removeprefix("old_examples_")] = [
            line.partition(" is not available")[0] for line in loaded.unavailable
        ]
    assert {script: found for script, found in stops.items() if found} == {
        "grpo_trainer_run_qwen2-7b_seq_balance": ["The SGLang engine"]
    }
    assert len(stops) == 8


def test_verl_scripts_resolve_to_what_they_say(shared_dir):
    scripts = json.loads((shared_dir / "commands" / "verl_scripts.json").read_text())
    overrides = {script["script"]: script["overrides"] for script in scripts}["old_examples_ppo_trainer_run_gemma"]
    native = [text for text in overrides if not text.startswith("actor_rollout_ref.rollout.name=")]
    loaded = load(native)
    config = loaded.config
    assert config.data.train_batch_size == 512 and config.actor_rollout_ref.actor.ppo_mini_batch_size == 128
    assert config.critic.model.path == "google/gemma-2-2b-it" and config.critic.max_rows == 4
    assert config.trainer.logger == ["console", "wandb"] and config.trainer.n_gpus_per_node == 2
    inert = inert_settings(config, loaded.explicit_keys)
    assert inert["actor_rollout_ref.rollout.gpu_memory_utilization"] == "no effect with rollout.name=native"
    assert "critic.optim.lr" not in inert


def test_commands_work_without_the_reference_folder():
    argv = shlex.split(
        "algorithm.adv_estimator=gae data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=256 "
        "actor_rollout_ref.model.path=m critic.model.path=c actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.actor.ppo_micro_batch_size=2 critic.ppo_micro_batch_size=2 trainer.n_gpus_per_node=2 "
        "trainer.total_epochs=15 trainer.logger=console"
    )
    config = resolve(argv).config
    assert config.actor_rollout_ref.actor.max_rows == config.critic.max_rows == 2
    assert (config.critic.model.path, config.trainer.logger) == ("c", ["console"])
