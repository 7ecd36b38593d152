"""The training engine and the native engine on one GPU, against the same numbers of the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines.fsdp.engine import FSDPEngine
from valor.models.attention import _varlen_agrees
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native import replays
from valor.rollout.native.engine import NativeEngine
from valor.workers.memory import use_deterministic_algorithms

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}


def causal_lm(checkpointing: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    if checkpointing:
        checkpoint_layers(hf)
    return hf


def batch(rows: int = 16, width: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    return Batch(
        {
            "prompts": torch.randint(3, 1024, (rows, 32), generator=generator),
            "prompt_lengths": torch.randint(1, 33, (rows,), generator=generator),
            "responses": torch.randint(3, 1024, (rows, width), generator=generator),
            "response_lengths": lengths,
            "weights": torch.randn(rows, width, generator=generator) * (torch.arange(width) < lengths[:, None]),
        }
    )


def build(device: torch.device, *, checkpointing: bool = True, packed: bool = True, **fsdp) -> FSDPEngine:
    model = PolicyModel(causal_lm(checkpointing), packed=packed)
    return FSDPEngine(model, fsdp=FSDPConfig(**fsdp), optim=OptimConfig(lr=1e-3), device=device, total_steps=10)


def loss(outputs, rows):
    value = -(outputs["log_probs"] * rows["weights"]).sum() / 500
    return value, {"loss": value.detach()}


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor().float().cpu() for name, p in engine.module.named_parameters()}


def test_float32_passes_are_those_of_the_cpu(cuda):
    found, expected = (build(device, dtype="float32") for device in (cuda, torch.device("cpu")))
    rows = batch()
    torch.testing.assert_close(found.forward(rows), expected.forward(rows), rtol=1e-4, atol=1e-4)
    assert found.forward_backward(rows, loss) == pytest.approx(expected.forward_backward(rows, loss), rel=1e-3)
    theirs = gradients(expected)
    for name, grad in gradients(found).items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-2, atol=1e-5)


def test_a_first_update_in_packed_bfloat16_with_checkpointing(cuda):
    """Variable-length attention is probed when the engine is built, or the recomputation would not find its tensors."""
    engine = build(cuda, dtype="bfloat16")
    probes = _varlen_agrees.cache_info()
    metrics = engine.forward_backward(batch(), loss)
    assert _varlen_agrees.cache_info().misses == probes.misses
    padded = build(cuda, dtype="bfloat16", packed=False)
    assert metrics["loss"] == pytest.approx(padded.forward_backward(batch(), loss)["loss"], abs=2e-2)


def test_offloading_changes_no_number(cuda):
    plain, moved = build(cuda), build(cuda, param_offload=True, optimizer_offload=True)
    for _ in range(3):
        moved.onload()
        assert moved.forward_backward(batch(), loss) == plain.forward_backward(batch(), loss)
        assert moved.optimizer_step() == plain.optimizer_step()
        before = torch.cuda.memory_allocated()
        moved.offload()
        assert torch.cuda.memory_allocated() < before


def test_running_out_of_memory_halves_the_micro_batches(cuda):
    rows = batch(256, 256)
    expected = build(cuda, checkpointing=False).forward_backward(rows, loss, max_tokens=4096)
    engine = build(cuda, checkpointing=False)
    torch.cuda.empty_cache()  # the pass takes 1.4 GiB, and gets 1
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    try:
        found = engine.forward_backward(rows, loss)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found["oom_retries"] > 0 and found["loss"] == pytest.approx(expected["loss"], abs=1e-2)


def test_deterministic_algorithms_give_equal_bits(cuda):
    use_deterministic_algorithms()
    try:
        runs = []
        for _ in range(2):
            engine = build(cuda, dtype="bfloat16")
            engine.forward_backward(batch(64), loss)
            runs.append(gradients(engine))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grad, runs[1][name]) for name, grad in runs[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_engine_samples_what_it_says(cuda, dtype):
    """Tokens and log-probs of a decode, against one pass of the model over what it said."""
    hf = causal_lm().to(cuda, dtype).eval()
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    requests = [Request(str(i), list(range(5, 45 + i % 3)), params, (i,)) for i in range(32)]
    engine = NativeEngine(hf, eos_token_ids=[2], max_num_seqs=8)
    outputs = engine.generate(requests)
    assert outputs == engine.generate(requests)
    for request, output in zip(requests[:4], outputs, strict=False):
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]], device=cuda)
        with torch.no_grad():
            log_p = hf(input_ids=ids).logits[0].float().log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        scored = log_p.gather(1, torch.tensor(output.token_ids, device=cuda)[:, None])[:, 0].tolist()
        assert output.log_probs == pytest.approx(scored, abs=1e-3 if dtype is torch.float32 else 0.2)


def test_captured_decode_steps_say_what_launched_ones_say(cuda, monkeypatch):
    hf, replayed = causal_lm().to(cuda).eval(), []
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    requests = [Request(str(i), list(range(5, 45 + i)), params, (i,)) for i in range(12)]
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(graph) or replay(graph))
    engine = NativeEngine(hf, eos_token_ids=[2])
    captured = [engine.generate(requests) for _ in range(2)]
    assert engine._capture is not None, "a warning has said why"
    assert len(replayed) > 300 and len(set(replayed)) < 20
    monkeypatch.setattr(replays, "CAPTURES", {})
    launched = NativeEngine(hf, eos_token_ids=[2]).generate(requests)
    assert captured[0] == captured[1]
    for one, other in zip(captured[0], launched, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_rows_are_bounded_by_the_memory_that_is_free(cuda):
    hf = causal_lm().to(cuda, torch.bfloat16).eval()
    engine = NativeEngine(hf, eos_token_ids=[2], max_num_seqs=10**6)
    long: Any = SimpleNamespace(max_requests=1, max_tokens=32_010)
    free, _ = torch.cuda.mem_get_info(cuda)
    assert 0 < engine._affordable(long) < 1.1 * free / (2 * 4 * 2 * 64 * 2 * 32_010)
