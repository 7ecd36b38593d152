"""Null means: the value of the key that the field names."""

import re

import pytest

from valor.config import ActorConfig, CriticConfig, PPOConfig, RolloutConfig, SFTConfig, load
from valor.config.inheritance import fill_inherited, inherited_from, lookup, single_source
from valor.config.tree import fields, flatten, get_at, schema
from valor.errors import UserError


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_every_source_is_a_key(root):
    for key in fields(root).values():
        for source in re.findall(r"\$\{(.*?)\}", inherited_from(key) or ""):
            assert source in fields(root), f"{key.name} inherits from {source}"


def test_a_chain_is_followed_to_its_end():
    tree = {"data": {"max_response_length": 64}, "trainer": {"seed": 7}, "algorithm": {"lam": 0.9, "lam_actor": None}}
    config = PPOConfig.model_validate(tree)
    assert config.actor_rollout_ref.actor.loss_scale_factor == 64
    assert config.actor_rollout_ref.rollout.max_model_len == 512 + 64
    assert config.data.seed == 7
    assert (config.algorithm.lam_actor, config.algorithm.lam_critic) == (0.9, 0.9)


def test_clip_bounds_inherit_clip_ratio_and_a_given_one_stays():
    actor = {"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": 0.28}
    config = PPOConfig.model_validate({"actor_rollout_ref": {"actor": actor}}).actor_rollout_ref.actor
    assert (config.clip_ratio_low, config.clip_ratio_high) == (0.1, 0.28)
    assert ActorConfig(clip_ratio=0.3).clip_ratio_low == 0.3


def test_the_critic_follows_the_actor():
    actor = {"ppo_mini_batch_size": 8, "ppo_epochs": 3, "fsdp_config": {"dtype": "float32"}}
    tree = {"actor_rollout_ref": {"model": {"path": "m"}, "actor": actor}, "critic": {"ppo_epochs": 1}}
    config = PPOConfig.model_validate(tree)
    critic = config.critic
    assert (critic.model.path, critic.ppo_mini_batch_size, critic.ppo_epochs) == ("m", 8, 1)
    assert critic.fsdp_config.dtype == config.actor_rollout_ref.ref.fsdp_config.dtype == "float32"
    assert config.actor_rollout_ref.rollout.dtype == "float32"
    assert (critic.optim.lr, config.actor_rollout_ref.actor.optim.lr) == (1e-5, 1e-6)


@pytest.mark.parametrize(
    ("algorithm", "critic", "enabled"),
    [
        ({}, {}, True),
        ({"adv_estimator": "gae"}, {"enable": None}, True),
        ({"adv_estimator": "grpo"}, {}, False),
        ({"adv_estimator": "grpo"}, {"enable": True}, True),
        ({"adv_estimator": "gae"}, {"enable": False}, False),
    ],
)
def test_critic_is_enabled_by_the_estimator(algorithm, critic, enabled):
    assert PPOConfig.model_validate({"algorithm": algorithm, "critic": critic}).critic.enable is enabled


def test_run_folder_is_made_of_names():
    trainer = {"project_name": "p", "experiment_name": "e"}
    assert PPOConfig.model_validate({"trainer": trainer}).trainer.default_local_dir == "checkpoints/p/e"
    assert SFTConfig.model_validate({"trainer": trainer}).trainer.default_local_dir == "checkpoints/p/e"
    assert SFTConfig().trainer.default_local_dir == "checkpoints/valor/sft"


def test_sections_alone_stand_on_the_default_tree():
    assert CriticConfig() == PPOConfig().critic
    assert RolloutConfig() == PPOConfig().actor_rollout_ref.rollout


def test_sections_given_as_objects_are_filled_too():
    config = PPOConfig.model_validate({"actor_rollout_ref": {"actor": ActorConfig(ppo_mini_batch_size=4)}})
    assert config.critic.ppo_mini_batch_size == 4


def test_filling_leaves_the_given_tree_alone():
    tree = {"data": {"max_response_length": 5}}
    filled = fill_inherited(PPOConfig, tree)
    assert tree == {"data": {"max_response_length": 5}}
    assert filled["actor_rollout_ref"]["actor"]["loss_scale_factor"] == 5
    assert lookup(PPOConfig, tree, "actor_rollout_ref.actor.loss_scale_factor") == 5
    assert lookup(PPOConfig, tree, "no.such.key") is None


def test_what_follows_is_no_key_and_has_its_sources_value():
    following = [key for key in fields(PPOConfig).values() if key.declared("hidden")]
    assert len(following) > 40 and not {key.name for key in following} & schema(PPOConfig).keys()
    actor = {"fsdp_config": {"fsdp_size": 4, "param_offload": True}, "use_dynamic_bsz": True, "strategy": "megatron"}
    actor["megatron"] = {"context_parallel_size": 2}
    config = PPOConfig.model_validate({"actor_rollout_ref": {"actor": actor}})
    ref, critic = config.actor_rollout_ref.ref, config.critic
    assert ref.fsdp_config.fsdp_size == critic.fsdp_config.fsdp_size == 4
    assert (ref.strategy, ref.max_rows, ref.megatron.sizes["context"]) == ("megatron", None, 2)
    assert config.actor_rollout_ref.actor.megatron.param_offload and not ref.megatron.param_offload
    for key in following:
        source = single_source(key)
        assert source is None or get_at(config, key.name) == get_at(config, source), key.name
    dumped = flatten(config.model_dump())
    assert not any(key.name in dumped for key in following)
    assert PPOConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    "typed",
    [
        "actor_rollout_ref.actor.fsdp_config.dtype=float16",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=0",
    ],
)
def test_a_wrong_value_is_told_where_it_was_typed_alone(typed):
    """Not of the keys that follow it, some of which no user sets."""
    with pytest.raises(UserError) as caught:
        load([typed])
    assert str(caught.value).startswith(typed.partition("=")[0]) and "\n" not in str(caught.value)
