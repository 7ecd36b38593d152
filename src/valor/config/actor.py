"""`actor_rollout_ref.actor`, `actor_rollout_ref.ref`, `critic`: the policy's update, the reference, the value model."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import (
    PathStr,
    PositiveShare,
    Section,
    StepRanges,
    Strategy,
    follows,
    inherits,
    key,
    section,
    step_range,
)
from valor.config.engine import (
    CheckpointConfig,
    CriticCheckpointConfig,
    CriticFSDPConfig,
    CriticMegatronConfig,
    CriticModelConfig,
    FastOptimConfig,
    FSDPConfig,
    MegatronConfig,
    OptimConfig,
    RefFSDPConfig,
    RefMegatronConfig,
)

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]

_OWN_WEIGHTS = {"ref_has_weights": "with lora_rank the reference is the actor without its adapters"}
_FSDP = ".strategy!=megatron"
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


class RouterReplayConfig(Section):
    """Which experts of a mixture the actor's passes choose."""

    mode: Literal["disabled", "R3"] = "disabled"
    """R3: those that generation chose (rollout.name=native records them); disabled: those of the present router."""


class UpdateConfig(Section):
    """An update by mini-batches, each an optimizer step over micro-batches: what actor and critic share."""

    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 or megatron."""
    ppo_mini_batch_size: PositiveInt = key(256, within="data.train_batch_size")
    """PROMPTS per optimizer step (times rollout.n samples); null, or a smaller batch: data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Most samples in a micro-batch of one process; null leaves it to the token budget."""
    use_dynamic_bsz: bool = False
    """true: form micro-batches by tokens alone, whatever ppo_micro_batch_size_per_gpu says."""
    ppo_max_token_len_per_gpu: PositiveInt = key(16384, derived="16384; on GPUs as many as fit, at most 65536")
    """Most tokens (padding included) in a micro-batch of one process; one longer sample goes alone."""
    ppo_epochs: PositiveInt = 1
    """Passes over each training batch."""
    shuffle: bool = False
    """Put samples into mini-batches in random order."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; denominators count the whole mini-batch."""
    loss_scale_factor: PositiveFloat = inherits("data.max_response_length", ".loss_agg_mode=seq-mean-token-sum-norm")
    """seq-mean-token-sum-norm: divisor of each sequence's sum."""
    freeze_vision_tower: bool = key(False, "data.image_key")
    """Leave the part of the model that reads images as it is."""
    ulysses_sequence_parallel_size: PositiveInt = key(1, _FSDP)
    """Processes that share their rows, each a part of every row (Ulysses); must divide the attention heads."""
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron: MegatronConfig = section(MegatronConfig, ".strategy=megatron")
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    @property
    def max_rows(self) -> int | None:
        """Upper bound on the rows of a micro-batch; None when tokens alone decide."""
        return None if self.use_dynamic_bsz else self.ppo_micro_batch_size_per_gpu

    def contradictions(self, at: str) -> Iterator[str]:
        if self.strategy == "megatron" and self.optim.optimizer != "AdamW":
            yield f"{at}strategy=megatron trains with AdamW: {at}optim.optimizer={self.optim.optimizer} is fsdp2's"


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
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = key(False, ".entropy_coeff=0.0")
    """Compute and log the entropy although entropy_coeff is 0."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss."""
    kl_loss_coef: float = key(0.001, ".use_kl_loss")
    """Weight of that term."""
    kl_loss_type: KLKind = key("low_var_kl", ".use_kl_loss")
    """KL estimator of that term; full is the exact divergence, by a pass of the reference beside the actor's."""

    positive_nll_coef: NonNegativeFloat = key(0.0, "algorithm.reward_source!=critic")
    """Weight of the negative log-likelihood of right answers in the loss (VAPO: 0.1)."""

    @property
    def exact_kl_loss(self) -> bool:
        """Whether the loss has the exact KL, which needs no log-probs of the reference."""
        return self.use_kl_loss and self.kl_loss_type == "full"


class RefConfig(Section):
    """The frozen reference model (present when a KL term needs it): beside the actor, and run as that is."""

    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, _OWN_WEIGHTS)
    megatron: RefMegatronConfig = section(RefMegatronConfig)
    strategy: Strategy = follows("actor_rollout_ref.actor.strategy")
    log_prob_max_token_len_per_gpu: PositiveInt = follows("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = follows(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    )
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    ulysses_sequence_parallel_size: PositiveInt = follows("actor_rollout_ref.actor.ulysses_sequence_parallel_size")

    @property
    def max_rows(self) -> int | None:
        """Upper bound on the rows of a forward micro-batch; None when tokens alone decide."""
        return None if self.log_prob_use_dynamic_bsz else self.log_prob_micro_batch_size_per_gpu


class ProbeConfig(Section):
    """A critic without a model: ridge regression of returns on hidden states of all layers, refitted every step."""

    states: Literal["reference", "policy"] = "reference"
    """Whose hidden states: the starting policy's, which never change, or the present one's, which need no memory."""
    features: Annotated[int, Field(ge=8)] = 256
    """Numbers of a hidden state that are read, all layers together; of more, random sums are."""
    forgetting: PositiveShare = 0.9
    """Weight of all that was seen before a step, in the next one; 1 forgets nothing."""
    path: PathStr | None = None
    """Folder of such a critic to begin with, as a run leaves it in huggingface/critic."""


_A_MODEL = {".kind=model": ""}
_TRAINED = {".kind=model": "", ".freeze=false": ""}


class CriticConfig(
    UpdateConfig,
    strategy=inherits("actor_rollout_ref.actor.strategy", _A_MODEL),
    ppo_mini_batch_size=inherits(
        "actor_rollout_ref.actor.ppo_mini_batch_size", _TRAINED, within="data.train_batch_size"
    ),
    ppo_micro_batch_size_per_gpu=key(None, _A_MODEL),
    use_dynamic_bsz=follows("actor_rollout_ref.actor.use_dynamic_bsz"),
    ppo_max_token_len_per_gpu=key(32768, _A_MODEL, derived="32768; on GPUs as many as fit, at most 65536"),
    ppo_epochs=inherits("actor_rollout_ref.actor.ppo_epochs", _TRAINED),
    shuffle=inherits("actor_rollout_ref.actor.shuffle", _A_MODEL),
    freeze_vision_tower=inherits(
        "actor_rollout_ref.actor.freeze_vision_tower", {**_TRAINED, "data.image_key": "prompts are text"}
    ),
    loss_agg_mode=follows("actor_rollout_ref.actor.loss_agg_mode"),
    loss_scale_factor=follows("actor_rollout_ref.actor.loss_scale_factor"),
):
    """The value model's update."""

    enable: bool = key(True, derived="true with gae, evpo, vtrace")
    """Train a critic; null leaves it to algorithm.adv_estimator."""
    kind: Literal["model", "probe"] = "model"
    """A value model that is trained, or a probe: least squares on the policy's hidden states, in closed form."""
    probe: ProbeConfig = section(ProbeConfig, ".kind=probe")
    target: Literal["absolute", "residual", "anchored"] = "absolute"
    """It learns returns; residual: what the others' mean leaves of them. anchored: a response begins at that mean."""
    prompt_template: str | None = None
    """What it reads in place of a prompt's last message: a text with {prompt} and columns such as {ground_truth}."""
    freeze: bool = False
    """Use the critic as it was loaded: no gradients, no optimizer."""
    freeze_steps: StepRanges = key([], ".freeze=false")
    """Steps in which the critic is not trained, such as 1-50 or [10-20,80-] (the second without an end)."""
    ensemble_size: PositiveInt = 1
    """Critics, each with a head and an order of the mini-batches of its own."""
    ensemble_reduce: Literal["mean", "min"] = key("mean", ".ensemble_size!=1")
    """Value of an ensemble: the mean of its critics', or the smallest."""
    model: CriticModelConfig = section(CriticModelConfig, _A_MODEL)
    value_loss: str = key("mse", _TRAINED)
    """Name of a registered value loss: mse, huber, bce (returns from 0 to 1), hl_gauss (bins of values)."""
    value_loss_kwargs: dict[str, Any] = key({}, _TRAINED)
    """Its options: huber_delta; num_bins (51), value_min, value_max, sigma_bins."""
    cliprange_value: PositiveFloat | None = key(0.5, _TRAINED)
    """Value clip range: new values are kept within this distance of the old ones in the loss; null never clips."""
    unclipped_steps: StepRanges = key([], {**_TRAINED, ".cliprange_value": ""})
    """Steps in which cliprange_value does not act, such as 1-50 while the critic warms up."""
    replay_steps: NonNegativeInt = key(0, _TRAINED)
    """Earlier steps on whose samples it trains again in each step: as many more updates, against noise; 0 for none."""
    optim: FastOptimConfig = section(FastOptimConfig, _TRAINED)
    checkpoint: CriticCheckpointConfig = section(CriticCheckpointConfig, _A_MODEL)
    fsdp_config: CriticFSDPConfig = section(CriticFSDPConfig, _A_MODEL)
    megatron: CriticMegatronConfig = section(CriticMegatronConfig, {".strategy=megatron": "", **_A_MODEL})

    def contradictions(self, at: str) -> Iterator[str]:
        yield from super().contradictions(at)
        if self.kind == "probe" and self.ensemble_size > 1:
            yield f"{at}kind=probe is one regression: leave {at}ensemble_size at 1"
        elif self.ensemble_size > 1 and (self.freeze or self.model.value_head_init == "zero"):
            apart = f"{at}freeze=false" if self.freeze else f"{at}model.value_head_init=normal"
            yield f"{at}ensemble_size={self.ensemble_size}: the critics would all be the same, set {apart}"
        if self.kind == "probe" and self.freeze and self.probe.path is None:
            yield f"{at}freeze=true with {at}kind=probe uses a fitted one: set {at}probe.path"
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            yield f"{at}prompt_template has no {{prompt}} in it: the critic would not see the question"

    @property
    def learns(self) -> Literal["absolute", "residual"]:
        """What its values are of, as an exported critic says it: an anchored one's are moved after they are made."""
        return "residual" if self.target == "residual" else "absolute"

    def cliprange_at(self, step: int) -> float | None:
        """The clip range in this step."""
        return None if any(step in step_range(steps) for steps in self.unclipped_steps) else self.cliprange_value

    def frozen_at(self, step: int) -> bool:
        """Whether the critic is left alone in this step."""
        return self.freeze or any(step in step_range(steps) for steps in self.freeze_steps)
