"""Yaml files of the user's own beside the built-in configurations, and what came from where."""

import warnings

import pytest

from valor.config import composition, load
from valor.errors import UserError
from valor.trainer.plan import plan

MINE = "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8}\n"
MINE += "actor_rollout_ref: {actor: {ppo_mini_batch_size: 8}}\n"


@pytest.mark.parametrize("name", ["ppo_config", "grpo_config", "mine"])
def test_a_file_of_ones_own_wins_over_a_built_in_one_of_its_name(name, tmp_path):
    (tmp_path / f"{name}.yaml").write_text(MINE)
    loaded = load([f"--config-path={tmp_path}", f"--config-name={name}"])
    assert loaded.config.data.train_batch_size == 8 and loaded.config.trainer.total_epochs == 30
    assert loaded.notes == () and not loaded.presets
    built_in = load(["--config-name=ppo_config"])  # which is there again without that folder
    assert built_in.config.data.train_batch_size == 256


def test_a_file_named_as_the_defaults_wins_too(tmp_path):
    (tmp_path / "ppo_trainer.yaml").write_text(MINE.partition("\n")[2])
    loaded = load([f"--config-path={tmp_path}", "--config-name=ppo_trainer", "data.max_prompt_length=9"])
    assert loaded.config.data.train_batch_size == 8 and loaded.config.data.max_prompt_length == 9
    assert loaded.notes == ()


def test_the_plan_says_what_came_from_a_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_config, _self_]\ntrainer: {save_freq: 7}\n")
    for argv in (["--config-name=grpo_config", "trainer.save_freq=7"], [f"-cp={tmp_path}", "-cn=mine"]):
        loaded = load(argv)
        assert "trainer.save_freq" not in loaded.presets["grpo_config"]
        [line] = [one for one in plan(loaded.config, (), loaded.presets).splitlines() if "from grpo_config" in one]
        assert "data.train_batch_size=256" in line and "actor_rollout_ref.rollout.n=5" in line


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            "ref.ulysses_sequence_parallel_size",
            2,
        ),
        ("actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16", "ref.fsdp_config.model_dtype", "bfloat16"),
        ("+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32", "actor.fsdp_config.dtype", "float32"),
    ],
)
def test_keys_of_todays_verl_scripts(text, key, value):
    config = load(["data.train_files=a.parquet", text]).config.actor_rollout_ref
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value


def test_verls_own_config_folder_is_the_built_in_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--config-path=./config", "--config-name=ppo_megatron_trainer.yaml", "data.train_files=a.parquet"]
    loaded = load(argv)
    assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert loaded.notes[0].endswith("there is no such folder; ppo_megatron_trainer is the built-in one")
    for wrong in (["--config-path=conf", argv[1]], [argv[0], "--config-name=mine"]):
        with pytest.raises(UserError, match="there is no such folder"):
            load(wrong)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ppo_megatron_trainer.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    assert load(argv).config.actor_rollout_ref.actor.strategy == "fsdp2"


def test_keys_of_verls_recipes():
    config = load(["data.train_files=a.parquet", "reward_model.overlong_buffer.len=64", "rollout.nnodes=2"]).config
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 64 and config.actor_rollout_ref.rollout.nnodes == 2
    correction = "algorithm.rollout_correction."
    load(["data.train_files=a.parquet", f"{correction}rollout_token_veto_threshold=null"])
    for text in (f"{correction}rollout_token_veto_threshold=1e-4", "rollout.total_rollout_steps=100"):
        with pytest.raises(UserError, match=r"asks for what Valor does not have: .*set "):
            load([text])
    with pytest.raises(UserError, match=r"got ''$"):
        load(["actor_rollout_ref.actor.use_kl_loss=''"])


def test_a_path_to_resume_from_is_noted_where_it_is_not_read():
    from valor.trainer.checks import inert_settings

    loaded = load(["trainer.resume_from_path=checkpoints/"])
    reason = inert_settings(loaded.config, loaded.explicit_keys)["trainer.resume_from_path"]
    assert reason == "no effect with trainer.resume_mode=auto"


def test_a_kl_loss_that_pulls_nowhere_is_noted():
    from valor.trainer.checks import inert_settings

    loaded = load(["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=kl"])
    assert "mean 0" in inert_settings(loaded.config, loaded.explicit_keys)["actor_rollout_ref.actor.kl_loss_type"]
    loaded = load(["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=k2"])
    assert not inert_settings(loaded.config, loaded.explicit_keys)


def test_warnings_of_others_are_no_notes(monkeypatch):
    """Such as a socket that was left open and is freed while files are composed."""
    compose = composition.compose

    def warned(**arguments):
        warnings.warn("unclosed socket", ResourceWarning, stacklevel=1)
        return compose(**arguments)

    monkeypatch.setattr(composition, "compose", warned)
    assert load(["--config-name=ppo_config"]).notes == ()
