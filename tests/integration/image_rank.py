"""On every rank: a pass and an update of a model that reads images, where one rank's rows have none."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from valor.config.engine import FSDPConfig, ModelConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines.fsdp.engine import FSDPEngine
from valor.models.load import load_policy


def image_step(model: Path, rows: Batch, out: Path) -> None:
    """Log-probs of this rank's rows, and the gradients, to files. The last rank has the last half of the rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = len(rows) // world
    share = rows.take(range(rank * each, (rank + 1) * each))
    fsdp = FSDPConfig(dtype="float32", reshard_after_forward=True)
    policy = load_policy(ModelConfig(path=str(model)))
    engine = FSDPEngine(policy, fsdp=fsdp, optim=OptimConfig(lr=1e-2), device=torch.device("cpu"), total_steps=2)
    limits = {"max_tokens": 80}  # so that one rank has more micro-batches than the other
    log_probs = engine.forward(share, **limits)["log_probs"]
    engine.forward_backward(share, lambda outputs, micro: (outputs["log_probs"].mean(-1).sum(), {}), **limits)
    gradients = {
        name: p.grad.full_tensor().clone() if p.grad is not None else torch.zeros(1)
        for name, p in engine.module.named_parameters()
    }
    engine.optimizer_step()
    save_file({"log_probs": log_probs}, out / f"{world}.{rank}.outputs")
    if rank == 0:
        save_file({name: x.contiguous() for name, x in gradients.items()}, out / f"{world}.gradients")
