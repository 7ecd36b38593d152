"""Decode steps that are captured and repeated, by graphs that are recorded on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from rollout_models import random_model
from transformers import PreTrainedModel

from recorded_graph import Captures
from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.native import decoder, kv_cache, replays
from valor.rollout.native.engine import NativeEngine

PROMPTS = [[7, 8, 9], list(range(3, 43)), [11], list(range(20, 33))]
SAMPLERS = {
    "plain": SamplingParams(max_tokens=50),
    "greedy": SamplingParams(max_tokens=30, temperature=0.0),
    "warm": SamplingParams(max_tokens=30, temperature=0.7),
    "top-k": SamplingParams(max_tokens=30, top_k=5),
    "top-p": SamplingParams(max_tokens=30, top_p=0.8),
    "stops": SamplingParams(max_tokens=40, stop_token_ids=tuple(range(20, 26))),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled loops; sizes so small that each test meets several, and memory that grows."""
    monkeypatch.setattr(decoder, "_is_on_cpu", lambda weight: False)
    for module in (kv_cache, decoder):
        monkeypatch.setattr(module, "MIN_GROWTH", 8)
    monkeypatch.setattr(kv_cache, "BUCKET", 16)


def capture_with(monkeypatch: pytest.MonkeyPatch, capture: replays.Capture) -> None:
    monkeypatch.setitem(replays.CAPTURES, "cpu", lambda: capture)


def requests(params: list[SamplingParams], count: int = 10) -> list[Request]:
    """Rows of several lengths, some of one prompt, each with its own number of tokens."""
    each = [
        replace(params[i % len(params)], max_tokens=params[i % len(params)].max_tokens - i % 4) for i in range(count)
    ]
    return [Request(str(i), PROMPTS[i // 3], each[i], (i,)) for i in range(count)]


def generated(model: PreTrainedModel, work: list[Request], most: int = 256) -> list[Output]:
    return NativeEngine(model, eos_token_ids=[2], max_num_seqs=most).generate(work)


def launched(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """In place of a graph: its kernels, launched again."""
    result = function()
    return lambda: result.copy_(function()), result


@pytest.mark.parametrize(("sampler", "most"), [*((sampler, 256) for sampler in SAMPLERS), ("mixed", 256), ("mixed", 4)])
def test_replays_give_the_tokens_of_launched_steps(sampler: str, most: int, qwen, monkeypatch) -> None:
    work = requests([SAMPLERS[sampler]] if sampler in SAMPLERS else list(SAMPLERS.values()))
    plain = generated(qwen, work, most)
    capture_with(monkeypatch, launched)
    by_hand = generated(qwen, work, most)
    captures = Captures()
    capture_with(monkeypatch, captures)
    replayed = generated(qwen, work, most)
    assert replayed == by_hand, "to the bit: the same operations, in the same sizes"
    for one, other in zip(replayed, plain, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert sum(graph.replays for graph in captures.graphs) > 2 * len(captures.graphs)


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16)])
def test_each_size_is_captured_once_while_buffers_stay(name: str, dtype: torch.dtype, monkeypatch) -> None:
    seen: list[tuple[int, int, int]] = []
    plain = decoder.Decoder.__call__

    def noted(self, ids, positions, cache):
        if hasattr(cache, "captured"):
            seen.append((len(ids), cache.width, cache.own.columns))
        return plain(self, ids, positions, cache)

    monkeypatch.setattr(decoder.Decoder, "__call__", noted)
    captures = Captures()
    capture_with(monkeypatch, captures)
    work = [Request(str(i), [7, 8], SamplingParams(max_tokens=100 - 9 * i, ignore_eos=True), (i,)) for i in range(9)]
    found = generated(random_model(name).to(dtype), work)
    assert [len(output.token_ids) for output in found] == [100 - 9 * i for i in range(9)]
    seen = seen[4:]  # of the trials
    assert len({columns for _, _, columns in seen}) > 1, "memory has grown"
    assert {rows for rows, _, _ in seen} <= {1, 2, 3, 4, 6, 8, 9} and all(width % 16 == 0 for _, width, _ in seen)
    assert len(seen) == 2 * len(set(seen)) and len(captures.graphs) == len(set(seen)) + 1
    assert sum(graph.replays for graph in captures.graphs) == 100 - len(set(seen)) + 1


def test_state_of_a_step_stays_where_it_is(monkeypatch) -> None:
    cache = kv_cache.SlotCache(7, shared=False, bucketed=True)
    addresses = set()
    for lengths in ([5, 3, 9, 1, 1], [6, 30], [7]):
        cache.arrange([-1] * len(lengths), lengths, torch.device("cpu"))
        for step in range(3):
            cache.advance()
            addresses.add(tuple(x.data_ptr() for x in (cache.fed, cache.positions, cache.write_at)))
            assert cache.positions.tolist()[: len(lengths)] == [n + step for n in lengths]
            assert len(cache.positions) == {5: 6, 2: 2, 1: 1}[len(lengths)]
            assert cache.width == -(-(max(lengths) + step + 1) // 16) * 16
    assert len(addresses) == 1


@pytest.mark.parametrize("what", ["raises", "other numbers", "constants"])
def test_a_capture_that_does_not_work_is_told_and_left_out(what: str, qwen, monkeypatch, caplog) -> None:
    plain = generated(qwen, requests([SAMPLERS["plain"]]))

    def capture(function):
        if what == "raises":
            raise RuntimeError("CUDA error: not permitted\nmore of it")
        result = function()
        return (lambda: result.add_(1 + torch.arange(61)) if what == "other numbers" else None), result

    capture_with(monkeypatch, capture)
    assert generated(qwen, requests([SAMPLERS["plain"]])) == plain
    (line,) = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert ("not permitted" if what == "raises" else "log-probs differ by") in line and "\n" not in line


def test_a_later_failure_is_told_once_and_memory_that_runs_out_means_fewer_rows(qwen, monkeypatch, caplog) -> None:
    work = requests([SAMPLERS["plain"]])
    plain = generated(qwen, work)
    captures = Captures(fails=lambda number: RuntimeError("no more graphs") if number == 3 else None)
    capture_with(monkeypatch, captures)
    engine = NativeEngine(qwen, eos_token_ids=[2])
    for _ in range(2):
        assert [output.token_ids for output in engine.generate(work)] == [output.token_ids for output in plain]
    assert len(captures.graphs) == 3 and caplog.text.count("no more graphs") == 1

    caplog.clear()
    error = torch.OutOfMemoryError("CUDA out of memory")
    capture_with(monkeypatch, Captures(fails=lambda number, left=[error]: left.pop() if number == 2 and left else None))
    assert [output.token_ids for output in generated(qwen, work)] == [output.token_ids for output in plain]
    assert "rollout.max_num_seqs=5" in caplog.text and "CUDA graph" not in caplog.text


def test_captures_on_cuda_share_a_pool_and_end_whatever_happens(monkeypatch) -> None:
    """The calls in their order, on torch.cuda as far as a CPU has it: signatures are torch's own."""
    calls: list[tuple] = []

    of_torch = signature(torch.cuda.CUDAGraph.capture_begin)

    class Graph:
        def capture_begin(self, *args: object) -> None:
            bound = of_torch.bind(self, *args).arguments
            calls.append(("begin", bound["pool"], bound["capture_error_mode"]))

        def capture_end(self) -> None:
            calls.append(("end",))

        def replay(self) -> None:
            calls.append(("replay",))

    stream = SimpleNamespace(wait_stream=lambda other: calls.append(("wait", other)))
    fakes = {"CUDAGraph": Graph, "Stream": lambda: stream, "graph_pool_handle": lambda: (0, 7)}
    fakes |= {"stream": lambda _: nullcontext(), "current_stream": lambda: stream}
    fakes["graph"] = lambda graph, pool, on, mode: nullcontext(calls.append(("kept", pool, on is stream, mode)))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    capture = replays.CUDACapture()
    assert calls == [("kept", (0, 7), True, "thread_local")]
    replay, result = capture(lambda: torch.ones(2))
    replay()
    assert result.tolist() == [1, 1]
    begun = [("wait", stream), ("begin", (0, 7), "thread_local"), ("end",)]
    assert calls[1:] == [*begun, ("wait", stream), ("replay",)]
    calls.clear()
    with pytest.raises(KeyError, match="no such key"):
        capture(lambda: {}["no such key"])
    assert calls == begun
