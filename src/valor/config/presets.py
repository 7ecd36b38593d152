"""The named configurations: the defaults of a tree, and presets that differ from them in a few keys."""

from functools import cache
from typing import Any

from pydantic import BaseModel

from valor.config.base import Section
from valor.config.critic_runs import CriticPretrainConfig, CriticScoreConfig, CriticSearchConfig
from valor.config.evaluation import EvalConfig
from valor.config.inheritance import inherited_from
from valor.config.ppo import PPOConfig
from valor.config.supervised import RMConfig, SFTConfig
from valor.config.tree import nested, plain_keys

DEFAULTS: dict[type[BaseModel], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    CriticPretrainConfig: "critic_pretrain",
    CriticScoreConfig: "critic_score",
    CriticSearchConfig: "critic_search",
    EvalConfig: "eval",
}
"""Name of each tree's defaults, for the `defaults:` list of a yaml file."""
COMMANDS: dict[str, type[Section]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rm train": RMConfig,
    "critic pretrain": CriticPretrainConfig,
    "critic score": CriticScoreConfig,
    "critic search": CriticSearchConfig,
    "eval": EvalConfig,
}
"""The tree of each command, as `valor` calls it."""

ESTIMATOR = "algorithm.adv_estimator"
_GROUPS = {"actor_rollout_ref.rollout.n": 8}
_UNNORMED = {
    "algorithm.norm_adv_by_std_in_grpo": False,
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {ESTIMATOR: "gae"},
    "grpo": {ESTIMATOR: "grpo", **_GROUPS},
    "dr_grpo": {ESTIMATOR: "grpo", **_GROUPS, **_UNNORMED},
    "rloo": {ESTIMATOR: "rloo", **_GROUPS},
}
"""What `algorithm=NAME` sets where nothing else does; of another name the estimator alone."""

_GSM8K = {
    "data.train_files": "~/data/gsm8k/train.parquet",
    "data.val_files": "~/data/gsm8k/test.parquet",
    "data.train_batch_size": 256,
    "data.filter_overlong_prompts": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "trainer.total_epochs": 15,
    "trainer.save_freq": 20,
    "trainer.test_freq": 5,
}
_GRPO = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "trainer.experiment_name": "grpo_gsm8k",
}
_EVPO = {"algorithm.adv_estimator": "evpo", "trainer.experiment_name": "evpo_gsm8k"}
_VAPO = {
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.positive_nll_coef": 0.1,
    "algorithm.lam_critic": 1.0,
    "algorithm.adaptive_lam_alpha": 0.05,
    "critic.optim.lr": 2e-6,
    "critic.unclipped_steps": ["1-50"],
    "trainer.critic_warmup": 50,
    "trainer.experiment_name": "vapo_gsm8k",
}
_SFT = {
    "data.val_files": "~/data/gsm8k_sft/test.parquet",
    "optim.lr_scheduler_type": "cosine",
    "optim.lr_warmup_steps_ratio": 0.03,
    "trainer.experiment_name": "sft_gsm8k",
}
PRESETS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "ppo_config": (PPOConfig, _GSM8K | {"trainer.experiment_name": "ppo_gsm8k"}),
    "grpo_config": (PPOConfig, _GSM8K | _GRPO),
    "ppo_megatron_trainer": (PPOConfig, {"actor_rollout_ref.actor.strategy": "megatron"}),
    "evpo_config": (PPOConfig, _GSM8K | _EVPO),
    "vapo_config": (PPOConfig, _GSM8K | _VAPO),
    "sft_config": (SFTConfig, _SFT),
}
"""Each preset: its tree, and what it sets."""


@cache
def default_tree(root: type[BaseModel]) -> dict[str, Any]:
    """Every key with its default; an inheriting key is an interpolation of its source, a derived one null.

    One object for all callers: read it, do not change it.
    """
    defaults = {key: None if key.declared("derived") else key.default for key in plain_keys(root)}
    plain = {key: list(default) if isinstance(default, tuple) else default for key, default in defaults.items()}
    return nested({key.name: inherited_from(key) or default for key, default in plain.items()})


def config_nodes(root: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The named configurations of one tree, as Hydra stores them."""
    presets = {name: nested(flat) for name, (tree, flat) in PRESETS.items() if tree is root}
    based = {name: {"defaults": [DEFAULTS[root], "_self_"], **tree} for name, tree in presets.items()}
    return {DEFAULTS[root]: default_tree(root), **based}
