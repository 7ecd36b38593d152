"""The names of other libraries in `valor.models.internals` are there, and do what they are used for."""

import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils

from valor.engines import distributed
from valor.models import internals


def test_torch() -> None:
    distributed.init_process_group("cpu")
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda *_: 1 / 0)
    with internals.hooks_off(layer):
        assert layer(torch.zeros(3)).shape == (3,)
    assert len(layer._forward_hooks) == 1
    part = fully_shard(nn.Linear(3, 3))
    assert isinstance(part, FSDPModule)
    part.set_requires_gradient_sync(False)
    part(torch.ones(2, 3)).sum().backward()
    parameters = part._get_fsdp_state()._fsdp_param_group.fsdp_params
    assert any(p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None for p in parameters)
    internals.drop_unreduced_gradients(part)
    assert all(p.unsharded_accumulated_grad is None and p._unsharded_param.grad is None for p in parameters)
    assert "_unsharded_param" in FSDPParam.__annotations__ and all(hasattr(p, "_unsharded_param") for p in parameters)
    assert internals.bfloat16_in_onednn() in (True, False)


def test_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))
    assert internals.unsplit_classes(hf) == {"LlamaDecoderLayer"}
    assert internals.has_attention_interface(hf) and not internals.has_attention_interface(nn.Linear(1, 1))
    empty = type(modeling_utils._CAN_RECORD_REGISTRY)()  # as in a process that has built none
    for module in (modeling_utils, sys.modules[modeling_utils.OutputRecorder.__module__]):
        monkeypatch.setattr(module, "_CAN_RECORD_REGISTRY", empty)
    internals.name_outputs(nn.Sequential(hf))
    assert len(hf(torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states) == 2
    internals.set_attention(hf.config, "eager")
    assert internals.attention_of(hf.config) == "eager" and hf.model.layers[0].self_attn.config is hf.config


def test_peft() -> None:
    from peft.tuners.lora import Linear, LoraConfig

    layer = Linear(nn.Linear(3, 3), "default", LoraConfig(r=2, init_lora_weights=False), r=2)
    x = torch.ones(1, 3)
    internals.switch_adapter(layer, on=False)
    assert torch.equal(layer(x), layer.base_layer(x)) and all(p.requires_grad for p in layer.lora_A.parameters())
    internals.switch_adapter(layer, on=True)
    assert not torch.equal(layer(x), layer.base_layer(x))
