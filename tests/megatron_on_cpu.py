"""Lets megatron-core run on a CPU, for tests: what it asks CUDA for is answered by the host.

Import it before a model is built; `model.external_lib=megatron_on_cpu` does so in every process of a run. Random
numbers are not forked, so nothing that is tested with it may draw any in the model.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

_HOST = torch.device("cpu")
_TYPE = torch.Tensor.type


class _Torch:
    """The module torch, for those of megatron-core that name the device themselves."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_host(found) if name in ("tensor", "zeros", "ones", "empty", "full") else found


def _on_host(function: Any) -> Any:
    """The same, but that a tensor asked for on a GPU is made on the host."""

    @wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = _HOST
        return function(*args, **kwargs)

    return made


class _Nothing:
    """A stream or an event: the host does one thing after another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class _OneStream:
    """The tracker of random states: there is one stream of numbers."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def fork(self, *args: Any) -> Any:
        return nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Its type's name, with which megatron-core sorts parameters, as on a GPU."""
    found = _TYPE(tensor, *args, **kwargs)
    host = isinstance(found, str) and not found.startswith("torch.cuda.")
    return found.replace("torch.", "torch.cuda.", 1) if host else found


@contextmanager
def _no_stream(*_: Any):
    yield


def install() -> None:
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.utils as utils

    cuda: Any = torch.cuda
    cuda.current_device = lambda: _HOST
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *args: _Nothing()
    cuda.stream = _no_stream
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _type  # type: ignore[method-assign]
    tracker = _OneStream()
    random.initialize_rng_tracker = lambda *args, **kwargs: None
    random._CUDA_RNG_STATE_TRACKER = tracker
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random.model_parallel_cuda_manual_seed = lambda *args, **kwargs: None
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )
    for module in (optimizer, clip_grads, schedules, utils):
        module.torch = _Torch()


install()
