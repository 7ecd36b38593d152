"""Optimizers and learning-rate schedules by the keys of `optim`."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from valor.config.engine import OptimConfig
from valor.models.value import HEAD_NAMES


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that `optim.optimizer` names, over the trainable parameters of `module`."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if optim.optimizer == "AdamW":
        return _adamw(trained, optim)
    left_out = {id(p) for part in _embeddings_and_heads(module) for p in part.parameters()}
    hidden = {id(p) for p in trained if p.ndim == 2 and id(p) not in left_out}
    return Muon([p for p in trained if id(p) in hidden], [p for p in trained if id(p) not in hidden], optim)


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for all other parameters, with one learning rate.

    An update of a matrix is scaled to the root mean square that AdamW's updates have (arXiv 2502.16982), so that a
    learning rate and a weight decay tuned for AdamW serve both.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], optim: OptimConfig) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__([*matrices, *others], {})
        if matrices:
            decay, momentum = optim.weight_decay, optim.momentum
            self._parts.append(
                torch.optim.Muon(
                    matrices, lr=optim.lr, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            self._parts.append(_adamw(others, optim))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:
        for part in self._parts:
            part.step()


def _adamw(parameters: list[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Torch's fused AdamW; weight decay acts on every parameter."""
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def _embeddings_and_heads(module: nn.Module) -> Iterator[nn.Module]:
    """Modules whose matrices are tables of tokens or outputs: Muon is for those between them."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) or name.rpartition(".")[2] in HEAD_NAMES:
            yield part
        elif isinstance(part, PreTrainedModel) and (head := part.get_output_embeddings()) is not None:
            yield head


def lr_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """What multiplies `lr` in schedule step `step` = 0, 1, …, total_steps - 1.

    Warm-up lasts `lr_warmup_steps` steps (-1: `lr_warmup_steps_ratio` of `total_steps`) and uses (step + 1) / warmup:
    no update is spent at rate 0, and the last warm-up step has the full rate. The step after it starts the decay from
    1: `constant` stays; `linear` and `cosine` (half a period) fall to `min_lr_ratio` at `total_steps`. The floor is
    first reached by a step beyond the last.
    """
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * max(total_steps, 0))
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if optim.lr_scheduler_type == "linear":
        left = 1.0 - done
    else:
        left = max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
    return optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left


def global_norm(tensors: Sequence[DTensor]) -> float:
    """The 2-norm over all numbers of all shards, the same on every rank."""
    if not tensors:
        return 0.0
    # torch's own norm goes through DTensor dispatch for every tensor and operation.
    norms = [torch.linalg.vector_norm(tensor.to_local(), dtype=torch.float32) for tensor in tensors]
    squares = torch.stack(norms).double().square()
    if (world := dist.get_world_size()) == 1:
        return float(squares.sum().sqrt())
    shares = [_num_shards(tensor) / world for tensor in tensors]
    square = (squares * torch.tensor(shares, dtype=torch.float64, device=squares.device)).sum()
    dist.all_reduce(square)
    return float(square.sqrt())


def _num_shards(tensor: DTensor) -> int:
    """Into how many parts it is cut; each is on as many ranks as there are ranks to a part."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
