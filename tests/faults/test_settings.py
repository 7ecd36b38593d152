"""Settings that mean nothing: a line or several that say what to do, exit code 2, no traceback, nothing written."""

import pytest

from valor.cli import main

INTEGERS = (
    *("data.train_batch_size", "data.max_response_length", "actor_rollout_ref.rollout.n", "trainer.total_epochs"),
    *("critic.ppo_epochs", "reward.num_workers"),
)
NUMBERS = (
    *("actor_rollout_ref.actor.optim.lr", "critic.cliprange_value", "algorithm.lam", "algorithm.gamma"),
    *("reward.timeout", "reward.max_error_ratio"),
)
FOLDERS = "trainer.default_local_dir", "data.train_files", "actor_rollout_ref.model.path"
SEEDS = "trainer.seed", "data.seed"
SETTINGS = [
    *(f"{key}={value}" for key in INTEGERS for value in (0, -1, 1.5, "abc", "true", "nan", 10**20, "[1]", "{a: 1}")),
    *(f"{key}={value}" for key in NUMBERS for value in ("nan", "inf", "-inf", "abc", "true", "[0.1]", "1e400", -1)),
    *(f"{key}={value}" for key in SEEDS for value in (-1, 2**63, 10**30, 0.5, "abc")),
    *(f"{key}='{value}'" for key in FOLDERS for value in ("a\0b", "x" * 300, "/".join(["x" * 200] * 30), "\ud800")),
    *(
        f"{key}.optim.betas={value}"
        for key in ("critic", "actor_rollout_ref.actor")
        for value in ("[1.5,0.9]", "[0.9]")
    ),
    "critic.optim.betas=[0.9,1.0]",
    "critic.optim.betas=[-0.1,0.9]",
    "critic.optim.betas=[nan,0.9]",
    "critic.optim.eps=0",
    "critic.optim.weight_decay=-1",
    "trainer.device=gpu",
    "trainer.controller=thread",
    "trainer.logger=[console,paper]",
    "trainer.resume_mode=resume_path",
    "trainer.resume_mode=resume_path trainer.resume_from_path=/nowhere/global_step_1",
    "trainer.n_gpus_per_node=0",
    "trainer.nnodes=2",
    "algorithm.adv_estimator=gea",
    "algorithm.use_kl_in_reward=maybe",
    "algorithm.reward_mask_ratio=2",
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanila",
    "actor_rollout_ref.actor.clip_ratio_c=0.5",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.name=oracle",
    "actor_rollout_ref.rollout.temperature=-1",
    "actor_rollout_ref.rollout.top_p=0",
    "actor_rollout_ref.model.lora_rank=-1",
    "critic=null",
    "critic.enable=false",
    "critic.value_loss=hubert",
    "critic.freeze_steps=5-1",
    "reward.reward_manager.name=batch",
    "reward.reward_model.enable=true",
    "reward.custom_reward_function.path=/nowhere/reward.py",
    "reward.custom_reward_function.path=/etc/hostname",
    "algorithm.custom_path=/nowhere/loss.py",
    "data.max_response_length=2000",
    "data.truncation=error data.max_prompt_length=2",
    "data.truncation=up",
    "nonsense",
    "=1",
    "trainer.=1",
    "a.b.c=1",
    "critic.optim.lrr=1",
    "trainer.seed=[1",
    "trainer.seed={",
    "trainer.seed='1",
    "--config-name=nothing",
    "--config-path=/nowhere --config-name=run",
    "--no-such-option",
]


# One in four is in the short part.
LONG = [pytest.param(setting, marks=[pytest.mark.faults] if i % 4 else []) for i, setting in enumerate(SETTINGS)]


@pytest.mark.parametrize("setting", LONG, ids=lambda text: ascii(text)[1:60])
def test_a_malformed_setting(setting, ppo, tmp_path, capsys, counts):
    counts("malformed settings")
    run_dir = tmp_path / "run"
    words = setting.split(" ") if " trainer" in setting or " data" in setting or " --" in setting else [setting]
    assert main(ppo(run_dir, *words)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert lines and not any("Traceback" in line or line.startswith("  ") for line in lines), lines
    assert all(len(line) < 1000 for line in lines)
    assert not run_dir.exists()
