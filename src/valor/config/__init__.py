"""The typed config tree: every key, its type, default and meaning; composition and one-line errors."""

from valor.config.actor import ActorConfig, PolicyLossConfig, RefConfig
from valor.config.algorithm import AlgorithmConfig, KLControlConfig, PFPPOConfig, RolloutCorrectionConfig
from valor.config.base import Section
from valor.config.critic import CriticConfig
from valor.config.critic_runs import CriticPretrainConfig, CriticRunConfig, CriticScoreConfig
from valor.config.data import DataConfig
from valor.config.describe import describe_keys
from valor.config.engine import CheckpointConfig, FSDPConfig, OptimConfig
from valor.config.inert import inert_settings
from valor.config.loading import LoadedConfig, load, load_runs
from valor.config.model import BackboneConfig, CriticModelConfig, ModelConfig
from valor.config.pools import PoolConfig
from valor.config.ppo import ActorRolloutRefConfig, PPOConfig, RayKwargsConfig
from valor.config.reward import RewardConfig, RewardModelConfig
from valor.config.rm import RMConfig, RMDataConfig, RMLossConfig
from valor.config.rollout import RolloutConfig, ValidationSamplingConfig
from valor.config.sft import SFTConfig, SFTDataConfig, SFTTrainerConfig
from valor.config.supervised import SupervisedConfig, SupervisedDataConfig
from valor.config.trainer import RunConfig, TrainerConfig
from valor.config.unavailable import unavailable_settings
from valor.config.yaml_files import dump_yaml, load_yaml

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "BackboneConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CriticPretrainConfig",
    "CriticRunConfig",
    "CriticScoreConfig",
    "DataConfig",
    "FSDPConfig",
    "KLControlConfig",
    "LoadedConfig",
    "ModelConfig",
    "OptimConfig",
    "PFPPOConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "PoolConfig",
    "RMConfig",
    "RMDataConfig",
    "RMLossConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "Section",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "TrainerConfig",
    "ValidationSamplingConfig",
    "describe_keys",
    "dump_yaml",
    "inert_settings",
    "load",
    "load_runs",
    "load_yaml",
    "unavailable_settings",
]
