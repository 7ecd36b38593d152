"""The compiled loops of a decode step against NumPy in float64, and a model that generates with them."""

import numpy as np
import pytest
import torch
from rollout_models import random_model

from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.native import compiled, decoder
from valor.rollout.native.compiled import CompiledAttention
from valor.rollout.native.engine import NativeEngine
from valor.rollout.native.kv_cache import SlotCache

CPU = torch.device("cpu")
PROMPTS, OWN = [3, 64, 70], [0, 5, 63, 64, 65, 130]  # columns around the size of a block
KV_HEADS = 2


def filled(shared: bool, size: int, dtype: torch.dtype) -> SlotCache:
    """Six rows of noise that continue three prompts, or none."""
    cache, rows = SlotCache(len(OWN), shared, blocked=True), slice(0, len(OWN))
    one = torch.zeros(1, KV_HEADS, 1, size, dtype=dtype)
    for store, number in ((cache.prompts, len(PROMPTS)), (cache.own, len(OWN))):
        store.reserve(number, 140)
        for buffer in store.layer(0, (one, one)):
            buffer.normal_()
    cache.prompt_lengths = [*PROMPTS]
    cache.arrange([0, 1, 2, 2, 1, 0] if shared else [-1] * len(OWN[rows]), OWN, CPU)
    cache.advance()
    return cache


def columns(store, row: int, count: int) -> list[np.ndarray]:
    """Keys and values [kv heads, count, D] of a row, in float64."""
    keys, values = store.layers[0]
    keys = keys[row].mT.flatten(1, 2)
    return [x[:, :count].double().numpy() for x in (keys, values[row])]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("group", "size"), [(1, 8), (2, 64), (3, 64), (7, 40)])
def test_against_numpy(shared: bool, group: int, size: int, dtype: torch.dtype, rounding: float) -> None:
    torch.manual_seed(0)
    cache, rows, heads = filled(shared, size, dtype), len(OWN), group * KV_HEADS
    qkv = torch.randn(rows, heads + 2 * KV_HEADS, size).to(dtype)
    angle = torch.rand(rows, 1, size // 2).repeat(1, 1, 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    before = [columns(cache.own, row, own) for row, own in enumerate(OWN)]
    out = CompiledAttention(cache, cos, sin, heads, 0.3)(0, qkv).view(rows, heads, size).double().numpy()
    fed, c, s = (x.double().numpy() for x in (qkv, cos, sin))
    turned = fed * c + np.concatenate([-fed[..., size // 2 :], fed[..., : size // 2]], -1) * s
    for row, own in enumerate(OWN):
        keys, values = columns(cache.own, row, own + 1)
        np.testing.assert_array_equal(keys[:, :own], before[row][0])
        np.testing.assert_array_equal(values[:, :own], before[row][1])
        np.testing.assert_allclose(keys[:, own], turned[row, heads:-KV_HEADS], rtol=rounding, atol=1e-6)
        np.testing.assert_array_equal(values[:, own], fed[row, -KV_HEADS:])
        if shared:
            prompt = int(cache.prompt_of[row])
            given = columns(cache.prompts, prompt, PROMPTS[prompt])
            keys, values = (np.concatenate(pair, axis=1) for pair in zip(given, (keys, values), strict=True))
        for head in range(heads):
            scores = 0.3 * keys[head // group] @ turned[row, head]
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ values[head // group]
            np.testing.assert_allclose(out[row, head], expected, rtol=rounding, atol=rounding / 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_rows_and_change_nothing(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> torch.Tensor:
        torch.manual_seed(0)
        cache = filled(shared=True, size=16, dtype=dtype)
        qkv, angle = torch.randn(len(OWN), 10, 16).to(dtype), torch.rand(len(OWN), 1, 16).to(dtype)
        found = CompiledAttention(cache, angle, angle, 6, 0.3)(0, qkv)
        return torch.cat([found.flatten(), *(x.flatten() for x in cache.own.layers[0])])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        several = step()
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(compiled, "_in_threads", lambda: None)  # as where torch's threads cannot be had
    assert torch.equal(several, step())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_norm(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(rows, 5, 24), torch.randn(24).to(dtype)
    x = x.to(dtype)[:, 1:3]  # not contiguous
    expected = torch.nn.functional.rms_norm(x.double(), (24,), weight.double(), 1e-5)
    found = compiled.CompiledNorm(weight, 1e-5)(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=1e-7)


def generated(model: torch.nn.Module) -> list[Output]:
    """Greedy answers of unequal lengths, up to more than a block, with fewer slots than rows."""
    lengths = (1, 30, 2, 90, 40, 64, 5, 70)
    params = [SamplingParams(max_tokens=length, temperature=0.0) for length in lengths]
    work = [Request(str(i), [3 + i % 3, 7, 11] * (1 + i % 4), one, (0, i)) for i, one in enumerate(params)]
    return NativeEngine(model, eos_token_ids=[], max_num_seqs=4).generate(work)


def test_a_model_generates_with_them_what_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = random_model("llama").bfloat16(), list[int]()
    with torch.no_grad():  # so sure of its choices that no rounding changes one
        model.lm_head.weight.mul_(20)
    real = CompiledAttention.__call__
    monkeypatch.setattr(CompiledAttention, "__call__", lambda *given: used.append(1) or real(*given))
    fast = generated(model)
    assert used
    monkeypatch.setattr(decoder, "SIMD_WIDTH", 7)  # of which no head size is a multiple
    used.clear()
    plain = generated(model)
    assert not used
    same = [one.token_ids == other.token_ids for one, other in zip(fast, plain, strict=True)]
    assert sum(same) >= 6  # two best tokens may have the same logit, and each processor breaks some of these ties
    for one, other, alike in zip(fast, plain, same, strict=True):
        if alike:
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=0.3)


def test_prompts_of_one_token_have_no_columns() -> None:
    params = SamplingParams(max_tokens=5)
    work = [Request(str(i), [5], params, (0, i)) for i in range(3)]
    outputs = NativeEngine(random_model("llama").bfloat16(), eos_token_ids=[]).generate(work)
    assert [len(one.token_ids) for one in outputs] == [5, 5, 5]
