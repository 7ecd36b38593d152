"""The named configurations: the defaults of a tree, and presets that differ from them in a few keys."""

from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel

from valor.config.critic_runs import CriticPretrainConfig, CriticScoreConfig
from valor.config.ppo import PPOConfig
from valor.config.supervised import RMConfig, SFTConfig
from valor.config.tree import nested, plain_keys

DEFAULTS: dict[type[BaseModel], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    CriticPretrainConfig: "critic_pretrain",
    CriticScoreConfig: "critic_score",
}
"""Name of each tree's defaults, for the `defaults:` list of a yaml file."""

_GSM8K = """data.train_files: ~/data/gsm8k/train.parquet
data.val_files: ~/data/gsm8k/test.parquet
data.train_batch_size: 256
data.filter_overlong_prompts: true
actor_rollout_ref.actor.ppo_mini_batch_size: 64
trainer.total_epochs: 15
trainer.save_freq: 20
trainer.test_freq: 5
"""
_PPO = """algorithm.adv_estimator: gae
trainer.experiment_name: ppo_gsm8k
"""
_GRPO = """algorithm.adv_estimator: grpo
actor_rollout_ref.rollout.n: 5
actor_rollout_ref.actor.use_kl_loss: true
actor_rollout_ref.actor.kl_loss_coef: 0.001
actor_rollout_ref.actor.kl_loss_type: low_var_kl
trainer.experiment_name: grpo_gsm8k
"""
_SFT = """data.train_files: ~/data/gsm8k_sft/train.parquet
data.val_files: ~/data/gsm8k_sft/test.parquet
optim.lr_scheduler_type: cosine
optim.lr_warmup_steps_ratio: 0.03
trainer.experiment_name: sft_gsm8k
"""
PRESETS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "ppo_config": (PPOConfig, yaml.safe_load(_GSM8K + _PPO)),
    "grpo_config": (PPOConfig, yaml.safe_load(_GSM8K + _GRPO)),
    "sft_config": (SFTConfig, yaml.safe_load(_SFT)),
}
"""Each preset: its tree, and what it sets."""


@cache
def default_tree(root: type[BaseModel]) -> dict[str, Any]:
    """Every key with its default; an inheriting key is an interpolation of its source, a derived one null.

    One object for all callers: read it, do not change it.
    """
    flat: dict[str, Any] = {}
    for key in plain_keys(root):
        source, default = key.inherits, key.info.get_default(call_default_factory=key.inherits is None)
        if source is not None:
            flat[key.name] = source if "${" in source else f"${{{source}}}"
        elif key.declared("derived"):
            flat[key.name] = None
        else:
            flat[key.name] = list(default) if isinstance(default, tuple) else default
    return nested(flat)


def config_nodes(root: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The named configurations of one tree, as Hydra stores them."""
    nodes = {DEFAULTS[root]: default_tree(root)}
    for name, (tree, flat) in PRESETS.items():
        if tree is root:
            nodes[name] = {"defaults": [DEFAULTS[root], "_self_"], **nested(flat)}
    return nodes
