"""`reward`: how responses are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import PathStr, Section, inherits


class CustomRewardFunctionConfig(Section):
    """A grader of the user's own: (data_source, solution_str, ground_truth, extra_info) -> score."""

    path: PathStr | None = None
    """Python file; null uses the built-in grader of each data source."""
    name: str = "compute_score"
    """Function in it."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""


class RewardManagerModuleConfig(Section):
    """Where a reward manager of the user's own is."""

    path: PathStr | None = None
    """Python file."""
    name: str = "custom_reward_manager"
    """Class in it."""


class RewardManagerConfig(Section):
    """Who calls the graders."""

    source: Literal["register", "importlib"] = "register"
    """A built-in manager, or a class of your own."""
    name: str = "naive"
    """Built-in manager: naive, or dapo, which penalises length."""
    module: RewardManagerModuleConfig = RewardManagerModuleConfig()
    """A manager of your own."""


class RewardModelConfig(Section):
    """A learned reward model."""

    enable: bool = False
    """Score with a reward model."""
    model_path: PathStr | None = None
    """Hugging Face hub id or directory of a sequence classifier."""
    enable_resource_pool: bool = False
    """Give it devices of its own."""
    n_gpus_per_node: PositiveInt | None = None
    """Devices per node of that pool."""
    nnodes: NonNegativeInt = 0
    """Nodes of that pool."""
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine that serves it."""


class SandboxFusionConfig(Section):
    """Remote sandbox for code answers."""

    url: str | None = None
    """Server address."""
    max_concurrent: PositiveInt = 64
    """Requests in flight."""
    memory_limit_mb: PositiveInt = 1024
    """Memory of one execution."""


class OverlongBufferConfig(Section):
    """DAPO's soft penalty for length."""

    enable: bool = False
    """Penalise training responses that end within the buffer or at the limit (needs reward_manager.name=dapo)."""
    len: PositiveInt = 4096
    """Tokens before the limit from which the penalty grows, from 0 to penalty_factor."""
    penalty_factor: PositiveFloat = 1.0
    """Penalty at the limit."""


class RewardKwargsConfig(Section):
    """Options of reward managers."""

    overlong_buffer_cfg: OverlongBufferConfig = OverlongBufferConfig()
    """dapo: penalty for length."""
    max_resp_len: PositiveInt = inherits("data.max_response_length")
    """dapo: the limit."""


class RewardConfig(Section):
    """Scoring."""

    num_workers: PositiveInt | None = None
    """Grader processes; null takes one per core, at most 8."""
    timeout: PositiveFloat = 10.0
    """Seconds that one sample may take."""
    error_score: float = 0.0
    """Score of a sample whose grader failed or ran out of time (the failure is recorded)."""
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    """A grader of your own."""
    reward_manager: RewardManagerConfig = RewardManagerConfig()
    """Who calls the graders."""
    reward_kwargs: RewardKwargsConfig = Field(default_factory=lambda: RewardKwargsConfig())
    """Options of the reward manager."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A learned reward model."""
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    """Remote sandbox for code answers."""
