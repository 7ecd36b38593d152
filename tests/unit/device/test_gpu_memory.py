"""Memory of a GPU that is pretended: what a generation may take, and what happens when it runs out."""

import logging
import os
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tiny_sizes import SIZES
from valor.config import ModelConfig
from valor.config.rollout import RolloutConfig
from valor.engines.registry import DEFAULT_STRATEGY, TRAINING_ENGINES
from valor.errors import TrainingStopped, UserError, out_of_memory
from valor.models.hf import cache_bytes_per_token
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native import engine as native
from valor.rollout.vllm.options import check_free_memory, engine_options
from valor.workers.host import WorkerContext
from valor.workers.memory import PeakMemory, use_expandable_segments
from valor.workers.model_role import ModelRole

CONFIG = Qwen2Config(**SIZES, tie_word_embeddings=True)
GIB = 2**30


@pytest.fixture
def hf():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


def requests(count: int = 12, tokens: int = 20) -> list[Request]:
    return [Request(str(i), [3 + i % 3, 7, 8], SamplingParams(max_tokens=tokens), (i,)) for i in range(count)]


def test_the_cache_of_a_36_layer_model_by_hand():
    config = Qwen2Config(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8)
    assert cache_bytes_per_token(config, 2) == 2 * 36 * 8 * 128 * 2 == 147456


def test_rows_that_decode_together_are_bounded_by_free_memory(hf, monkeypatch):
    rows = []
    slots = native.SlotCache
    monkeypatch.setattr(native, "SlotCache", lambda count, **how: rows.append(count) or slots(count, **how))
    expected = native.NativeEngine(hf, eos_token_ids=[2]).generate(requests())
    row = cache_bytes_per_token(CONFIG, 4) * 23
    monkeypatch.setattr(native, "free_bytes", lambda device: 5 * row / native.CACHE_SHARE + 1)
    found = native.NativeEngine(hf, eos_token_ids=[2]).generate(requests())
    assert rows == [12, 5]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("text", ["CUDA out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_a_generation_that_runs_out_of_memory_goes_on_with_fewer_rows(hf, monkeypatch, caplog, text):
    expected = native.NativeEngine(hf, eos_token_ids=[2]).generate(requests())
    embed, told = hf.get_input_embeddings(), []

    def full(ids, forward=embed.forward):
        if ids.shape[0] > 3 and ids.shape[1] == 1:
            raise RuntimeError(text)
        return forward(ids)

    monkeypatch.setattr(embed, "forward", full)
    engine = native.NativeEngine(hf, eos_token_ids=[2])
    asked = [Request(r.request_id, r.prompt_ids, r.params, r.seed, told.append) for r in requests()]
    with caplog.at_level(logging.WARNING):
        found = engine.generate(asked)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sorted(one.request_id for one in told) == sorted(one.request_id for one in asked)  # each once
    assert "rollout.max_num_seqs=3" in caplog.text
    caplog.clear()
    engine.generate(asked)
    assert not caplog.text  # for the rest of the run


def test_a_single_row_that_does_not_fit_ends_the_run_in_a_line(hf, monkeypatch):
    def full(ids):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = native.NativeEngine(hf, eos_token_ids=[2])
    engine.generate(requests(1))
    monkeypatch.setattr(hf.get_input_embeddings(), "forward", full)
    with pytest.raises(TrainingStopped, match=r"data\.max_response_length"):
        engine.generate(requests(1))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_running_out_of_memory_looks_like(error, found):
    assert out_of_memory(error) is found


def test_vllm_is_refused_in_a_line_before_it_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    rollout, device = RolloutConfig(name="vllm", gpu_memory_utilization=0.5), torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"40\.0 of the GPU's 80\.0 GiB.* 30\.0 GiB are free: set it to at most 0\.37"):
        check_free_memory(rollout, device)
    check_free_memory(rollout.model_copy(update={"gpu_memory_utilization": 0.37}), device)


@pytest.mark.parametrize("size", [1, 2])
def test_vllm_does_not_share_buffers_of_expandable_segments(size):
    rollout = RolloutConfig(name="vllm", tensor_model_parallel_size=size, max_model_len=16)
    options = engine_options(rollout, ModelConfig(path="x"), CONFIG, torch.device("cuda", 0), size)
    assert options.get("disable_custom_all_reduce", False) is (size > 1)


@dataclass
class Moved:
    """An engine that tells when it moves."""

    name: str
    log: list[str]
    data_parallel_rank = 0

    def onload(self, *, optimizer: bool = True) -> None:
        self.log.append(f"{self.name} comes{' with its optimizer' * optimizer}")

    def offload(self) -> None:
        self.log.append(f"{self.name} leaves")


def role(context: WorkerContext, name: str, log: list[str], monkeypatch) -> ModelRole:
    monkeypatch.setitem(TRAINING_ENGINES, DEFAULT_STRATEGY, lambda *a, **k: Moved(name, log))
    return ModelRole(context, object(), None, None)  # type: ignore[arg-type]


def test_a_role_moves_once_for_all_its_mini_batches(monkeypatch):
    log: list[str] = []
    context = WorkerContext(0, 1, torch.device("cpu"))
    actor, critic = (role(context, name, log, monkeypatch) for name in ("actor", "critic"))

    def turns(one: ModelRole, count: int, **options) -> list[str]:
        log.clear()
        for _ in range(count):
            with one.on_device(**options):
                pass
        return [line for line in log if "leaves" in line]

    assert turns(actor, 1) == []
    assert turns(critic, 3, optimizer=True) == ["actor leaves"]
    assert turns(actor, 3, optimizer=True) == ["critic leaves"]
    assert turns(actor, 2) == ["actor leaves"]  # its optimizer state makes room
    log.clear()
    with actor.on_device(), critic.on_device():  # the exact KL: both are needed
        context.make_room()
        assert not [line for line in log if "leaves" in line]
    context.make_room()
    assert sorted(line for line in log if "leaves" in line) == ["actor leaves", "critic leaves"]


def test_memory_is_measured_by_torch_and_by_the_driver(monkeypatch):
    """What torch counts as held may sleep elsewhere: the driver's number stands beside it, the largest of each kind."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    allocated, free = iter([50 * GIB, 40 * GIB]), iter([70 * GIB, 60 * GIB])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the next call maps all of it anew"))
    memory = PeakMemory(torch.device("cuda", 0))
    for _ in range(2):
        with memory("actor.update"):
            pass
    assert memory.take() == {
        "perf/max_memory_allocated_gb/actor.update": 50.0,
        "perf/device_memory_used_gb/actor.update": 20.0,
    }
    assert memory.take() == {}


@pytest.mark.parametrize("theirs", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_settings_are_the_users_or_have_the_name_that_torch_does_not_warn_of(theirs, monkeypatch):
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if theirs is not None:
        monkeypatch.setenv(theirs, "max_split_size_mb:64")
    use_expandable_segments()
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = {name: os.environ[name] for name in names & os.environ.keys()}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert found == (ours if theirs is None else {theirs: "max_split_size_mb:64"})
