"""Sections that roles share: which network, sharding and precision, optimizer, checkpoint contents, traces."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import (
    CountOrOff,
    DType,
    FolderStr,
    PathStr,
    Section,
    Share,
    also,
    follows,
    hidden,
    inherits,
    key,
)

Part = Literal["model", "optimizer", "extra", "hf_model"]
TracedRole = Literal["actor", "critic", "ref", "rollout"]
Content = Literal["cpu", "cuda", "memory", "shapes", "stack"]
KERNELS = ("compile", "use_liger")
RESUMABLE = ["model", "optimizer", "extra"]
DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_FSDP = {"..strategy!=megatron": ""}
_NO_ADAPTER = {".lora_rank": "", ".lora_adapter_path=null": "the adapter at lora_adapter_path says which"}


def _resumable(parts: list[str]) -> list[str]:
    if not set(RESUMABLE) <= set(parts):
        raise ValueError("list model, optimizer and extra, so that a run resumes exactly")
    return parts


class BackboneConfig(Section):
    """What policy and value models share."""

    path: PathStr = DEFAULT_MODEL
    """Hugging Face hub id or local directory."""
    trust_remote_code: bool = False
    """Run Python code that the model directory brings along."""
    override_config: dict[str, Any] = key({})
    """Attributes of the Hugging Face config to replace, such as attn_implementation."""
    external_lib: str | None = None
    """Python module(s) to import before loading, separated by commas (they register architectures)."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them."""
    use_remove_padding: bool = True
    """Pack the rows of a micro-batch without padding; false pads them to the longest."""
    share_prefixes: bool = key(True, ".use_remove_padding")
    """Compute a beginning that several rows of a micro-batch share, such as the prompt of a group, once."""
    compile: bool | None = key(None, ".use_remove_padding")
    """Training passes by torch.compile, checked at the start; null: on GPUs if they pass. CPUs need a C++ compiler."""
    use_liger: bool | None = None
    """Liger's kernels (`pip install valor-rl[liger]`) for norms, rotations, activations on GPUs; null: if they pass."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters, which alone are trained (with a critic's head); 0 trains all weights."""
    lora_alpha: PositiveFloat = key(16, ".lora_rank")
    """LoRA scale: adapters are multiplied by lora_alpha / lora_rank."""
    target_modules: str | list[str] = key("all-linear", _NO_ADAPTER)
    """Layers that get adapters: all-linear (all below the head), names or ends of names, or one regular expression."""
    exclude_modules: str | list[str] | None = key(None, _NO_ADAPTER)
    """Layers that get none, named in the same way."""
    lora_adapter_path: PathStr | None = None
    """Directory of adapters to go on from: `adapter` in an export, or one of peft's."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.lora_adapter_path is not None and not self.lora_rank:
            yield f"{at}lora_adapter_path={self.lora_adapter_path} needs {at}lora_rank: set it to that adapter's rank"


class ModelConfig(BackboneConfig):
    """The model that is trained; in RL also the reference and, with rollout.name=native, the generator."""

    tokenizer_path: PathStr | None = None
    """Tokenizer, if it is not beside the model."""
    custom_chat_template: str | None = None
    """Chat template in place of the tokenizer's: Jinja text, or a file with it."""


class CriticModelConfig(
    BackboneConfig,
    path=inherits("actor_rollout_ref.model.path"),
    trust_remote_code=inherits("actor_rollout_ref.model.trust_remote_code"),
    **{name: follows(f"actor_rollout_ref.model.{name}") for name in ("external_lib", "share_prefixes", *KERNELS)},
):
    """The value model: a causal language model with a token-classification head, or a published critic."""

    value_head_init: Literal["zero", "normal"] = "zero"
    """Fresh value head: all zeros, or small normal weights. A published critic keeps its own."""


class FSDPConfig(Section):
    """Precision, memory and sharding of a model; megatron reads dtype and the two *_offload."""

    param_offload: bool = False
    """Keep parameters in host memory while the role is idle."""
    optimizer_offload: bool = False
    """Keep optimizer state (megatron: and gradients) in host memory while the role is idle."""
    offload_policy: bool = key(False, {"trainer.device!=cpu": "", **_FSDP})
    """Parameters, gradients and optimizer state live in host memory also while computing (CUDA)."""
    reshard_after_forward: bool | None = key(None, _FSDP)
    """Save memory, send more: free layers after each use, reduce gradients every micro-batch. null: true on GPUs."""
    fsdp_size: int = key(-1, _FSDP)
    """Processes per shard group; the groups hold copies of each other. -1 is one group."""
    model_dtype: DType = key("float32", _FSDP)
    """Precision in which parameters and optimizer state are kept; in bfloat16 a small update is lost in rounding."""
    dtype: DType = "bfloat16"
    """Precision of the forward and backward pass; the optimizer of megatron keeps float32 copies of its parameters."""


def _as_the_actor(section: str, *names: str) -> dict[str, Any]:
    return {name: follows(f"actor_rollout_ref.actor.{section}.{name}") for name in names}


def _inherited(section: str, *names: str) -> dict[str, Any]:
    return {name: inherits(f"actor_rollout_ref.actor.{section}.{name}") for name in names}


class CriticFSDPConfig(
    FSDPConfig,
    **_inherited("fsdp_config", "model_dtype", "dtype"),
    **_as_the_actor("fsdp_config", "offload_policy", "reshard_after_forward", "fsdp_size"),
):
    """The same for the critic."""


class RefFSDPConfig(
    FSDPConfig,
    **_inherited("fsdp_config", "model_dtype"),
    **_as_the_actor("fsdp_config", "offload_policy", "reshard_after_forward", "fsdp_size", "dtype"),
    optimizer_offload=hidden(False),
):
    """The same for reference and teachers; they compute in the actor's precision, so that a KL to itself is zero."""


class RewardModelFSDPConfig(
    FSDPConfig,
    optimizer_offload=hidden(False),
    offload_policy=hidden(False),
    reshard_after_forward=hidden(None),
    fsdp_size=hidden(-1),
    model_dtype=hidden("float32"),
):
    """The same for the reward model."""


class MegatronConfig(Section):
    """How megatron-core divides a model over the processes (strategy=megatron); roles that share these agree in it."""

    tensor_model_parallel_size: PositiveInt = 1
    """Processes that share each layer's matrices (and the positions between them); must divide the key-value heads."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of consecutive layers; must divide them, unless override_transformer_config.num_layers_in_* says how."""
    context_parallel_size: PositiveInt = 1
    """Processes that share the positions of every row (all-to-all over the heads); needs packed rows."""
    expert_model_parallel_size: PositiveInt = 1
    """Processes that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Processes that share each expert's matrices; null: tensor_model_parallel_size."""
    override_transformer_config: dict[str, Any] = key({})
    """Further fields of megatron-core's TransformerConfig, such as recompute_granularity."""
    dtype: DType = follows("..fsdp_config.dtype", "bfloat16")
    param_offload: bool = follows("..fsdp_config.param_offload", False)
    optimizer_offload: bool = follows("..fsdp_config.optimizer_offload", False)

    @property
    def sizes(self) -> dict[str, int]:
        """The parallel sizes by their short names."""
        return {
            "tensor": self.tensor_model_parallel_size,
            "pipeline": self.pipeline_model_parallel_size,
            "context": self.context_parallel_size,
            "expert": self.expert_model_parallel_size,
        }


_TENSOR_AND_STAGES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_POSITIONS_AND_EXPERTS = ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")


class CriticMegatronConfig(
    MegatronConfig,
    **_inherited("megatron", *_TENSOR_AND_STAGES),
    **_as_the_actor("megatron", *_POSITIONS_AND_EXPERTS),
):
    """The same for the critic, divided as the actor unless it has processes of its own."""


class RewardModelMegatronConfig(
    MegatronConfig,
    **_as_the_actor("megatron", *_TENSOR_AND_STAGES, *_POSITIONS_AND_EXPERTS),
    override_transformer_config=hidden({}),
):
    """The reward model, divided as the actor."""


class RefMegatronConfig(RewardModelMegatronConfig, **_as_the_actor("megatron", "override_transformer_config")):
    """The reference, divided as the actor."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """Optimizer, gradient clipping, and the learning rate, which changes once a training step."""

    optimizer: Annotated[Literal["AdamW", "Muon"], also(adam="AdamW", adamw="AdamW", muon="Muon")] = "AdamW"
    """AdamW, or Muon for hidden matrices with AdamW for embeddings, heads and vectors (both torch.optim's)."""
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    momentum: DecayRate = key(0.95, ".optimizer=Muon")
    """Muon's decay rate of the momentum (Nesterov's)."""
    eps: PositiveFloat = 1e-8
    """Denominator offset."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. null never scales."""
    lr_warmup_steps: CountOrOff = -1
    """Linear warm-up steps (the last one has the full rate); -1 takes lr_warmup_steps_ratio of the run."""
    lr_warmup_steps_ratio: Share = key(0.0, ".lr_warmup_steps=-1")
    """Warm-up as a share of the steps in which the role learns, used when lr_warmup_steps is -1."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up."""
    min_lr_ratio: Share = key(0.0, ".lr_scheduler_type!=constant")
    """Floor of the cosine and linear schedules as a share of lr."""


class FastOptimConfig(OptimConfig, lr=1e-5):
    """The optimizer of a critic and of supervised training: ten times the actor's learning rate."""


class CheckpointConfig(Section):
    """What a trained model writes into a checkpoint and reads back."""

    save_contents: Annotated[list[Part], AfterValidator(_resumable)] = key(RESUMABLE)
    """Parts to write; hf_model adds a plain Hugging Face directory to every checkpoint."""


class CriticCheckpointConfig(
    CheckpointConfig, save_contents=follows("actor_rollout_ref.actor.checkpoint.save_contents")
):
    """The same parts of the critic."""


class GlobalProfilerConfig(Section):
    """Which calls are traced."""

    tool: Literal["torch"] | None = None
    """torch writes traces for chrome://tracing and Perfetto; null none."""
    steps: list[PositiveInt] | None = key(None, ".tool")
    """Steps to trace."""
    roles: list[TracedRole] = key(["actor", "critic", "ref", "rollout"], ".tool")
    """Roles whose calls are traced."""
    ranks: list[NonNegativeInt] = key([0], ".tool")
    """Ranks to trace; [] all."""
    save_path: FolderStr = key("outputs/profile", ".tool")
    """Folder of the traces: step_N/rankR.ROLE.METHOD.CALL.json.gz."""
    contents: list[Content] = key(["cpu", "cuda"], ".tool")
    """What is recorded: cpu always, cuda where there is one; memory, shapes and stack make traces large."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.tool is not None and not self.steps:
            yield f"{at}tool={self.tool} traces the steps that {at}steps names: set it, such as {at}steps=[2,3]"
