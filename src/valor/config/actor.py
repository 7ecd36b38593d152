"""`actor_rollout_ref.actor` and `actor_rollout_ref.ref`: the policy's update and the reference model."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from valor.config.base import Section, Seed, inherits, key, section
from valor.config.engine import CheckpointConfig, FSDPConfig, OptimConfig

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]

_EXACT = {"needs_ref_log_probs": "the reference takes the actor's micro-batches with the exact KL"}
_OWN_WEIGHTS = {"ref_has_weights": "with lora_rank the reference is the actor without its adapters"}
KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
KLKind = Literal[KLEstimator, "full"]


class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: str = "vanilla"
    """Name of a registered policy loss; vanilla is PPO's clipped loss."""
    loss_kwargs: dict[str, Any] = key({})
    """Options that only some losses take, such as dro_beta, kl_cov_ratio, tau_pos, or those of your own."""


class UpdateConfig(Section):
    """An update by mini-batches, each an optimizer step over micro-batches: what actor and critic share."""

    strategy: str = "fsdp2"
    """Training engine: fsdp2."""
    ppo_mini_batch_size: PositiveInt = 256
    """PROMPTS per optimizer step (times rollout.n samples); at most data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Most samples in a micro-batch of one process; null leaves it to the token budget."""
    use_dynamic_bsz: bool = False
    """true: form micro-batches by tokens alone, whatever ppo_micro_batch_size_per_gpu says."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens (padding included) in a micro-batch of one process; one longer sample goes alone."""
    ppo_epochs: PositiveInt = 1
    """Passes over each training batch."""
    shuffle: bool = False
    """Draw mini-batches in random order."""
    data_loader_seed: Seed = inherits("trainer.seed")
    """Seed of that order."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; denominators count the whole mini-batch."""
    loss_scale_factor: PositiveFloat = inherits("data.max_response_length")
    """seq-mean-token-sum-norm: divisor of each sequence's sum."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Processes that share their rows, each a part of every row (Ulysses); must divide the attention heads."""
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    @property
    def max_rows(self) -> int | None:
        """Upper bound on the rows of a micro-batch; None when tokens alone decide."""
        return None if self.use_dynamic_bsz else self.ppo_micro_batch_size_per_gpu


class ActorConfig(UpdateConfig):
    """The policy's update."""

    clip_ratio: NonNegativeFloat = 0.2
    """PPO clip range: the ratio is kept within 1 - clip_ratio_low and 1 + clip_ratio_high."""
    clip_ratio_low: NonNegativeFloat = inherits(".clip_ratio")
    """Lower clip range."""
    clip_ratio_high: NonNegativeFloat = inherits(".clip_ratio")
    """Upper clip range (larger than the lower one in DAPO's clip-higher)."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip: bound of the ratio where the advantage is negative."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Compute and log the entropy although entropy_coeff is 0."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss."""
    kl_loss_coef: float = key(0.001, ".use_kl_loss")
    """Weight of that term."""
    kl_loss_type: KLKind = key("low_var_kl", ".use_kl_loss")
    """KL estimator of that term; full is the exact divergence, by a pass of the reference beside the actor's."""

    @property
    def exact_kl_loss(self) -> bool:
        """Whether the loss has the exact KL, which needs no log-probs of the reference."""
        return self.use_kl_loss and self.kl_loss_type == "full"


class RefFSDPConfig(
    FSDPConfig,
    model_dtype=inherits("actor_rollout_ref.actor.fsdp_config.model_dtype"),
    dtype=inherits("actor_rollout_ref.actor.fsdp_config.dtype"),
):
    """The reference model's sharding; its precision follows the actor's, so that their KL starts at zero."""


class RefConfig(Section):
    """The frozen reference model (present when a KL term needs it)."""

    strategy: str = inherits("actor_rollout_ref.actor.strategy")
    """Engine: fsdp2."""
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, _OWN_WEIGHTS)
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = key(None, _EXACT)
    """Most samples in a forward micro-batch of one process; null leaves it to the token budget."""
    log_prob_use_dynamic_bsz: bool = inherits("actor_rollout_ref.actor.use_dynamic_bsz", _EXACT)
    """true: form micro-batches by tokens alone."""
    log_prob_max_token_len_per_gpu: PositiveInt = inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", _EXACT)
    """Most tokens (padding included) in a forward micro-batch of one process."""
    ulysses_sequence_parallel_size: PositiveInt = inherits("actor_rollout_ref.actor.ulysses_sequence_parallel_size")
    """Processes that share their rows, each a part of every row (Ulysses); must divide the attention heads."""

    @property
    def max_rows(self) -> int | None:
        """Upper bound on the rows of a forward micro-batch; None when tokens alone decide."""
        return None if self.log_prob_use_dynamic_bsz else self.log_prob_micro_batch_size_per_gpu
