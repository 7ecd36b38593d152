"""`valor plan`: whether a run fits into the memory of its processes, phase by phase, and what would make it fit."""

from collections.abc import Iterator, Sequence

import torch

from valor.config import PPOConfig, load
from valor.errors import UserError
from valor.machine import memory
from valor.trainer.command import load_checked
from valor.trainer.memory_plan import GIB, Estimate, Machine, estimate


def _fits(arguments: Sequence[str], machine: Machine) -> bool:
    return estimate(load_checked(arguments, PPOConfig).config, machine).fits(machine)


def remedy(arguments: Sequence[str], machine: Machine) -> str | None:
    """Settings with which a run fits, as few as possible; None: none of those that there are does."""
    chosen: list[str] = []
    for override in _remedies(load(arguments).config, machine):
        try:
            enough = _fits([*arguments, *chosen, override], machine)
        except UserError:  # it contradicts the run's other settings
            continue
        chosen.append(override)
        if enough:
            return override if _fits([*arguments, override], machine) else " ".join(chosen)
    return None


def _remedies(config: PPOConfig, machine: Machine) -> Iterator[str]:
    policy, longest = config.actor_rollout_ref, config.data.max_prompt_length + config.data.max_response_length
    roles = {"actor_rollout_ref.actor": policy.actor} | ({"critic": config.critic} if config.has_value_model else {})
    for name in roles:
        yield f"{name.removesuffix('.actor')}.model.enable_gradient_checkpointing=true"
    for name, role in roles.items():
        yield f"{name}.ppo_max_token_len_per_gpu={max(longest, role.ppo_max_token_len_per_gpu // 4)}"
    if policy.rollout.name == "native":
        yield f"actor_rollout_ref.rollout.max_num_seqs={max(1, policy.rollout.max_num_seqs // 4)}"
    if machine.device == "cuda":
        for key in ("optimizer_offload", "param_offload"):
            yield from (f"{name}.fsdp_config.{key}=true" for name in roles)
        yield "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    yield "actor_rollout_ref.model.lora_rank=32"


def table(expected: Estimate) -> str:
    """The plan as text, a line a phase."""
    roles = ", ".join(f"{role} {size / GIB:.2f}" for role, size in expected.resident.items())
    lines = [f"{'all the time':<26}{sum(expected.resident.values()) / GIB:8.2f} GiB   {roles}"]
    for phase, sizes in expected.phases.items():
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items())
        lines.append(f"{phase:<26}{expected.peak(phase) / GIB:8.2f} GiB   + {parts}")
    return "\n".join(lines)


def run(config: PPOConfig, settings: Sequence[str], gpus: int | None, nodes: int | None, gib: float | None) -> int:
    """Prints the memory of the run of `config`, which `settings` describe; 1 where it does not fit."""
    trainer, actor, critic = config.trainer, config.actor_rollout_ref.actor, config.critic
    if actor.strategy == "megatron":
        raise UserError("valor plan is for roles trained by FSDP: leave out strategy=megatron")
    each = gpus or trainer.n_gpus_per_node or 1
    device, size = "cpu", memory().total / each
    if gpus:
        device, size = "cuda", 80 * GIB
    elif torch.cuda.is_available():
        device, size = "cuda", float(torch.cuda.get_device_properties(0).total_memory)
    machine = Machine(device, each * (nodes or trainer.nnodes), gib * GIB if gib else size)
    expected = estimate(config, machine)
    kind = "GPU" if machine.device == "cuda" else "process"
    print(f"memory of each of {machine.processes} x {kind} ({machine.memory / GIB:.1f} GiB)")
    print(table(expected))
    for name, pool in config.pools.items():
        print(f"the pool {name} has processes of its own ({', '.join(pool.roles)}), which are not planned here")
    if not expected.fits(machine):
        advice = remedy(settings, machine)
        fewer = "a smaller model, or more GPUs (trainer.n_gpus_per_node, trainer.nnodes)"
        print(f"it does not fit in {expected.worst}: " + (f"set {advice}" if advice else f"it needs {fewer}"))
        return 1
    print("it fits")
    roles = {"actor_rollout_ref": config.actor_rollout_ref, **({"critic": critic} if critic.enable else {})}
    on = [name for name, role in roles.items() if role.model.enable_gradient_checkpointing]
    off = [f"{name}.model.enable_gradient_checkpointing=false" for name in on]
    if off and _fits([*settings, *off], machine):
        print(f"and without computing forward passes twice: {' '.join(off)}")
    return 0
