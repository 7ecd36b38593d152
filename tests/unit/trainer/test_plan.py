"""What --dry-run prints, asked from those who act."""

import pytest

from valor.config import PPOConfig, RMConfig, SFTConfig, load
from valor.errors import UserError
from valor.lab import arithmetic
from valor.trainer.command import run_command
from valor.trainer.plan import plan

OTB = ["algorithm.adv_estimator=optimal_token_baseline"]


def row(text: str, title: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(title)]
    return line.removeprefix(title).strip()


def step(text: str, phase: str) -> str:
    """What the plan says of a phase; empty where the run has no such."""
    lines = [line.removeprefix("step").strip() for line in text.splitlines()]
    return next((line.partition(": ")[2] for line in lines if line.startswith(f"{phase} (")), "")


def test_batch_arithmetic_in_prompts_samples_and_tokens():
    argv = ["data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    argv += ["actor_rollout_ref.rollout.n=4", "data.max_response_length=1024"]
    text = plan(load(argv).config)
    assert row(text, "batch") == (
        "256 prompts x 4 samples = 1,024 samples/step, at most 512 + 1,024 tokens each = 1,572,864 tokens/step"
    )
    assert "actor: 64-prompt mini-batches = 256 samples -> 4 updates x 1 epoch;" in text
    assert row(text, "length") == "30 epochs x (prompts of an epoch / 256) steps"
    assert step(text, "old_log_prob").startswith("one pass of the actor over the batch")


def test_uneven_mini_batches_and_row_bounds():
    argv = ["data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=30", "critic.ppo_epochs=2"]
    text = plan(load([*argv, "critic.ppo_micro_batch_size_per_gpu=8"]).config)
    assert "actor: 30-prompt mini-batches = 30 samples -> 4 updates (the last one 10 prompts) x 1 epoch" in text
    assert "x 2 epochs; micro-batches of at most 32,768 tokens and 8 samples per process" in text
    assert "30 epochs x (prompts of an epoch / 100) steps" in text


def test_one_update_needs_no_old_log_probs():
    argv = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    alone = plan(load(argv).config)
    assert not step(alone, "old_log_prob") and "the ratio is 1" in step(alone, "update_actor")
    for also in (["algorithm.use_kl_in_reward=true"], [*OTB, "actor_rollout_ref.rollout.n=4"]):
        assert step(plan(load([*argv, *also]).config), "old_log_prob")
    argv.append("algorithm.rollout_correction.bypass_mode=true")
    bypass = plan(load(argv).config)
    assert step(bypass, "rollout_as_old_log_probs") and not step(bypass, "old_log_prob")


def test_rollout_correction_recomputes_and_says_so():
    head = "algorithm.rollout_correction"
    argv = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    argv += [f"{head}.rollout_is=token", f"{head}.rollout_rs=seq_mean_k3", f"{head}.rollout_rs_threshold=0.1"]
    text = plan(load(argv).config)
    assert step(text, "old_log_prob")
    assert step(text, "rollout_correction").startswith("token importance weights, rejection by seq_mean_k3; adds")
    bypass = plan(load([*argv, f"{head}.bypass_mode=true"]).config)
    assert not step(bypass, "old_log_prob") and "rejection by seq_mean_k3" in step(bypass, "update_actor")


def test_the_phases_of_a_step_are_in_the_plan_with_roles_and_columns():
    text = plan(load(["actor_rollout_ref.actor.ppo_mini_batch_size=64"]).config)
    names = [
        line.removeprefix("step").split()[0]
        for line in text.splitlines()[
            text.splitlines().index(next(line for line in text.splitlines() if line.startswith("step"))) :
        ]
        if "): " in line
    ]
    assert names == [
        "values",
        "old_log_prob",
        "old_log_prob_metrics",
        "rewards",
        "advantages",
        "update_critic",
        "update_actor",
        "metrics",
        "samples",
    ]
    assert "values (critic): one pass of the critic over the batch; adds values" in text


def test_roles():
    gae = plan(load(["critic.model.path=small"]).config)
    assert row(gae, "critic") == "small" and row(gae, "algorithm") == "gae, policy loss vanilla"
    assert row(gae, "reference") == "none (no KL term is on)"
    grpo = plan(load(["-cn", "grpo_config", "algorithm.use_kl_in_reward=true"]).config)
    assert row(grpo, "critic") == "none"
    assert row(grpo, "reference").endswith("KL penalty in the reward, KL loss")
    assert row(grpo, "training data").endswith("train.parquet")
    assert row(grpo, "reward").startswith("built in, by column")
    assert row(grpo, "validation").startswith("before the first step, every 5 steps, after the last; 1 response")
    assert row(plan(load(["critic.freeze=true", "critic.model.path=trained"]).config), "critic") == "trained, frozen"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["trainer.device=cuda"], "one process per GPU on this machine; all roles share each process"),
        (["trainer.device=cpu"], "1 CPU process on this machine"),
        (["trainer.device=cpu", "trainer.n_gpus_per_node=2"], "2 CPU processes on this machine"),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=4"], "8 GPUs on each of 4 nodes"),
    ],
)
def test_placement(argv, text):
    assert row(plan(load(argv).config), "placement").startswith(text)


def test_episodes_that_an_environment_judges_have_no_grader():
    argv = ["actor_rollout_ref.rollout.agent.environment=games.py:Hangman"]
    said = row(plan(load(argv).config), "reward")
    assert said.startswith("by the environment games.py:Hangman, else built in, by column")
    replayed = row(plan(load([*argv, "actor_rollout_ref.rollout.agent.replay_dir=d"]).config), "reward")
    assert replayed.startswith("as recorded, else built in")
    assert row(plan(load(["actor_rollout_ref.rollout.multi_turn.enable=true"]).config), "reward").startswith("built in")


def test_sft_plan():
    text = plan(load(["data.train_batch_size=32"], SFTConfig).config)
    assert row(text, "batch").startswith("32 samples per update")
    assert row(text, "length") == "4 epochs x (samples of an epoch / 32) steps"


def test_adapters_are_in_the_plan_and_need_a_rank():
    argv = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.model.lora_adapter_path=a"]
    text = plan(load([*argv, "actor_rollout_ref.model.lora_rank=8"]).config)
    assert row(text, "actor") == "m with LoRA adapters of rank 8 from a"
    assert row(text, "critic") == "m"
    with pytest.raises(UserError, match=r"lora_adapter_path=a needs actor_rollout_ref\.model\.lora_rank"):
        load(argv)


def test_a_run_says_its_plan_before_it_does_anything(tmp_path, capsys):
    said = []

    def start(config, command):
        said.append(capsys.readouterr().out.splitlines())
        return 0

    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": [{"role": "user", "content": "1+1="}], "data_source": "valor/arithmetic", '
        '"reward_model": {"style": "rule", "ground_truth": "2"}}'
    )
    model = arithmetic.make_model(tmp_path / "model")
    argv = ["trainer.total_training_steps=7", f"data.train_files={path}", f"actor_rollout_ref.model.path={model}"]
    argv += [f"critic.model.path={model}", "data.train_batch_size=1", "data.max_response_length=64"]
    argv += ["trainer.num_threads=1"]  # else other work decides
    assert run_command("ppo", PPOConfig, start, argv) == 0
    assert said[0][0] == "the configuration is read; loading torch and what the run needs"
    assert said[0][1].startswith("run ") and row("\n".join(said[0]), "length") == "7 steps"
    assert run_command("ppo", PPOConfig, start, [*argv, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == said[0][1:] and len(said) == 1


def test_who_plays_episodes_with_what_and_how_far():
    multi = "actor_rollout_ref.rollout.multi_turn"
    argv = [f"{multi}.enable=true", f"{multi}.function_tool_path=t.py", f"{multi}.max_user_turns=2"]
    assert row(plan(load(argv).config), "episodes") == "by tool_agent, tools of t.py, at most 3 turns in 512 tokens"
    played = plan(load(["actor_rollout_ref.rollout.agent.environment=games.py:Hangman"]).config)
    assert row(played, "episodes").endswith("games.py:Hangman, any number of turns that fit in 512 tokens")
    searched = row(plan(load(["do_search=true", "max_turns=4"]).config), "episodes")
    assert "searches in http://127.0.0.1:8000/retrieve, at most 5 turns" in searched
    assert "\nepisodes" not in plan(load([]).config)


def test_the_length_counts_the_rows_that_are_there(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "p{i}", "answer": "a"}}\n' for i in range(70)))
    keys = [f"data.train_files={file}", "data.train_batch_size=32", "trainer.total_epochs=3"]
    assert row(plan(load(keys).config), "length") == "6 steps: 3 epochs of 70 prompts, 32 at a time, 6 left out of each"
    in_order = plan(load([*keys, "data.shuffle=false"]).config)
    assert row(in_order, "length").endswith("32 at a time, the last 6 never (data.shuffle=false)")
    assert row(plan(load([*keys, "data.sampler.difficulty.enable=true"]).config), "length").endswith("at a time")
    own = ["data.sampler.class_path=x.py", "data.sampler.class_name=X"]  # as long as it says
    assert row(plan(load([*keys, *own]).config), "length") == "3 epochs x (prompts of an epoch / 32) steps"
    pairs = [f"data.train_files={file}", "data.train_batch_size=32", "data.val_share=0.1"]
    held_out = "about 1 step: 1 epoch of about 63 pairs, 32 at a time"
    assert row(plan(load(pairs, RMConfig).config), "length") == held_out
    few = plan(load([*keys, "data.train_max_samples=33"]).config)
    assert row(few, "length") == "3 steps: 3 epochs of 33 prompts, 32 at a time, 1 left out of each"
