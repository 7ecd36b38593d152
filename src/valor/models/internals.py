"""What is used of torch, transformers, peft and Liger beyond their public names, and why.

Checked with torch 2.11, 2.13 and 2.15, transformers 5.17 to 5.24, peft 0.21 and liger-kernel 0.8. Where a name is
gone, tests/unit/models/test_internals.py fails. Names that came or went within these versions are here too.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing


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


def name_outputs(module: nn.Module) -> None:
    """Tell transformers which outputs the models inside have, such as hidden states: it learns that where a model is
    built, and not where a copy comes from another process."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(type(part)), part._can_record_outputs)


def without_config(hf: nn.Module) -> nn.Module:
    """The parts of a model, shared with it, in a module without `config`.

    By a config's type peft 0.21 takes the names gate_proj, up_proj, down_proj and gate for transformers 4's experts and
    routers, and so misses the shared experts and dense layers of DeepSeek, GLM and others, which have those names.
    """
    plain = nn.Module()
    plain._modules = hf._modules
    return plain


def peft_renames(hf: Any, config: Any) -> bool:
    """Whether peft, reading this LoraConfig for this model, takes names of layers for those of experts or gives up."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    again = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(again, model=hf, conversions=None)
    except ValueError:
        return True
    return bool(again.target_parameters)


def drop_unreduced_gradients(part: Any) -> None:
    """Forget the gradients that a backward pass, which was broken off, left in a module of FSDP2 before their
    reduction."""
    group = part._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group else ():
        if "unsharded_accumulated_grad" in vars(parameter):  # torch before 2.15
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def forget_broken_pass(root: Any) -> None:
    """FSDP2 of one rank as if the pass that an exception broke off had not begun; its gradients are lost.

    torch 2.13 has a name for it. Before, what the pass has left is dropped when the device has done its work.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    state = root._get_fsdp_state()
    shared, streams = state._state_ctx, state._comm_ctx
    streams.all_gather_state = streams.reduce_scatter_state = None
    streams.post_forward_order.clear()
    for part in shared.all_states:
        part._modules_to_run_forward.clear()
        part._training_state = TrainingState.IDLE
        if (group := part._fsdp_param_group) is not None:
            group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
            group._post_reduce_event = group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False


@lru_cache
def takes_enable_gqa(varlen_attn: Any) -> bool:
    """Whether torch's variable-length attention has to be told of fewer key heads. In 2.11 its kernel takes them
    untold."""
    return "enable_gqa" in signature(varlen_attn).parameters


def checkpoint_layers(hf: Any) -> None:
    """Keep a layer's input alone for the backward pass, which computes the rest again. ValueError: the class cannot."""
    newer, older = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(hf, newer if hasattr(hf, newer) else older)({"use_reentrant": False})


def register_model(auto: Any, config: type, made: type) -> None:
    """Make an Auto class of transformers know `made` for `config`. 5.17's public name passes over
    configs of transformers itself."""
    auto.register(config, made, exist_ok=True)
    if config not in auto._model_mapping:
        auto._model_mapping._extra_content[config] = made


def read_weights_as(made: str, other: str) -> None:
    """Make a class of ours read checkpoints under the names that transformers' class `other` reads."""
    from transformers import conversion_mapping

    if (names := conversion_mapping.get_checkpoint_conversion_mapping(other)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(made, names, overwrite=True)


def save_as_floats(hf: Any) -> None:
    """Forget how a checkpoint's weights were quantized: transformers would quantize what it saves in the same way, in a
    directory whose config says nothing of it."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    used = getattr(hf, "_weight_conversions", None) or []
    if not any(map(_dequantizes, used)):
        return
    plain = {tuple(one.target_patterns): one for one in get_model_conversion_mapping(hf, add_legacy=False)}
    unquantized = [plain.get(tuple(one.target_patterns)) if _dequantizes(one) else one for one in used]
    hf._weight_conversions = [conversion for conversion in unquantized if conversion is not None]


def _dequantizes(conversion: Any) -> bool:
    return any("Dequantize" in type(operation).__name__ for operation in getattr(conversion, "operations", ()))


def processor_without_video(config: Any) -> Any:
    """The processor class of a model's config, as one of images and text: what reads video needs torchvision."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING[type(config)]
    parts = [name for name in kind.get_attributes() if "video" not in name]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: parts)})


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
