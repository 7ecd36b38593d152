"""Memory of one training rank by world size: weights, gradients and optimizer state as held, and resident peaks.

    python benchmarks/world_sizes.py [--layers 8] [--hidden 512] [--out benchmarks/results/world_sizes.md]

Processes on this machine over gloo; a model directory of random weights in bfloat16, loaded to train in float32, one
update to fill the optimizer, a second one measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import FSDPConfig, ModelConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp.engine import FSDPEngine
from valor.engines.fsdp.loading import built_once
from valor.models.load import load_policy
from valor.workers.memory import PeakMemory, peak_rss_gb

CASES = (
    ("shard over all", {}),
    ("fsdp_size=2", {"fsdp_size": 2}),
)


def held(tensors: Any) -> float:
    """GiB of this rank's own parts."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local) / 2**30


def make_model(path: Path, **sizes: Any) -> Path:
    sizes["intermediate_size"] = sizes["hidden_size"] * 11 // 4
    config = Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=8)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def train(device: torch.device, fsdp: dict[str, Any], peak: PeakMemory, path: Path) -> tuple[float, float, float]:
    """Load a policy, two updates; GiB of weights, gradients and optimizer state that this rank holds."""
    with peak("load"):
        model = ModelConfig(path=str(path), enable_gradient_checkpointing=False)
        policy = built_once(partial(load_policy, model), prepare=lambda: None)
        engine = FSDPEngine(policy, fsdp=FSDPConfig(dtype="float32", **fsdp), optim=OptimConfig(), device=device)
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


def measure(rank: int, world: int, port: int, root: Path, fsdp: dict[str, Any], out: Any) -> None:
    """One rank: a tiny model first, so that everything is imported; puts (rank, held …, peaks over that) into `out`."""
    torch.set_num_threads(1)
    device = distributed.init_process_group("cpu", rank=rank, world_size=world, address="127.0.0.1", port=port)
    peak = PeakMemory(device)
    train(device, fsdp, peak, root / "tiny")
    with peak("bare"):
        bare = peak_rss_gb()
    peak.take()
    found = train(device, fsdp, peak, root / "model")
    peaks = peak.take()
    out.put((rank, *found, *(peaks[f"perf/peak_rss_gb/{call}"] - bare for call in ("update 1", "load"))))
    distributed.leave_process_group()


def row(world: int, name: str, fsdp: dict[str, Any], root: Path) -> str:
    context = multiprocessing.get_context("forkserver")
    out: SimpleQueue = context.SimpleQueue()  # type: ignore[assignment]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(measure, (world, port, root, fsdp, out), nprocs=world, start_method="forkserver")  # type: ignore[attr-defined]
    found = sorted(out.get() for _ in range(world))
    *held_and_peak, _ = (f"{max(column):.3f}" for column in zip(*(one[1:] for one in found), strict=True))
    first, *others = (one[-1] for one in found)
    loading = (f"{first:.3f}", f"{max(others):.3f}" if others else "")
    return f"| {' | '.join([str(world), name, *held_and_peak, *loading])} |"


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
            "valor.engines.fsdp.engine",
        ]
    )
    lines = [
        f"GiB of the fullest rank, {args.layers} layers of {args.hidden}, vocabulary {args.vocab}, float32, AdamW.",
        "Peaks are of resident memory, over the bare process.",
        "",
        "| ranks | | weights | gradients | optimizer | peak of an update | peak of loading: rank 0 | another rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_model(root / "tiny", hidden_size=64, num_hidden_layers=1, vocab_size=64)
        make_model(root / "model", hidden_size=args.hidden, num_hidden_layers=args.layers, vocab_size=args.vocab)
        for world in (1, 2, 4):
            for name, fsdp in CASES:
                if world == 4 or not fsdp:
                    lines.append(row(world, name, fsdp, root))
                    print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(["# Memory by world size", "", *lines, ""]))


if __name__ == "__main__":
    main()
