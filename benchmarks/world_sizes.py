"""Memory of one training rank by world size: weights, gradients and optimizer state as held, and the resident peak.

    python benchmarks/world_sizes.py [--layers 8] [--hidden 512] [--out benchmarks/results/world_sizes.md]

Processes on this machine over gloo; a model of random weights, one update to fill the optimizer, a second one measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp import TrainEngine
from valor.models.policy import PolicyModel
from valor.workers.memory import PeakMemory, peak_rss_gb

CASES = (("shard over all", {}), ("fsdp_size=2", {"fsdp_size": 2}))


def held(tensors: Any) -> float:
    """GiB of this rank's own parts."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local) / 2**30


def train(device: torch.device, fsdp: dict[str, Any], peak: PeakMemory, **sizes: int) -> tuple[float, float, float]:
    """Two updates of a policy; GiB of weights, gradients and optimizer state that this rank holds."""
    torch.manual_seed(0)
    sizes["intermediate_size"] = sizes["hidden_size"] * 11 // 4
    config = Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=8)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config), packed=True)
    engine = TrainEngine(policy, fsdp=FSDPConfig(dtype="float32", **fsdp), optim=OptimConfig(), device=device)
    ids, lengths, gradients = torch.arange(32)[None] + 5, torch.tensor([32]), 0.0
    batch = Batch({"prompts": ids, "prompt_lengths": lengths, "responses": ids, "response_lengths": lengths})
    for number in range(2):
        with peak(f"update {number}"):
            engine.forward_backward(batch, lambda outputs, rows: (-outputs["log_probs"].mean(), {}))
            gradients = held(p.grad for p in engine.module.parameters() if p.grad is not None)
            engine.optimizer_step()
    assert engine.optimizer is not None
    states = [v for state in engine.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return held(engine.module.parameters()), gradients, held(states)


def measure(rank: int, world: int, port: int, args: argparse.Namespace, fsdp: dict[str, Any], out: Any) -> None:
    """One rank: a tiny model first, so that everything is imported; puts (rank, held …, peak over that) into `out`."""
    torch.set_num_threads(1)
    device = distributed.init_process_group("cpu", rank=rank, world_size=world, address="127.0.0.1", port=port)
    peak = PeakMemory(device)
    train(device, fsdp, peak, hidden_size=64, num_hidden_layers=1, vocab_size=64)
    with peak("bare"):
        bare = peak_rss_gb()
    found = train(device, fsdp, peak, hidden_size=args.hidden, num_hidden_layers=args.layers, vocab_size=args.vocab)
    out.put((rank, *found, peak.take()["perf/peak_rss_gb/update 1"] - bare))
    distributed.destroy_process_group()


def row(world: int, name: str, fsdp: dict[str, Any], args: argparse.Namespace) -> str:
    context = multiprocessing.get_context("forkserver")
    out: SimpleQueue = context.SimpleQueue()  # type: ignore[assignment]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(measure, (world, port, args, fsdp, out), nprocs=world, start_method="forkserver")  # type: ignore[attr-defined]
    found = [out.get()[1:] for _ in range(world)]
    weights, gradients, states, peak = (max(column) for column in zip(*found, strict=True))
    return f"| {world} | {name} | {weights:.3f} | {gradients:.3f} | {states:.3f} | {peak:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")  # what is freed leaves the process at once
    multiprocessing.set_forkserver_preload(
        [
            "torch.distributed.tensor",
            "transformers.models.qwen2.modeling_qwen2",
            "valor.engines.fsdp",
        ]
    )
    lines = [
        f"GiB of the fullest rank, {args.layers} layers of {args.hidden}, vocabulary {args.vocab}, float32, AdamW.",
        "",
        "| ranks | | weights | gradients | optimizer | resident peak of an update, over the bare process |",
        "|---|---|---|---|---|---|",
    ]
    for world in (1, 2, 4):
        for name, fsdp in CASES:
            if world == 4 or not fsdp:
                lines.append(row(world, name, fsdp, args))
                print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(["# Memory by world size", "", *lines, ""]))


if __name__ == "__main__":
    main()
