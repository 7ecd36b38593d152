"""What --dry-run prints, settings without effect, and things that are not built yet."""

import pytest

from valor.config import PPOConfig, SFTConfig, inert_settings, load, plan, unavailable_settings
from valor.config.inert import TABLE as INERT
from valor.config.names import all_keys
from valor.config.tree import walk_keys
from valor.config.unavailable import TABLE as UNAVAILABLE
from valor.errors import UserError


def row(text: str, title: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(title)]
    return line.removeprefix(title).strip()


def test_batch_arithmetic_in_prompts_samples_and_tokens():
    argv = ["data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    argv += ["actor_rollout_ref.rollout.n=4", "data.max_response_length=1024"]
    text = plan(load(argv).config, num_train_prompts=7473)
    assert row(text, "batch") == (
        "256 prompts x 4 samples = 1,024 samples/step, at most 512 + 1,024 tokens each = 1,572,864 tokens/step"
    )
    assert "actor: 64-prompt mini-batches = 256 samples -> 4 updates x 1 epoch;" in text
    assert row(text, "length") == "30 epochs x 29 steps = 870 steps"
    assert row(text, "old log-probs") == "recomputed once per step"


def test_uneven_mini_batches_and_row_bounds():
    argv = ["data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=30", "critic.ppo_epochs=2"]
    text = plan(load([*argv, "critic.ppo_micro_batch_size_per_gpu=8"]).config)
    assert "actor: 30-prompt mini-batches = 30 samples -> 4 updates (the last one 10 prompts) x 1 epoch" in text
    assert "x 2 epochs; micro-batches of at most 32,768 tokens and 8 samples per process" in text
    assert "30 epochs x (prompts in the training data / 100) steps" in text


def test_one_update_needs_no_old_log_probs():
    argv = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    assert row(plan(load(argv).config), "old log-probs").startswith("none needed")
    argv.append("algorithm.rollout_correction.bypass_mode=true")
    assert row(plan(load(argv).config), "old log-probs") == "the rollout's own (bypass_mode)"


def test_rollout_correction_recomputes_and_says_so():
    head = "algorithm.rollout_correction"
    argv = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    argv += [f"{head}.rollout_is=token", f"{head}.rollout_rs=seq_mean_k3", f"{head}.rollout_rs_threshold=0.1"]
    said = row(plan(load(argv).config), "old log-probs")
    assert said == "recomputed once per step, token importance weights and rejection by seq_mean_k3"
    bypass = row(plan(load([*argv, f"{head}.bypass_mode=true"]).config), "old log-probs")
    assert bypass == "the rollout's own (bypass_mode), rejection by seq_mean_k3 before each update"


def test_roles():
    gae = plan(load(["critic.model.path=small", "algorithm.lam_critic=0.9", "trainer.critic_warmup=5"]).config)
    assert row(gae, "critic").startswith("small, AdamW lr 1e-05")
    assert "lambda 1 (critic 0.9)" in gae and "the first 5 steps train the critic alone" in gae
    assert row(gae, "reference") == "none (no KL term is on)"
    grpo = plan(load(["-cn", "grpo_config", "algorithm.use_kl_in_reward=true"]).config)
    assert row(grpo, "critic") == "none"
    assert row(grpo, "reference").endswith("fixed KL penalty 0.001 in the reward, KL loss 0.001 (low_var_kl)")
    assert row(grpo, "validation").startswith("before the first step, every 5 steps, after the last; 1 response")
    split = plan(load(["actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"]).config)
    assert row(split, "actor").endswith("tensor parallel over 2") and "own weights" in row(split, "rollout")
    assert "frozen" in row(plan(load(["critic.freeze=true", "critic.model.path=trained"]).config), "critic")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "one process per GPU, or one CPU process where there is none, on this machine; all roles share"),
        (["trainer.device=cpu"], "one CPU process, on this machine"),
        (["trainer.device=cpu", "trainer.n_gpus_per_node=2"], "2 CPU processes on this machine"),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=4"], "8 GPUs on each of 4 nodes = 32"),
    ],
)
def test_placement(argv, text):
    assert row(plan(load(argv).config), "placement").startswith(text)


def test_sft_plan():
    text = plan(load(["data.train_batch_size=32"], SFTConfig).config, num_train_prompts=100)
    assert row(text, "batch").startswith("32 samples per update")
    assert row(text, "length") == "4 epochs x 3 steps = 12 steps"


def test_settings_without_effect_are_listed_with_their_reason():
    argv = ["actor_rollout_ref.rollout.gpu_memory_utilization=0.4", "algorithm.adv_estimator=grpo", "critic.optim.lr=1"]
    loaded = load([*argv, "actor_rollout_ref.rollout.n=4", "trainer.test_freq=5"])
    inert = inert_settings(loaded.config, loaded.explicit_keys)
    assert inert == [
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "no effect with rollout.name=native"),
        ("critic.optim.lr", "no effect: this run has no critic"),
        ("trainer.test_freq", "no effect: data.val_files is not set"),
    ]
    assert "gpu_memory_utilization: no effect with rollout.name=native" in plan(loaded.config, loaded.explicit_keys)
    assert inert_settings(SFTConfig(), {"trainer.seed"}) == []


def test_keys_that_act_are_not_listed():
    acting = [
        "data.val_files=v",
        "trainer.test_freq=5",
        "critic.optim.lr=1e-5",
        "actor_rollout_ref.rollout.max_num_seqs=8",
    ]
    loaded = load([*acting, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"])
    assert inert_settings(loaded.config, loaded.explicit_keys) == []


def test_a_server_has_options_of_its_own():
    key = "actor_rollout_ref.rollout"
    asked = [f"{key}.name=server", f"{key}.server.base_url=http://h:1/v1"]
    more = [f"{key}.max_num_seqs=8", f"{key}.dtype=float32", f"{key}.enforce_eager=true", f"{key}.max_model_len=9000"]
    loaded = load([*asked, *more])
    assert row(plan(loaded.config), "rollout") == "server (http://h:1/v1, synced every step), temperature 1"
    inert = inert_settings(loaded.config, loaded.explicit_keys)
    assert [found for found, _ in inert] == [f"{key}.enforce_eager", f"{key}.max_model_len"]
    assert all(reason == "no effect with rollout.name=server: the server has options of its own" for _, reason in inert)
    loaded = load([*asked, *more[:2], f"{key}.server.weight_updates=none", f"{key}.server.weights_dir=w"])
    assert "which keeps its weights" in row(plan(loaded.config), "rollout")
    inert = inert_settings(loaded.config, loaded.explicit_keys)
    assert [found for found, _ in inert] == [f"{key}.dtype", f"{key}.server.weights_dir"]
    loaded = load(asked[1:])
    assert inert_settings(loaded.config, loaded.explicit_keys) == [
        (f"{key}.server.base_url", "no effect: rollout.name is not server")
    ]


def test_a_default_run_asks_for_nothing_unavailable():
    assert unavailable_settings(PPOConfig()) == [] and unavailable_settings(SFTConfig()) == []


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.do_sample=false",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "critic.checkpoint.load_contents=[model,optimizer]",
        "critic.checkpoint.async_save=true",
        "reward.reward_manager.name=gdpo",
        "data.custom_cls.path=x.py",
    ],
)
def test_unavailable_features_are_one_line(override):
    dry = load([override, "--dry-run"])
    [line] = dry.unavailable
    assert " is not available in this version: " in line and override.partition("=")[0] in line
    assert row(plan(dry.config), "stops here") == line


def test_what_a_dry_run_shows_a_run_raises():
    argv = ["actor_rollout_ref.rollout.name=sglang", "critic.checkpoint.async_save=true"]
    with pytest.raises(UserError) as caught:
        load(argv)
    assert str(caught.value).splitlines() == list(load([*argv, "--dry-run"]).unavailable)


def test_one_line_per_feature_not_per_key():
    argv = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
    loaded = load([*argv, "actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4", "--dry-run"])
    [line] = loaded.unavailable
    assert line == (
        "The Megatron backend is not available in this version: use strategy=fsdp2 and no megatron_config "
        "(actor_rollout_ref.actor.strategy='megatron', "
        'actor_rollout_ref.actor.megatron_config={"tensor_model_parallel_size": 4})'
    )


def test_every_pattern_of_the_tables_matches_a_key():
    from fnmatch import fnmatchcase

    engine_kwargs = [f"actor_rollout_ref.rollout.engine_kwargs.{engine}.x" for engine in ("vllm", "sglang")]
    keys = [*all_keys(PPOConfig), *all_keys(SFTConfig), *engine_kwargs]
    patterns = [entry.pattern for entry in UNAVAILABLE] + [p for entry in INERT for p in entry.patterns]
    assert [p for p in patterns if not any(fnmatchcase(key, p) for key in keys)] == []


def test_number_of_keys_stays_readable():
    assert len(list(walk_keys(PPOConfig))) < 360


def test_estimators_without_lambda_are_those_that_take_none():
    from valor.algorithms import ADVANTAGES, advantage_options
    from valor.config.inert import CRITIC_FREE

    without = {n for n in ADVANTAGES.names() if ADVANTAGES[n].builtin and "lam_actor" not in advantage_options(n)}
    assert without == CRITIC_FREE


def test_adapters_are_in_the_plan_and_need_a_rank():
    argv = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.model.lora_adapter_path=a"]
    text = plan(load([*argv, "actor_rollout_ref.model.lora_rank=8"]).config)
    assert row(text, "actor").startswith("m with LoRA adapters of rank 8 from a, ")
    assert row(text, "critic").startswith("m, ")
    with pytest.raises(UserError, match=r"lora_adapter_path=a needs actor_rollout_ref\.model\.lora_rank"):
        load(argv)


def test_a_reference_without_weights_of_its_own_has_no_precision():
    argv = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.dtype=float32"]
    loaded = load([*argv, "actor_rollout_ref.model.lora_rank=8"])
    [(key, reason)] = inert_settings(loaded.config, loaded.explicit_keys)
    assert key == argv[1].partition("=")[0] and reason.endswith("the actor without its adapters")
    assert inert_settings(load(argv).config, loaded.explicit_keys) == []
