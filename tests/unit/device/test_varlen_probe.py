"""Variable-length attention, on a CPU that is taken for a device that has it: probed outside of checkpointed layers."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tiny_sizes import SIZES
from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp.engine import FSDPEngine
from valor.models import attention
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel

ROWS = Batch(
    {
        "prompts": torch.arange(12).view(3, 4) + 3,
        "prompt_lengths": torch.tensor([4, 2, 3]),
        "responses": torch.arange(12).view(3, 4) + 9,
        "response_lengths": torch.tensor([4, 1, 3]),
    }
)


def varlen(query, key, value, segments, rule):
    """As torch's: it is told where rows begin by tensors, and the last query sees the last key."""
    offsets = segments.offsets if segments.key_offsets is None else segments.key_offsets
    assert segments.offsets.dtype is offsets.dtype is torch.int32
    if segments.keys is not None:
        key, value = key[segments.keys], value[segments.keys]
    found = []
    for (start, end), (first, last) in zip(
        pairwise(segments.offsets.tolist()), pairwise(offsets.tolist()), strict=True
    ):
        q, k, v = (x.transpose(0, 1) for x in (query[start:end], key[first:last], value[first:last]))
        seen = rule.visible(q.shape[1], k.shape[1], q.device)
        gqa = len(q) != len(k)
        found.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=rule.scaling, enable_gqa=gqa)
        )
    return torch.cat(found, dim=1).transpose(0, 1)


@pytest.fixture
def engine(monkeypatch):
    """Its first pass is an update, with gradient checkpointing."""
    monkeypatch.setattr(attention, "VARLEN_DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "_varlen", varlen)
    attention._varlen_agrees.cache_clear()
    distributed.init_process_group("cpu")
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    checkpoint_layers(hf)
    yield FSDPEngine(
        PolicyModel(hf, packed=True),
        fsdp=FSDPConfig(dtype="bfloat16"),
        optim=OptimConfig(),
        device=torch.device("cpu"),
    )
    distributed.leave_process_group()
    attention._varlen_agrees.cache_clear()


def test_the_first_backward_pass_finds_what_the_forward_pass_left(engine):
    probes = attention._varlen_agrees.cache_info().misses
    metrics = engine.forward_backward(ROWS, lambda out, rows: (out["log_probs"].sum(), {"rows": float(len(rows))}))
    assert metrics == {"rows": 3.0} and engine.optimizer_step()["grad_norm"] > 0
    assert attention._varlen_agrees.cache_info().misses == probes > 0


def test_where_rows_begin_is_copied_once_a_pass_and_not_once_a_layer(engine, monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "_varlen", lambda *a: seen.append(a[3].offsets.data_ptr()) or varlen(*a))
    engine.forward(ROWS)
    assert len(seen) == SIZES["num_hidden_layers"] and len(set(seen)) == 1
