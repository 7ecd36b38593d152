"""`valor plan`: whether a run fits into memory here or on machines that are elsewhere, how long a step takes, and which
settings would make it fit."""

import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
import psutil
import torch

from valor.arguments import command, option
from valor.config import PPOConfig, load
from valor.controller.placement import available_cores
from valor.errors import UserError
from valor.lab.planner import GIB, Estimate, Machine, estimate
from valor.trainer.checks import check

_SPARE = 0.92  # of a device's memory: the allocator's fragments and what other libraries hold


def this_machine(processes: int) -> Machine:
    """This one, whose rates are measured in a moment."""
    if torch.cuda.is_available():
        return Machine("cuda", processes, torch.cuda.get_device_properties(0).total_memory, *_rates("cuda"))
    memory = float(psutil.virtual_memory().total)
    return Machine("cpu", processes, *(whole / processes for whole in (memory, *_rates("cpu"))))


def _rates(device: str) -> tuple[float, float]:
    """Operations and bytes a second: of a product of two matrices, of which training reaches half, and of a copy."""
    side = 4096 if device == "cuda" else 768
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = torch.randn(side, side, device=device, dtype=dtype), torch.empty(2**26, device=device, dtype=torch.uint8)

    def seconds(work: Callable[[], Any]) -> float:
        def once() -> None:
            work()
            if device == "cuda":
                torch.cuda.synchronize()

        return min(timeit.repeat(once, number=1, repeat=5))

    return 0.5 * 2 * side**3 / seconds(lambda: a @ a), 2 * 2**26 / seconds(b.clone)


def fits(found: Estimate, machine: Machine) -> bool:
    """Whether the worst phase has room."""
    return found.peak(found.worst) <= _SPARE * machine.memory


def remedy(arguments: Sequence[str], machine: Machine) -> str | None:
    """Settings with which a run fits, as few as possible; None: none of those that there are does."""

    def would_fit(*more: str) -> bool:
        return fits(estimate(load([*arguments, *more], PPOConfig, check).config, machine), machine)

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
        for what in ("optimizer_offload", "param_offload", "offload_policy"):
            yield from (f"{name}.fsdp_config.{what}=true" for name in roles)
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


@command("plan", "valor plan --gpus 8 --memory 80 actor_rollout_ref.model.path=MODEL", "memory", passes_options=True)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]…")
@option("--gpus", type=int, help="GPUs of a node that is not here; else this machine.")
@option("--nodes", type=int, default=1, help="Nodes of these.")
@option("--memory", type=float, help="GiB of each GPU (else 80), or of each process here.")
@option("--tflops", type=float, default=300.0, help="What a GPU reaches in training.")
@option("--bandwidth", type=float, default=2000.0, help="GB/s that it reaches.")
def main(
    settings: tuple[str, ...], gpus: int | None, nodes: int, memory: float | None, tflops: float, bandwidth: float
) -> int:
    """Memory by role and phase and the time of a step of valor ppo, before anything is loaded.

    The exit code is 1 where the run does not fit.
    """
    config = load(settings, PPOConfig, check).config
    if config.pools:
        pools = ", ".join(config.pools)
        raise UserError(f"valor plan is for roles that share their processes: leave out the pool {pools}")
    if gpus:
        machine = Machine("cuda", gpus * nodes, (memory or 80.0) * GIB, tflops * 1e12, bandwidth * 1e9)
    else:
        machine = this_machine((config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes)
        if memory:
            machine = replace(machine, memory=memory * GIB)
    found = estimate(config, machine)
    what = "GPU" if machine.device == "cuda" else f"process of {available_cores()} cores"
    print(f"memory of each of {machine.processes} x {what} ({machine.memory / GIB:.1f} GiB)")
    print(table(found, machine))
    if fits(found, machine):
        print("it fits")
        return 0
    advice = remedy(settings, machine)
    fewer = "a smaller model, or more GPUs (trainer.n_gpus_per_node, trainer.nnodes)"
    print(f"it does not fit in {found.worst.name}: " + (f"set {advice}" if advice else f"it needs {fewer}"))
    return 1
