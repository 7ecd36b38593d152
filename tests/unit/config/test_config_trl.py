"""TRL's words for settings, names of algorithms, and sizes that follow the batch."""

import re

import pytest

from valor.config import PPOConfig, RMConfig, SFTConfig, load
from valor.config.tree import exists, get_at, is_section
from valor.config.trl import TABLE
from valor.config.verl import SPELLINGS
from valor.errors import UserError

ROWS = [rule for rule in SPELLINGS if "." not in rule.pattern and re.search(rf"\b{rule.pattern}\b", TABLE)]
READ = sorted({rule.pattern for rule in ROWS if rule.target and rule.value is None})
ANSWERED = sorted({rule.pattern for rule in ROWS if rule.answered})
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, RMConfig])
@pytest.mark.parametrize("word", READ)
def test_each_word_is_read_as_a_key_or_unknown_to_the_command(word, root):
    texts = ("output_dir", "run_name", "lora_target_modules", "chat_template_path", "vllm_server_base_url")
    value = {"lr_scheduler_type": "linear", "delta": 4, "vllm_max_model_length": 4096, **dict.fromkeys(texts, "o")}.get(
        word, 1
    )
    targets = [rule.target for rule in ROWS if rule.pattern == word and rule.target and rule.value is None]
    assert any(
        exists(root, target) and not is_section(root, target)
        for root in (PPOConfig, SFTConfig, RMConfig)
        for target in targets
    )
    if not any(exists(root, target) for target in targets):
        with pytest.raises(UserError, match=f"unknown key '{word}'|^{word}="):
            load([f"{word}={value}"], root)
        return
    switches = ("gradient_checkpointing", "scale_rewards", "shuffle_dataset", "trust_remote_code", "use_liger_kernel")
    value = "true" if word in switches else value
    loaded = load([f"{word}={value}"], root)
    (key,) = [target for target in targets if exists(root, target)]
    assert str(get_at(loaded.config, key)).lower() in (str(value), f"{value}.0", f"['{value}']")
    assert any(note.startswith(f"{word} is read as {key}") for note in loaded.notes) and key in loaded.explicit_keys


@pytest.mark.parametrize("word", ANSWERED)
def test_each_other_word_is_answered_with_keys_that_exist(word):
    with pytest.raises(UserError) as caught:
        load([f"{word}=7"])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{word}=7: ")
    named = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", line)
    ends = {
        key
        for root in (PPOConfig, SFTConfig)
        for key in (
            f"{prefix}{name}" for name in named for prefix in ("", "actor_rollout_ref.actor.", "actor_rollout_ref.")
        )
        if exists(root, key)
    }
    assert all(any(key.endswith(name) for key in ends) for name in named)


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--config-name=grpo_config", "beta=0.0"], "actor_rollout_ref.actor.use_kl_loss", False),
        (["algorithm=dr_grpo", "scale_rewards=group"], "algorithm.norm_adv_by_std_in_grpo", True),
        (["algorithm=grpo", "scale_rewards=none"], "algorithm.norm_adv_by_std_in_grpo", False),
        (["resume_from_checkpoint=false"], "trainer.resume_mode", "disable"),
        (["lr_scheduler_type=constant_with_warmup"], "actor_rollout_ref.actor.optim.lr_scheduler_type", "constant"),
    ],
)
def test_a_word_at_one_value_sets_what_it_means_whatever_else_would(argv, key, value):
    loaded = load(argv)
    assert get_at(loaded.config, key) == value and key in loaded.explicit_keys
    assert any(f"is {key}={str(value).lower()}" in note for note in loaded.notes)


def test_a_word_that_was_typed_counts_over_a_file_and_a_key_that_was_typed_over_a_files_word(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nnum_generations: 4\nactor_rollout_ref: {actor: {grad_clip: 0.5}}\n"
        "trainer: {total_training_steps: 9}\n"
    )
    mine = [f"--config-path={tmp_path}", "--config-name=mine"]
    assert load(mine).config.actor_rollout_ref.rollout.n == 4
    assert load([*mine, "actor_rollout_ref.rollout.n=3"]).config.actor_rollout_ref.rollout.n == 3
    assert load([*mine, "max_steps=-1"]).config.trainer.total_training_steps is None
    assert load(["--config-name=grpo_config", "num_generations=3"]).config.actor_rollout_ref.rollout.n == 3
    with pytest.raises(UserError, match="are the same setting: give one of them"):
        load(["num_generations=3", "actor_rollout_ref.rollout.n=4"])
    with pytest.raises(UserError, match="are the same setting: give one of them"):
        load(["beta=0", "actor_rollout_ref.actor.use_kl_loss=true"])


@pytest.mark.parametrize("word", ["bf16=false", "bf16=true"])
def test_a_word_of_the_precision_is_never_said_to_be_what_is_done_anyway(word):
    with pytest.raises(UserError, match=r"bf16=\w+: set fsdp_config.dtype=bfloat16 or float32"):
        load([word])
    assert load(["fp16=false"]).notes == ("fp16 has no effect: it is off",)


@pytest.mark.parametrize(
    ("argv", "estimator", "n", "critic"),
    [
        (["algorithm=ppo"], "gae", 1, True),
        (["algorithm.adv_estimator=ppo"], "gae", 1, True),
        (["algorithm=grpo"], "grpo", 8, False),
        (["algorithm=grpo", "num_generations=4"], "grpo", 4, False),
        (["actor_rollout_ref.rollout.n=1", "algorithm=grpo"], "grpo", 1, False),
        (["algorithm.adv_estimator=grpo"], "grpo", 1, False),  # as in verl
        (["algorithm=opo"], "opo", 1, False),
    ],
)
def test_an_algorithm_by_its_name(argv, estimator, n, critic):
    config = load(argv).config
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n, config.critic.enable) == (
        estimator,
        n,
        critic,
    )


def test_dr_grpo_is_grpo_without_its_two_biases():
    config = load(["algorithm=dr_grpo", "algorithm.gamma=0.5"]).config
    assert config.algorithm.adv_estimator == "grpo" and not config.algorithm.norm_adv_by_std_in_grpo
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm" and config.algorithm.gamma == 0.5


def test_two_algorithms_are_a_mistake():
    with pytest.raises(UserError, match=r"algorithm=grpo and algorithm\.adv_estimator=gae are different"):
        load(["algorithm=grpo", "algorithm.adv_estimator=gae"])


@pytest.mark.parametrize(
    ("argv", "actor", "critic"),
    [
        ([], 256, 256),
        (["data.train_batch_size=8"], 8, 8),
        (["data.train_batch_size=512"], 256, 256),
        (["data.train_batch_size=512", f"{MINI}=null"], 512, 512),
        (["data.train_batch_size=8", f"{MINI}=4"], 4, 4),
        (["data.train_batch_size=8", f"{MINI}=4", "critic.ppo_mini_batch_size=null"], 4, 4),
        (["data.train_batch_size=8", "critic.ppo_mini_batch_size=2"], 8, 2),
        (["--config-name=ppo_config", "data.train_batch_size=4"], 4, 4),
    ],
)
def test_a_mini_batch_is_at_most_the_batch_unless_it_is_asked_to_be_more(argv, actor, critic):
    config = load(argv).config
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == actor
    assert config.critic.ppo_mini_batch_size == critic
    with pytest.raises(UserError, match="prompts is more than"):
        load([*argv, f"{MINI}=1025"])
