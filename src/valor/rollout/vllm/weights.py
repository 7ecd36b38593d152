"""The weights that a vLLM engine in this process holds: written in place, packed again, and proved to be those sent.

Three things go silently wrong when weights are pushed into a running engine: a CPU build computes with packed copies
that a reload does not touch (a tied LM head keeps its old one for ever), a tensor can be missed, and cached keys and
values outlive the weights that made them. The engine salts its prompts with the number of the update; this file takes
care of the other two.
"""

# pyright: reportMissingImports=false
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers import utils as vllm_layers

from valor.errors import UserError
from valor.rollout.transfer import NamedTensors, checksum

# How layers may hold their weights: as they are loaded. Others (experts, quantized layers) rearrange them, or derive
# further tensors from them, when a model is loaded, and writing plain weights into that would go unnoticed.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Columns of each packed matrix that are compared after an update; other ones every time.
PROBED_COLUMNS = 4


@contextmanager
def weights_kept() -> Iterator[None]:
    """Models loaded inside keep their plain weights beside the packed copies that vLLM makes of them for a CPU."""
    pack = vllm_layers.dispatch_cpu_unquantized_gemm
    vllm_layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
    try:
        yield
    finally:
        vllm_layers.dispatch_cpu_unquantized_gemm = pack


class HeldWeights:
    """The parameters of `model`, vLLM's own module, or this rank's part of them.

    `dtype` is the engine's: weights are rounded to it before they are counted. `group`: the ranks that share the
    model by tensor parallelism, None for one. `model` must have been loaded inside `weights_kept`. UserError for a
    model whose layers keep their weights in a layout of their own.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        for module in model.modules():
            method = type(getattr(module, "quant_method", None)).__name__
            if method not in (*PLAIN_METHODS, "NoneType") or "MLA" in type(module).__name__:
                raise UserError(
                    f"{type(model).__name__} has {type(module).__name__} layers, whose weights vLLM keeps in a layout "
                    "of its own, so that they cannot follow the policy's: set actor_rollout_ref.rollout.name=native"
                )
        self._model: Any = model
        self._dtype = dtype
        tp = parallel_state.get_tp_group()
        self.group: dist.ProcessGroup | None = tp.cpu_group if tp.world_size > 1 else None
        self._packed: list[Any] = [m for m in model.modules() if "cpu_linear" in vars(m)]

    @torch.no_grad()
    def write(self, weights: NamedTensors, version: int) -> int:
        """Replace all weights by `weights` (whole tensors under their Hugging Face names); returns their checksum.

        Collective over the group. RuntimeError when the engine then holds anything else than what was sent.
        """
        sent: list[Tensor] = []
        self._model.load_weights(self._counted(weights, sent))
        for layer in self._packed:
            vllm_layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        expected = int(torch.stack(sent).sum())
        held = self._checksum(list(self._model.parameters()))
        if held != expected:
            raise RuntimeError(f"weights {version}: the engine holds {held:#x}, {expected:#x} was sent")
        for layer in self._packed:
            self._probe(layer, version)
        return held

    def _counted(self, weights: NamedTensors, sums: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            sums.append(checksum(tensor))
            yield name, tensor

    def _checksum(self, parameters: list[nn.Parameter]) -> int:
        """Checksum over the group; a parameter that is the same on all ranks is there once."""
        own = torch.stack([checksum(p.to(self._dtype) if p.is_floating_point() else p) for p in parameters]).cpu()
        if self.group is None:
            return int(own.sum())
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks, own, group=self.group)
        sums = torch.stack(ranks)
        replicated = (sums == sums[0]).all(dim=0)
        return int(torch.where(replicated, sums[0], sums.sum(dim=0)).sum())

    def _probe(self, layer: Any, version: int) -> None:
        """Products with unit vectors are columns of the matrix that the layer really computes with, bit for bit."""
        weight = layer.weight
        size = weight.shape[1]
        generator = torch.Generator().manual_seed(version)
        columns = torch.randint(size, (PROBED_COLUMNS,), generator=generator)
        units = torch.zeros(PROBED_COLUMNS, size, dtype=weight.dtype)
        units[torch.arange(PROBED_COLUMNS), columns] = 1
        if not torch.equal(layer.cpu_linear(units, weight, None), weight[:, columns].T):
            raise RuntimeError(f"weights {version}: a packed {type(layer).__name__} computes with other weights")
