"""The weights that a vLLM engine in this process holds: written in place, packed again, and proved to be those sent.

Three things go silently wrong when weights are pushed into a running engine: a CPU build computes with packed copies
that a reload does not touch (a tied LM head keeps its old one for ever), a tensor can be missed, and cached keys and
values outlive the weights that made them. The engine salts its prompts with the number of the update; this file takes
care of the other two.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from valor.errors import UserError
from valor.rollout.transfer import NamedTensors, checksum
from valor.rollout.vllm import internals

# Columns of each packed matrix that are compared after an update; other ones every time.
PROBED_COLUMNS = 4


class HeldWeights:
    """The parameters of `model`, vLLM's own module, or this rank's part of them.

    `dtype` is the engine's: weights are rounded to it before they are counted. `group`: the ranks that share the
    model by tensor parallelism, None for one. `model` must have been loaded inside `plain_weights_remain`. UserError
    for a model whose layers keep their weights in a layout of their own.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        if layers := internals.layers_with_own_layout(model):
            raise UserError(
                f"{type(model).__name__} has {layers[0]} layers, whose weights vLLM keeps in a layout of its own, so "
                "that they cannot follow the policy's: set actor_rollout_ref.rollout.name=native"
            )
        self._model: Any = model
        self._dtype = dtype
        self.group = internals.tensor_parallel_group()
        self._packed = internals.packed_layers(model)
        self._packed_experts = internals.packed_experts(model)

    @torch.no_grad()
    def write(self, weights: NamedTensors, version: int) -> int:
        """Replace all weights by `weights` (unsharded, under their Hugging Face names); returns their checksum.

        Collective over the group. RuntimeError when the engine then holds anything else than what was sent.
        """
        sent: list[Tensor] = []
        for layer in self._packed_experts:
            internals.unpack_experts(layer)
        self._model.load_weights(self._counted(weights, sent))
        for layer in self._packed:
            internals.pack_again(layer)
        expected = int(torch.stack(sent).sum())
        total = self._checksum(list(self._model.parameters()))
        if total != expected:
            raise RuntimeError(f"weights {version}: the engine holds {total:#x}, {expected:#x} was sent")
        for layer in self._packed:
            self._probe(layer, version)
        for layer in self._packed_experts:
            internals.pack_experts(layer)
            self._probe_experts(layer, version)
        return total

    def _counted(self, weights: NamedTensors, sums: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            sums.append(checksum(tensor))
            yield name, tensor

    def _checksum(self, parameters: list[nn.Parameter]) -> int:
        """Checksum over the group; a parameter that is the same on all ranks counts once."""
        local = torch.stack([checksum(p.to(self._dtype) if p.is_floating_point() else p) for p in parameters]).cpu()
        if self.group is None:
            return int(local.sum())
        ranks = [torch.empty_like(local) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks, local, group=self.group)
        sums = torch.stack(ranks)
        replicated = (sums == sums[0]).all(dim=0)
        return int(torch.where(replicated, sums[0], sums.sum(dim=0)).sum())

    def _probe(self, layer: Any, version: int) -> None:
        """Products with unit vectors are columns of the matrix that the layer really computes with, bit for bit."""
        size = layer.weight.shape[1]
        columns = torch.randint(size, (PROBED_COLUMNS,), generator=torch.Generator().manual_seed(version))
        units = nn.functional.one_hot(columns, size).to(layer.weight.dtype)
        if not torch.equal(internals.packed_product(layer, units), layer.weight[:, columns].T):
            raise RuntimeError(f"weights {version}: a packed {type(layer).__name__} computes with other weights")

    def _probe_experts(self, layer: Any, version: int) -> None:
        """Each expert computes what plain products with the written weights give, up to rounding."""
        experts, _, hidden = layer.plain_experts["w13_weight"][1].shape
        x = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(version)).to(self._dtype)
        computed, plain = internals.expert_outputs(layer, x)
        rounding = 64 * torch.finfo(self._dtype).eps * plain.abs().amax(dim=-1, keepdim=True)
        if not ((computed - plain).abs() <= rounding).all():
            raise RuntimeError(f"weights {version}: experts of a {type(layer).__name__} compute with other weights")
