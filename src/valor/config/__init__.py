"""The typed config tree: every key, its type, default and meaning; composition and one-line errors."""

from valor.config.actor import ActorConfig, CriticConfig, UpdateConfig
from valor.config.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig
from valor.config.base import Section
from valor.config.critic_runs import (
    CriticPretrainConfig,
    CriticRunConfig,
    CriticScoreConfig,
    CriticSearchConfig,
    held_out,
)
from valor.config.data import DataConfig
from valor.config.describe import describe_commands, describe_keys
from valor.config.engine import BackboneConfig, CriticModelConfig, FSDPConfig, ModelConfig
from valor.config.evaluation import EvalConfig
from valor.config.loading import LoadedConfig, dump_yaml, inert_settings, load, load_yaml
from valor.config.ppo import ActorRolloutRefConfig, PPOConfig
from valor.config.reward import RewardConfig, RewardModelConfig
from valor.config.rollout import RolloutConfig
from valor.config.supervised import RMConfig, RMDataConfig, SFTConfig, SFTDataConfig, SupervisedConfig
from valor.config.trainer import RunConfig, TrainerConfig

__all__ = ["ActorConfig", "ActorRolloutRefConfig", "AlgorithmConfig", "BackboneConfig", "CriticConfig"]
__all__ += ["CriticModelConfig", "CriticPretrainConfig", "CriticRunConfig", "CriticScoreConfig", "CriticSearchConfig"]
__all__ += ["DataConfig", "EvalConfig", "FSDPConfig", "KLControlConfig", "LoadedConfig", "ModelConfig", "PPOConfig"]
__all__ += ["RMConfig", "RMDataConfig", "RewardConfig", "RewardModelConfig", "RolloutConfig", "RolloutCorrectionConfig"]
__all__ += ["RunConfig", "SFTConfig", "SFTDataConfig", "Section", "SupervisedConfig", "TrainerConfig", "UpdateConfig"]
__all__ += ["describe_commands", "describe_keys", "dump_yaml", "held_out", "inert_settings", "load", "load_yaml"]
