"""Command lines that people type today, as they are: each resolves, or stops with one clear line."""

import json
import os
import shlex

import pytest

from valor.config import PPOConfig, load
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


def stop(argv: list[str]) -> str:
    """What the command stops at, its first line; "" where it resolves."""
    try:
        load(argv, PPOConfig, check)
    except UserError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.fixture
def reference(shared_dir):
    return commands((shared_dir / "commands" / "reference_commands.txt").read_text())


def test_whole_commands_resolve(reference):
    whole, _ = reference
    assert len(whole) == 14
    stops = {number: stop(argv) for number, argv in enumerate(whole)}
    assert not any(stops.values())


def test_megatron_command_is_read_as_it_says(reference):
    whole, _ = reference
    config = load(whole[7], PPOConfig, check).config
    actor, ref, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    assert (actor.strategy, ref.strategy, critic.strategy) == ("megatron",) * 3
    assert actor.megatron.sizes == {"tensor": 4, "pipeline": 2, "context": 1, "expert": 1}
    assert ref.megatron.sizes == critic.megatron.sizes == actor.megatron.sizes


def test_option_lines_resolve_on_a_base_command(reference):
    _, alone = reference
    assert len(alone) == 31
    assert not any(stop([*BASE, *argv]) for argv in alone)


def test_verl_scripts_resolve(shared_dir):
    scripts = json.loads((shared_dir / "commands" / "verl_scripts.json").read_text())
    stops = {script["script"].removeprefix("old_examples_"): stop(script["overrides"]) for script in scripts}
    assert len(stops) == 8 and not any(stops.values())


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
    config = load(argv, PPOConfig, check).config
    assert config.actor_rollout_ref.actor.max_rows == config.critic.max_rows == 2
    assert (config.critic.model.path, config.trainer.logger) == ("c", ["console"])
