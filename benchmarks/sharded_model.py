"""A tiny model under two ranks of FSDP2 against one rank: a column of `models.py`."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from valor.config.engine import FSDPConfig, ModelConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines.distributed import init_process_group, leave_process_group
from valor.engines.fsdp.engine import build_fsdp
from valor.errors import UserError
from valor.models.load import load_policy

LONGEST = 60  # seconds of a rank


def within(one: torch.Tensor, other: torch.Tensor) -> str:
    gap = (one - other).abs().max().item()
    return "yes" if gap <= 1e-5 else f"{gap:.0e}"


def in_fork(function: Callable[[], int], log: Path) -> None:
    """A run by itself. RuntimeError: its exit code and its last line."""
    process = fork(function, log)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{process.exitcode}: {log.read_text().strip().splitlines()[-1]}")


def fork(function: Callable[[], int], log: Path) -> ForkProcess:
    """A process that ends with what `function` returns."""

    def quiet() -> None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            raise SystemExit(function())

    process = multiprocessing.get_context("fork").Process(target=quiet)
    process.start()
    return process


def sharded(folder: str, out: Path, rows: dict[str, torch.Tensor]) -> str:
    """ "yes", or what differs: outputs, gradients relative to the largest, or log-probs after an update from those of
    its export."""
    for world in (1, 2):
        if failure := ranks(world, folder, out, rows):
            return f"NO: {failure[:90]}"
    one, two = (torch.load(out / f"{world}.pt") for world in (1, 2))
    for what in ("log_probs", "entropy", "gradients"):
        if (answer := within(one[what], two[what])) != "yes":
            return f"{what} {answer}"
    with torch.no_grad():
        plain = ModelConfig(path=str(out / "export"), enable_gradient_checkpointing=False)
        exported = load_policy(plain)(rows)["log_probs"]
    return "yes" if (answer := within(exported, two["after"])) == "yes" else f"export {answer}"


def ranks(world: int, folder: str, out: Path, rows: dict[str, torch.Tensor]) -> str:
    """Run all ranks; the last line of one that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [out / f"rank{rank}" for rank in range(world)]
    processes = [fork(partial(on_rank, folder, out, rows, rank, world, port), log) for rank, log in enumerate(logs)]
    for process in processes:
        process.join(LONGEST)
    waiting = [process for process in processes if process.exitcode is None]
    for process in waiting:
        process.kill()
    for process, log in zip(processes, logs, strict=True):
        if process.exitcode and process not in waiting:
            return [f"exit code {process.exitcode}", *log.read_text().strip().splitlines()][-1]
    return "waits for ever" if waiting else ""


def can_checkpoint(folder: str) -> bool:
    try:
        load_policy(ModelConfig(path=folder))
    except UserError:
        return False
    return True


def on_rank(folder: str, out: Path, rows: dict[str, torch.Tensor], rank: int, world: int, port: int) -> int:
    """Saves what is compared; each layer is gathered for each use, as on GPUs."""
    init_process_group("cpu", rank=rank, world_size=world, address="127.0.0.1", port=port)
    section = SimpleNamespace(fsdp_config=FSDPConfig(dtype="float32", reshard_after_forward=True))
    section.optim = OptimConfig(lr=1e-4, clip_grad=1e9)
    model, load = ModelConfig(path=folder), partial(load_policy, ModelConfig(path=folder))
    if not can_checkpoint(folder):
        load = partial(load_policy, ModelConfig(path=folder, enable_gradient_checkpointing=False))
    engine = build_fsdp(section, model, load, device=torch.device("cpu"), total_steps=1)
    indices = [*range(rank, len(rows["prompts"]), world)]
    share = Batch(rows).take(indices)

    def outputs(name: str, **options: Any) -> torch.Tensor:
        all_rows = torch.zeros(rows["responses"].shape)
        all_rows[indices] = engine.forward(share, **options)[name]
        dist.all_reduce(all_rows)
        return all_rows

    result = {"log_probs": outputs("log_probs"), "entropy": outputs("entropy", with_entropy=True)}
    engine.forward_backward(share, lambda outputs, _: (outputs["log_probs"].sum() / 20, {}))
    weights: list[Any] = [*engine.module.parameters()]  # those that no row uses have no gradient, or one of zeros
    flat = torch.cat([(w.full_tensor() * 0 if w.grad is None else w.grad.full_tensor()).flatten() for w in weights])
    result["gradients"] = flat / flat.abs().max()
    engine.optimizer_step()
    engine.export(out / "export")
    result["after"] = outputs("log_probs")
    if rank == 0:
        torch.save(result, out / f"{world}.pt")
    leave_process_group()
    return 0
