"""Bytes that each process of a run holds, by role and phase, from the shapes of its models alone.

Nothing is loaded: a model is its config.json, made on torch's meta device. Sizes are upper bounds: every prompt and
response as long as it may be. benchmarks/planner.py compares them with what runs have used.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from valor.config import BackboneConfig, FSDPConfig, PPOConfig
from valor.config.actor import UpdateConfig
from valor.config.tree import flatten, nested
from valor.engines.fsdp.sharding import MOST_IN_ONE_PART
from valor.errors import UserError
from valor.models.classifier import register_classifier
from valor.models.hf import cache_bytes_per_token, quiet_transformers
from valor.models.images import policy_class
from valor.models.linear import bfloat16_is_slow
from valor.models.load import load_model_config
from valor.models.lora import linear_layers
from valor.models.reward import backbone
from valor.trainer.phases.standard import phases_of
from valor.workers.teacher import teacher_model

GIB = 2.0**30
_USABLE = 0.92  # of a device's memory: the allocator's fragments and other libraries hold the rest
_BYTES = {"float32": 4, "bfloat16": 2}
_PROCESS = {"cpu": 0.75 * GIB, "cuda": 0.8 * GIB}  # Python and its libraries, or a CUDA context: measured
_BUDGETS = (65536, 49152, 32768, 24576)  # tokens of a micro-batch; a GPU is no faster with more
_BUDGET, _OF_LOG_PROBS = "ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
_PRODUCT = {"cpu": 2**27, "cuda": 2**29}  # elements of the head's product (valor.models.token_log_probs)


@dataclass(frozen=True)
class Shape:
    """Numbers of weights of a model. `products`: all but an embedding table that is only read; `trained`: those with
    gradients; `largest_part`: the most that are gathered at once (a layer, or embeddings and head); `outputs`: numbers
    that the head gives for a token."""

    text: Any  # transformers' config of the language model
    weights: int
    products: int
    trained: int
    largest_part: int
    outputs: int


@dataclass(frozen=True)
class Machine:
    """Processes of one pool, and the bytes of each. device: "cpu" or "cuda"."""

    device: str
    processes: int
    memory: float


@dataclass(frozen=True)
class Estimate:
    """Bytes in one process of a pool: `resident` by role, all the time; `phases` by name and part, at their peaks."""

    resident: dict[str, float]
    phases: dict[str, dict[str, float]]

    def peak(self, phase: str) -> float:
        """Bytes that the process holds in a phase."""
        return sum(self.resident.values()) + sum(self.phases[phase].values())

    @property
    def worst(self) -> str:
        return max(self.phases, key=self.peak)

    def fits(self, machine: Machine) -> bool:
        return self.peak(self.worst) <= _USABLE * machine.memory


def shape_of(model: BackboneConfig, *, value_head: bool = False) -> Shape:
    """UserError: no such model, or transformers does not know its kind."""
    config = load_model_config(model)
    text = config.get_text_config()
    with torch.device("meta"), quiet_transformers():
        if value_head:
            register_classifier(AutoModelForTokenClassification, config, model.path)
            config.num_labels = 1
        hf: Any = (AutoModelForTokenClassification if value_head else policy_class(config)).from_config(
            config, trust_remote_code=model.trust_remote_code
        )
    weights = sum(p.numel() for p in hf.parameters())
    stacks = [part for part in hf.modules() if isinstance(part, nn.ModuleList) and len(part) == text.num_hidden_layers]
    layer = max((sum(p.numel() for p in each.parameters()) for stack in stacks for each in stack), default=weights)
    tied = getattr(text, "tie_word_embeddings", False) and not value_head
    trained = weights
    if model.lora_rank:
        from peft import LoraConfig, inject_adapter_in_model  # a second, which runs without adapters are spared

        targets = list(linear_layers(hf)) if model.target_modules == "all-linear" else model.target_modules
        modules: Any = {"target_modules": targets, "exclude_modules": model.exclude_modules}
        try:
            with torch.device("meta"):
                inject_adapter_in_model(LoraConfig(r=model.lora_rank, task_type="SEQ_CLS", **modules), hf)
        except ValueError as error:
            raise UserError(f"model.target_modules={model.target_modules}: {error}") from None
        trained = sum(p.numel() for name, p in hf.named_parameters() if "lora_" in name)
    return Shape(
        text=text,
        weights=weights,
        products=weights if tied else weights - hf.get_input_embeddings().weight.numel(),
        trained=trained,
        largest_part=max(layer, weights - text.num_hidden_layers * layer),
        outputs=1 if value_head else text.vocab_size,
    )


def estimate(config: PPOConfig, machine: Machine) -> Estimate:
    """One process of the main pool of `config`, all of whose processes share every role that has no other pool."""
    policy, critic = config.actor_rollout_ref, config.critic
    elsewhere = {role for pool in config.pools.values() for role in pool.roles}
    shape = shape_of(policy.model)
    resident = {"process": _PROCESS[machine.device], "actor": _resident(shape, policy.actor.fsdp_config, machine, True)}
    uses: dict[str, Use] = {"actor": (shape, policy.model, policy.actor)}
    if config.needs_reference and "ref" not in elsewhere:
        uses["ref"] = uses["actor"]
        if config.ref_has_weights:
            resident["ref"] = _resident(shape, policy.ref.fsdp_config, machine, False)
    if config.has_value_model and "critic" not in elsewhere:
        values = shape_of(critic.model, value_head=True)
        uses["critic"] = values, critic.model, critic
        size = _resident(values, critic.fsdp_config, machine, not critic.freeze)
        resident["critic"] = critic.ensemble_size * size
    reward_model = config.reward.reward_model
    if reward_model.is_role and "reward_model" not in elsewhere:
        scores = shape_of(backbone(reward_model), value_head=True)
        resident["reward_model"] = _resident(scores, reward_model.fsdp_config, machine, False)
    if config.distillation.enabled and config.distillation.models and "teacher" not in elsewhere:
        models = [teacher_model(config, teacher) for teacher in config.distillation.models.values()]
        shapes = [shape_of(model) for model in models]
        resident["teachers"] = sum(_resident(x, config.distillation.fsdp_config, machine, False) for x in shapes)
        largest = max(range(len(shapes)), key=lambda number: shapes[number].weights)
        uses["teacher"] = shapes[largest], models[largest], policy.actor
    phases = {}
    if policy.rollout.name != "server" and "rollout" not in elsewhere:
        phases["generate"] = _generation(config, shape, machine)
    for phase in phases_of(config):
        if phase.role in uses:
            trains = phase.trains and not (phase.role == "critic" and critic.freeze)
            phases[phase.name] = _turn(config, machine, uses[phase.role], trains=trains)
    if config.distillation.of_distributions:  # their passes are inside of the actor's
        parts = _turn(config, machine, uses["teacher"], trains=False)
        phases["update_actor"] |= {f"teacher's {name}": size for name, size in parts.items()}
    return Estimate(resident, phases)


def _resident(shape: Shape, fsdp: FSDPConfig, machine: Machine, trains: bool) -> float:
    """Bytes of weights and optimizer state that a role keeps on the device outside of its turn."""
    each = _BYTES[fsdp.model_dtype] / _shards(fsdp, machine)
    gpu = machine.device == "cuda"
    size = 0.0 if gpu and (fsdp.param_offload or fsdp.offload_policy) else shape.weights * each
    if not gpu and not fsdp.reshard_after_forward:  # freed after each use, but the C library keeps it for the next
        size += shape.weights * _BYTES[fsdp.dtype]
    if trains and not (gpu and (fsdp.optimizer_offload or fsdp.offload_policy)):
        size += 2 * shape.trained * each
    return size


def _shards(fsdp: FSDPConfig, machine: Machine) -> int:
    shards = min(fsdp.fsdp_size if fsdp.fsdp_size > 0 else machine.processes, machine.processes)
    if machine.processes % shards:
        raise UserError(f"fsdp_config.fsdp_size={shards} does not divide the {machine.processes} processes")
    return shards


Use = tuple[Shape, BackboneConfig, UpdateConfig]
"""A role's model at work: its shape, its configuration, the limits of its passes."""


def _turn(config: PPOConfig, machine: Machine, use: Use, *, trains: bool) -> dict[str, float]:
    """Bytes beyond what is resident while a role has its turn, by what they are for."""
    shape, _, role = use
    fsdp, gpu = role.fsdp_config, machine.device == "cuda"
    size = _BYTES[fsdp.dtype]
    parts: dict[str, float] = {}
    loaded = fsdp.model_copy(update={"param_offload": False, "optimizer_offload": False})
    offloaded = _resident(shape, loaded, machine, trains) - _resident(shape, fsdp, machine, trains)
    if offloaded > 0 and not fsdp.offload_policy:
        parts["weights and optimizer, back"] = offloaded
    reshards = gpu if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward
    if reshards or gpu:
        parts["gathered weights"] = (2 * shape.largest_part if reshards else shape.weights) * size
    if trains and not fsdp.offload_policy:  # summed in float32; those not yet summed are not sharded
        shards = _shards(fsdp, machine)
        unsharded = shape.trained if not reshards and shards > 1 else 0
        parts["gradients"] = shape.trained * 4 / shards + unsharded * 4
    parts["activations"] = _activations(config, machine, use, trains)
    if trains and gpu and machine.processes == 1 and not fsdp.offload_policy and shape.weights <= MOST_IN_ONE_PART:
        parts["activations"] = max(parts["activations"], 8.0 * shape.trained)  # or two copies of gradients, after them
    return parts


def _activations(config: PPOConfig, machine: Machine, use: Use, trains: bool) -> float:
    """Bytes of the largest micro-batch."""
    shape, model, role = use
    size, text, data, n = _BYTES[role.fsdp_config.dtype], shape.text, config.data, config.actor_rollout_ref.rollout.n
    row = data.max_prompt_length + data.max_response_length
    # A prompt that several rows of a micro-batch share counts once.
    shared = model.use_remove_padding and model.share_prefixes and n > 1
    group = data.max_prompt_length * (1 if shared else n) + data.max_response_length * n
    mini_batch = math.ceil(role.ppo_mini_batch_size / machine.processes) * group
    by_rows = math.inf if role.max_rows is None else row * role.max_rows
    tokens = max(min(mini_batch, role.ppo_max_token_len_per_gpu, by_rows), row)
    # What a layer's norms, projections, rotations and products leave for the backward pass.
    hidden, heads = text.hidden_size, text.num_attention_heads
    queries = heads * head if (head := getattr(text, "head_dim", None)) else hidden
    layer = size * (6 * hidden + 3 * queries + 4 * (getattr(text, "intermediate_size", None) or 4 * hidden))
    layer += 8 * hidden if size == 2 else 0  # norms compute in float32
    computed = _computing_bytes(role.fsdp_config.dtype, machine)
    product = min(tokens * shape.outputs, _PRODUCT[machine.device]) * computed
    head = shape.outputs * hidden * computed if computed > size else 0  # a copy of its weights
    if not trains:
        return tokens * layer + product + head
    if model.enable_gradient_checkpointing:
        return tokens * (text.num_hidden_layers * hidden * size + layer * 1.5) + 2 * product + head
    return tokens * layer * (text.num_hidden_layers + 0.5) + 2 * product + head


def _computing_bytes(dtype: str, machine: Machine) -> int:
    """Bytes of a number in products, which CPUs without those of bfloat16 numbers compute in float32."""
    slow = dtype == "bfloat16" and machine.device == "cpu" and bfloat16_is_slow()
    return 4 if slow else _BYTES[dtype]


def _generation(config: PPOConfig, shape: Shape, machine: Machine) -> dict[str, float]:
    """Bytes that the engine needs beside the actor's weights."""
    rollout, data, fsdp = config.actor_rollout_ref.rollout, config.data, config.actor_rollout_ref.actor.fsdp_config
    if rollout.name == "vllm":
        return {"vLLM (rollout.gpu_memory_utilization)": rollout.gpu_memory_utilization * machine.memory}
    size, samples = _BYTES[fsdp.dtype], math.ceil(data.train_batch_size * rollout.n / machine.processes)
    rows, longest = min(samples, rollout.max_num_seqs or samples), data.max_prompt_length + data.max_response_length
    parts = {"keys and values": float(rows * longest * cache_bytes_per_token(shape.text, size))}
    if machine.device == "cpu":  # in the layout that is fastest, adapters added up
        parts["weights, packed"] = float(shape.products * _computing_bytes(fsdp.dtype, machine))
    if machine.device == "cuda" or fsdp.reshard_after_forward:
        parts["gathered weights"] = float(shape.weights * size)
    return parts


def gpu_bytes() -> float | None:
    """Memory of the first GPU that this process sees; None without one. CUDA's driver tells: torch would reserve some
    for this process, and fix the settings of its allocator."""
    if not torch.cuda.is_available():
        return None
    driver, number, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
    calls = [(driver.cuInit, 0), (driver.cuDeviceGet, ctypes.byref(number), 0)]
    failed = any(call(*arguments) for call, *arguments in calls)
    return None if failed or driver.cuDeviceTotalMem_v2(ctypes.byref(size), number) else float(size.value)


def token_budgets(config: PPOConfig, machine: Machine) -> dict[str, int]:
    """By key: the largest token budgets of micro-batches with which the run fits in `machine`; none where those of
    the configuration are the largest."""
    roles = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor, "critic": config.critic}
    tree = config.model_dump()
    for tokens in _BUDGETS:
        limits = {f"{name}.{_BUDGET}": max(tokens, getattr(role, _BUDGET)) for name, role in roles.items()}
        limits[_OF_LOG_PROBS] = limits[f"actor_rollout_ref.actor.{_BUDGET}"]
        if estimate(type(config).model_validate(nested(flatten(tree) | limits)), machine).fits(machine):
            return limits
    return {}
