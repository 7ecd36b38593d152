"""`valor plan`: memory by role and phase, and the time of a step, from the shapes of models alone.

Nothing is loaded: a model is its config.json, made on torch's meta device. Sizes are upper bounds: every prompt and
response as long as it may be. benchmarks/planner.py compares them with what runs have used.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import psutil
import torch
from torch import nn
from torch.utils.benchmark import Timer

from valor.config import BackboneConfig, FSDPConfig, PPOConfig, load
from valor.config.actor import UpdateConfig
from valor.controller.placement import available_cores
from valor.errors import UserError
from valor.models.hf import cache_bytes_per_token, quiet_transformers
from valor.models.linear import bfloat16_is_slow
from valor.models.load import load_model_config
from valor.models.lora import linear_layers
from valor.trainer.advantage import own_targets
from valor.trainer.command import check, derived

GIB = 2.0**30
_SPARE = 0.92  # of a device's memory: the allocator's fragments and what other libraries hold
_BYTES = {"float32": 4, "bfloat16": 2}
_PROCESS = {"cpu": 0.75 * GIB, "cuda": 0.8 * GIB}  # of Python and its libraries, or of a CUDA context: measured
_PRODUCT = {"cpu": 2**27, "cuda": 2**29}  # elements of the head's product (valor.models.token_log_probs)
_POSITIVE = click.FloatRange(0, min_open=True)
_UNITS = {"memory": GIB, "flops": 1e12, "bandwidth": 1e9}
_FORWARD = 2  # floating-point operations for a weight and a token


@dataclass(frozen=True)
class Shape:
    """What a model's config says of its size: numbers of weights."""

    text: Any  # transformers' config of the language model
    weights: int
    products: int  # weights that tokens are multiplied with: without a table of embeddings that is only read
    trained: int
    largest_part: int  # weights that are gathered at once: a layer, or embeddings and head
    outputs: int  # numbers that the head gives for a token


@dataclass(frozen=True)
class Machine:
    """Processes that share a run's models, and what each has. `flops` and `bandwidth` are what is reached."""

    device: str  # "cpu" or "cuda"
    processes: int
    memory: float  # bytes of each process
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Phase:
    """What a process holds at the peak of one kind of call beyond what stays, in bytes, and how long it takes."""

    name: str
    parts: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Of one process: what each role holds all the time, and the phases of a step."""

    resident: dict[str, float]
    phases: list[Phase]
    tokens: int

    def peak(self, phase: Phase) -> float:
        """Bytes that the process holds in a phase."""
        return sum(self.resident.values()) + sum(phase.parts.values())

    @property
    def worst(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=self.peak)

    def fits(self, machine: Machine) -> bool:
        """Whether the worst phase has room."""
        return self.peak(self.worst) <= _SPARE * machine.memory


def shape_of(model: BackboneConfig, *, value_head: bool = False) -> Shape:
    """UserError: no such model, or transformers does not know its kind."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    config = load_model_config(model)
    text = config.get_text_config()
    with torch.device("meta"), quiet_transformers():
        if value_head:
            config.num_labels = 1
        hf: Any = (AutoModelForTokenClassification if value_head else AutoModelForCausalLM).from_config(config)
    weights = sum(p.numel() for p in hf.parameters())
    blocks = [part for part in hf.modules() if isinstance(part, nn.ModuleList) and len(part) == text.num_hidden_layers]
    layer = max((sum(p.numel() for p in one.parameters()) for part in blocks for one in part), default=weights)
    tied = getattr(text, "tie_word_embeddings", False) and not value_head
    products = weights if tied else weights - hf.get_input_embeddings().weight.numel()
    trained = weights
    if model.lora_rank:
        targets = list(linear_layers(hf)) if model.target_modules == "all-linear" else model.target_modules
        named = {"target_modules": targets, "exclude_modules": model.exclude_modules}
        try:
            with torch.device("meta"):
                inject_adapter_in_model(LoraConfig(r=model.lora_rank, task_type="SEQ_CLS", **named), hf)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"model.target_modules={model.target_modules}: {error}") from None
        trained = sum(p.numel() for name, p in hf.named_parameters() if "lora_" in name)
    return Shape(
        text=text,
        weights=weights,
        products=products,
        trained=trained,
        largest_part=max(layer, weights - text.num_hidden_layers * layer),
        outputs=1 if value_head else text.vocab_size,
    )


def estimate(config: PPOConfig, machine: Machine) -> Estimate:
    """One process of `machine`, all of whose processes share every role."""
    policy, critic = config.actor_rollout_ref, config.critic
    shape = shape_of(policy.model)
    samples = config.data.train_batch_size * policy.rollout.n
    tokens = samples * (config.data.max_prompt_length + config.data.max_response_length)
    mine = tokens / machine.processes
    resident = {"process": _PROCESS[machine.device], "actor": _held(shape, policy.actor.fsdp_config, machine, True)}
    phases = [_generation(config, shape, machine, samples)]
    actor = _Use(config, shape, policy.model, policy.actor, machine)
    if config.data.train_batch_size > policy.actor.ppo_mini_batch_size or policy.actor.ppo_epochs > 1:
        phases.append(actor.phase("actor.compute_log_probs", mine, trains=False))
    if config.needs_reference:
        if config.ref_has_weights:
            resident["ref"] = _held(shape, policy.ref.fsdp_config, machine, False)
        phases.append(actor.phase("ref.compute_log_probs", mine, trains=False))
    if critic.enable:
        of_critic, times = shape_of(critic.model, value_head=True), critic.ensemble_size
        resident["critic"] = times * _held(of_critic, critic.fsdp_config, machine, not critic.freeze)
        use = _Use(config, of_critic, critic.model, critic, machine)
        if own_targets(config) is not None:
            phases.append(use.phase("critic.update_with_values", mine, trains=True))
        else:
            phases.append(use.phase("critic.compute_values", mine * times, trains=False))
            if not critic.freeze:
                phases.append(use.phase("critic.update", mine * times * critic.ppo_epochs, trains=True))
    phases.append(actor.phase("actor.update", mine * policy.actor.ppo_epochs, trains=True))
    return Estimate(resident, phases, tokens)


def _held(shape: Shape, fsdp: FSDPConfig, machine: Machine, trains: bool) -> float:
    """Bytes of weights and optimizer state that a role keeps on the device outside of its turn."""
    each = _BYTES[fsdp.model_dtype] / _shards(fsdp, machine)
    gpu = machine.device == "cuda"
    held = 0.0 if gpu and (fsdp.param_offload or fsdp.offload_policy) else shape.weights * each
    if not gpu and not fsdp.reshard_after_forward:  # freed after each use, but the C library keeps it for the next
        held += shape.weights * _BYTES[fsdp.dtype]
    if trains and not (gpu and (fsdp.optimizer_offload or fsdp.offload_policy)):
        held += 2 * shape.trained * each
    return held


def _shards(fsdp: FSDPConfig, machine: Machine) -> int:
    shards = min(fsdp.fsdp_size if fsdp.fsdp_size > 0 else machine.processes, machine.processes)
    if machine.processes % shards:
        raise UserError(f"fsdp_config.fsdp_size={shards} does not divide the {machine.processes} processes")
    return shards


@dataclass(frozen=True)
class _Use:
    """A role's model at work."""

    config: PPOConfig
    shape: Shape
    model: BackboneConfig
    role: UpdateConfig
    machine: Machine

    def phase(self, name: str, tokens: float, *, trains: bool) -> Phase:
        """`tokens`: that the process reads in it."""
        shape, fsdp, machine = self.shape, self.role.fsdp_config, self.machine
        gpu, size = machine.device == "cuda", _BYTES[fsdp.dtype]
        parts: dict[str, float] = {}
        if gpu and not fsdp.offload_policy:
            here = fsdp.model_copy(update={"param_offload": False, "optimizer_offload": False})
            if (away := _held(shape, here, machine, trains) - _held(shape, fsdp, machine, trains)) > 0:
                parts["weights and optimizer, back"] = away
        reshards = gpu if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward
        if reshards or gpu:
            parts["gathered weights"] = (2 * shape.largest_part if reshards else shape.weights) * size
        if trains and not fsdp.offload_policy:  # summed in float32; those of layers that are not yet summed are whole
            shards = _shards(fsdp, machine)
            whole = shape.trained if not reshards and shards > 1 else 0
            parts["gradients"] = shape.trained * 4 / shards + whole * 4
        parts["activations"] = self._activations(size, trains)
        passes = 1  # a backward pass counts twice, and weights that are not trained have no gradients
        if trains:
            passes = 3 + self.model.enable_gradient_checkpointing - (shape.trained < shape.weights)
        share = self._group_tokens / (self._row_tokens * self.config.actor_rollout_ref.rollout.n)
        return Phase(name, parts, passes * _FORWARD * shape.products * tokens * share / machine.flops)

    @property
    def _row_tokens(self) -> int:
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    @property
    def _group_tokens(self) -> int:
        """Of all samples of a prompt. A prompt that several rows of a micro-batch share counts once."""
        data, n = self.config.data, self.config.actor_rollout_ref.rollout.n
        shared = self.model.use_remove_padding and self.model.share_prefixes and n > 1
        return data.max_prompt_length * (1 if shared else n) + data.max_response_length * n

    def _activations(self, size: int, trains: bool) -> float:
        """Of the largest micro-batch, whose numbers have `size` bytes."""
        text, row = self.shape.text, self._row_tokens
        mine = math.ceil(self.role.ppo_mini_batch_size / self.machine.processes) * self._group_tokens
        by_rows = math.inf if self.role.max_rows is None else row * self.role.max_rows
        tokens = max(min(mine, self.role.ppo_max_token_len_per_gpu, by_rows), row)
        # A layer's own: what its norms, projections, rotations and products leave for the backward pass.
        hidden, heads = text.hidden_size, text.num_attention_heads
        queries = heads * head if (head := getattr(text, "head_dim", None)) else hidden
        layer = size * (6 * hidden + 3 * queries + 4 * (getattr(text, "intermediate_size", None) or 4 * hidden))
        layer += 8 * hidden if size == 2 else 0  # norms compute in float32
        if self.machine.device == "cpu" and row <= 1024 and self.model.use_remove_padding:
            layer += row * heads * (8 + size)  # scores in float32, their softmax, and that in half precision
        product = min(tokens * self.shape.outputs, _PRODUCT[self.machine.device]) * size
        if not trains:
            return tokens * layer + product
        if self.model.enable_gradient_checkpointing:
            return tokens * (text.num_hidden_layers * hidden * size + layer * 1.5) + 2 * product
        return tokens * layer * (text.num_hidden_layers + 0.5) + 2 * product


def _generation(config: PPOConfig, shape: Shape, machine: Machine, samples: int) -> Phase:
    rollout, data, fsdp = config.actor_rollout_ref.rollout, config.data, config.actor_rollout_ref.actor.fsdp_config
    if rollout.name == "server":
        return Phase("rollout.generate", {}, 0.0)
    size, mine = _BYTES[fsdp.dtype], math.ceil(samples / machine.processes)
    rows = min(mine, rollout.max_num_seqs or mine)
    longest = data.max_prompt_length + data.max_response_length
    weights, cache = shape.weights * size, rows * longest * cache_bytes_per_token(shape.text, size)
    read = data.max_response_length * math.ceil(mine / rows) * (weights + cache / 2) / machine.bandwidth
    compute = _FORWARD * shape.products * mine * longest / machine.flops
    parts = {"keys and values": float(cache)}
    if machine.device == "cpu" and rollout.name == "native":  # in the layout that is fastest, adapters added up
        parts["weights, packed"] = float(shape.products * _BYTES[_computed_in(fsdp.dtype, machine.device)])
    if machine.device == "cuda" or fsdp.reshard_after_forward:
        parts["gathered weights"] = float(weights)
    if rollout.name == "vllm":
        parts = {"vLLM (rollout.gpu_memory_utilization)": rollout.gpu_memory_utilization * machine.memory}
    return Phase("rollout.generate", parts, max(read, compute))


def this_machine(processes: int, dtype: str = "float32") -> Machine:
    """This one, whose rates in products of `dtype` are measured in a moment."""
    if torch.cuda.is_available():
        return Machine("cuda", processes, torch.cuda.get_device_properties(0).total_memory, *_rates("cuda", dtype))
    memory = float(psutil.virtual_memory().total)
    return Machine("cpu", processes, *(whole / processes for whole in (memory, *_rates("cpu", dtype))))


def _rates(device: str, dtype: str) -> tuple[float, float]:
    """Operations and bytes a second: of a product of two matrices, and of a copy.

    Training reaches about half of such a product, and nearly all of one in float32 on a CPU.
    """
    dtype = _computed_in(dtype, device)
    side, reached = 4096 if device == "cuda" else 768, 1.0 if (device, dtype) == ("cpu", "float32") else 0.5
    given = {
        "a": torch.randn(side, side, device=device).to(getattr(torch, dtype)),
        "b": torch.empty(2**24, device=device),
    }
    timers = (Timer(work, globals=given, num_threads=torch.get_num_threads()) for work in ("a @ a", "b.clone()"))
    product, copy = (min(timer.blocked_autorange(min_run_time=0.5).times) for timer in timers)  # when nothing disturbed
    return reached * 2 * side**3 / product, 2 * 4 * 2**24 / copy


def _computed_in(dtype: str, device: str) -> str:
    """What products of such numbers are computed in there."""
    return "float32" if device == "cpu" and dtype == "bfloat16" and bfloat16_is_slow() else dtype


def remedy(arguments: Sequence[str], machine: Machine) -> str | None:
    """Settings with which a run fits, as few as possible; None: none of those that there are does."""

    def would_fit(*more: str) -> bool:
        return estimate(load([*arguments, *more], PPOConfig, check, derived).config, machine).fits(machine)

    given: list[str] = []
    for override in _remedies(load(arguments).config, machine):
        try:
            enough = would_fit(*given, override)
        except UserError:  # it does not go together with what was asked for
            continue
        given.append(override)
        if enough:
            return override if would_fit(override) else " ".join(given)
    return None


def _remedies(config: PPOConfig, machine: Machine) -> Iterator[str]:
    policy, longest = config.actor_rollout_ref, config.data.max_prompt_length + config.data.max_response_length
    roles = {"actor_rollout_ref.actor": policy.actor} | ({"critic": config.critic} if config.critic.enable else {})
    for name in roles:
        yield f"{name.removesuffix('.actor')}.model.enable_gradient_checkpointing=true"
    for name, role in roles.items():
        yield f"{name}.ppo_max_token_len_per_gpu={max(longest, role.ppo_max_token_len_per_gpu // 4)}"
    if policy.rollout.name == "native":
        yield f"actor_rollout_ref.rollout.max_num_seqs={max(1, policy.rollout.max_num_seqs // 4)}"
    if machine.device == "cuda":
        for what in ("optimizer_offload", "param_offload"):
            yield from (f"{name}.fsdp_config.{what}=true" for name in roles)
        yield "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    yield "actor_rollout_ref.model.lora_rank=32"


def table(found: Estimate, machine: Machine) -> str:
    """What a plan says, a line each."""
    total = sum(found.resident.values())
    kept = ", ".join(f"{role} {size / GIB:.2f}" for role, size in found.resident.items())
    lines = [f"{'all the time':<26}{total / GIB:8.2f} GiB   {kept}"]
    for phase in found.phases:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.parts.items())
        lines.append(f"{phase.name:<26}{found.peak(phase) / GIB:8.2f} GiB   + {parts}; {phase.seconds:.1f} s")
    seconds = sum(phase.seconds for phase in found.phases)
    rate, each = found.tokens / seconds, f"{machine.bandwidth / 1e9:.0f} GB/s of each of {machine.processes}"
    lines.append(f"a step: {found.tokens:,} tokens at most, about {seconds:.1f} s, {rate:,.0f} tokens/s")
    return "\n".join([*lines, f"at {machine.flops / 1e12:.2f} TFLOP/s and {each}"])


def run(
    config: PPOConfig, settings: Sequence[str], gpus: int | None, nodes: int | None, given: Mapping[str, float | None]
) -> int:
    """Print the memory and the time of the run of `config`, which `settings` asked for; 1 where it does not fit."""
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    if config.pools or actor.strategy == "megatron":
        what = f"the pool {', '.join(config.pools)}" if config.pools else "strategy=megatron"
        raise UserError(f"valor plan is for FSDP roles that share their processes: leave out {what}")
    if gpus:
        machine = Machine("cuda", gpus, 80 * GIB, 3e14, 2e12)
    else:
        machine = this_machine(trainer.n_gpus_per_node or 1, actor.fsdp_config.dtype)
    asked = {name: value * _UNITS[name] for name, value in given.items() if value}
    count = nodes or trainer.nnodes
    machine = replace(machine, processes=machine.processes * count, **asked)
    found = estimate(config, machine)
    cores = max(1, available_cores() * count // machine.processes)
    what = "GPU" if machine.device == "cuda" else f"process of {cores} cores"
    print(f"memory of each of {machine.processes} x {what} ({machine.memory / GIB:.1f} GiB)")
    print(table(found, machine))
    if found.fits(machine):
        print("it fits")
        return 0
    advice = remedy(settings, machine)
    fewer = "a smaller model, or more GPUs (trainer.n_gpus_per_node, trainer.nnodes)"
    print(f"it does not fit in {found.worst.name}: " + (f"set {advice}" if advice else f"it needs {fewer}"))
    return 1
