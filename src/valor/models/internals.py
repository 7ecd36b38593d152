"""What is used of torch, transformers, peft and Liger beyond their public names, and why.

Checked with torch 2.13, transformers 5.5 to 5.23, peft 0.21 and liger-kernel 0.8. Where a name is gone,
tests/unit/models/test_internals.py fails.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def bfloat16_in_onednn() -> bool:
    """Whether oneDNN has instructions of this CPU for bfloat16. torch.cpu.get_capabilities() says so of x86 alone."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def hooks_off(module: nn.Module) -> Iterator[None]:
    """No hooks around the forward pass of `module` inside: FSDP's cost a fifth of a decoding step of a small model."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = before, after


def around(module: nn.Module, hf: nn.Module) -> Any:
    """A shallow copy of a model that has `hf` in place of its transformers model, and shares all else."""
    model: Any = copy.copy(module)
    model._modules = {**module._modules, "hf": hf}
    return model


def drop_unreduced_gradients(part: Any) -> None:
    """Forget the gradients that a backward pass, which was broken off, left in a module of FSDP2 before their
    reduction."""
    group = part._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group else ():
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def unsplit_classes(module: nn.Module) -> set[str]:
    """Names of the classes that transformers marks as not to be split over devices: the layers."""
    return {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}


def attention_of(config: Any) -> str:
    """The name of the attention function of a transformers config."""
    return str(config._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Set it without the checks of `set_attn_implementation`, which take a name of ours for a kernel on the hub."""
    config._attn_implementation = name


def has_attention_interface(model: nn.Module) -> bool:
    """Whether a transformers model calls the attention function that its config names."""
    return bool(getattr(model, "_supports_attention_backend", False))


def switch_adapter(layer: Any, *, on: bool) -> None:
    """peft's public switch also changes requires_grad, which FSDP has read already."""
    layer._disable_adapters = not on


def use_liger_kernels(hf: Any) -> None:
    """Liger's kernels in a built model, but for the head and its loss, which `token_log_probs` computes."""
    from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

    monkey_patch._apply_liger_kernel_to_instance(hf, fused_linear_cross_entropy=False, cross_entropy=False)
