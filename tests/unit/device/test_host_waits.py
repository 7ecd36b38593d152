"""How often the host would wait for a GPU, and that no operation mixes devices: counted on a device that is posed."""

import pytest
import torch
from packaging import version
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForTokenClassification

from posed_device import DEVICE, Posed, PosedDevice, pose
from recorded_graph import Captures
from valor import algorithms
from valor.models.attention import Rule, Segments, attention
from valor.models.policy import PolicyModel
from valor.models.value import ValueModel
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native import replays
from valor.rollout.native.engine import NativeEngine

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
ROWS = {
    "prompts": torch.arange(5 * 4).view(5, 4) % 57 + 3,
    "prompt_lengths": torch.tensor([4, 2, 1, 3, 3]),
    "responses": torch.arange(5 * 6).view(5, 6) % 31 + 7,
    "response_lengths": torch.tensor([2, 6, 0, 5, 5]),
}
MASK = (torch.arange(6) < ROWS["response_lengths"][:, None]).float()
ADVANTAGES = torch.linspace(-2, 2, 30).view(5, 6) * MASK
OPTIONS = {"dro": {"dro_beta": 0.1}}
DRAWING = {"clip_cov", "kl_cov"}  # they choose tokens by rank, and have to know how many there are

posed_generation = pytest.mark.skipif(
    version.parse(torch.__version__) < version.parse("2.13"),
    reason="before 2.13 torch cannot pose tensors of inference mode",
)


@pytest.fixture
def device():
    with PosedDevice() as found:
        yield found


def causal_lm() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_pass_forward_and_backward_hardly_waits(kind, packed):
    def build() -> torch.nn.Module:
        if kind == "policy":
            return PolicyModel(causal_lm(), packed=packed)
        torch.manual_seed(0)
        return ValueModel(Qwen2ForTokenClassification(Qwen2Config(**SIZES, num_labels=1)), packed=packed)

    def loss(model: torch.nn.Module, mask: torch.Tensor) -> torch.Tensor:
        options = {"temperature": 0.7, "with_entropy": True} if kind == "policy" else {"raw": True}
        return torch.stack([(value * mask).sum() for value in model(ROWS, **options).values()]).sum()

    plain, posed = build(), pose(build())
    loss(plain, ADVANTAGES).backward()
    with PosedDevice() as device:
        loss(posed, ADVANTAGES.to(DEVICE)).backward()
        # transformers looks whether positions start anew, to make a mask of its own.
        assert device.waits.total() <= 1, device.waits
    expected, found = gradients(plain), gradients(posed)
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert isinstance(grad, Posed)
        torch.testing.assert_close(grad.held, expected[name], rtol=1e-3, atol=1e-5)


def test_shared_prefixes_without_variable_length_attention_need_no_scores_in_memory(monkeypatch):
    """CUDA's kernels that keep no scores refuse a mask where there are fewer key heads than query heads."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 15, 8, generator=generator) for heads in (4, 2, 2))
    keys = torch.tensor([*range(5), 0, 1, 2, 5, *range(6, 15)])  # row 1 begins with 3 tokens of row 0
    segments, lengths = Segments.of([5, 1, 9]), [5, 4, 9]
    expected = attention(query, key, value, segments.reading(lengths, keys), Rule())
    heads, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, mask, **options):
        heads.append((q.shape[1], k.shape[1], v.shape[1], options.pop("enable_gqa")))
        return sdpa(q, k, v, mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    with PosedDevice() as device:
        posed = (x.to(DEVICE) for x in (query, key, value))
        found = attention(*posed, segments.to(DEVICE).reading(lengths, keys.to(DEVICE)), Rule())
        assert not device.waits.total(), device.waits
    assert isinstance(found, Posed) and set(heads) == {(4, 4, 4, False)}
    torch.testing.assert_close(found.held, expected)


@pytest.mark.parametrize("name", algorithms.POLICY_LOSSES)
def test_policy_losses_do_not_wait(name, device):
    log_probs = (-2 * MASK).to(DEVICE).requires_grad_()
    loss, metrics = algorithms.policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=(-2.1 * MASK).to(DEVICE),
        advantages=ADVANTAGES.to(DEVICE),
        response_mask=MASK.to(DEVICE),
        turn_ids=MASK.cumsum(1).long().to(DEVICE),
        num_tokens=18.0,
        num_sequences=4.0,
        **OPTIONS.get(name, {}),
    )
    loss.backward()
    assert all(isinstance(value, Posed) for value in (loss, log_probs.grad, *metrics.values()))
    assert device.waits.total() <= (2 if name in DRAWING else 0), device.waits


@pytest.mark.parametrize("name", algorithms.VALUE_LOSSES)
def test_value_losses_do_not_wait(name, device):
    shape = (5, 6, 11) if name == "hl_gauss" else (5, 6)
    values = torch.zeros(shape).to(DEVICE).requires_grad_()
    loss, metrics = algorithms.value_loss(
        name,
        values=values,
        old_values=MASK.to(DEVICE),
        returns=MASK.to(DEVICE),
        response_mask=MASK.to(DEVICE),
        cliprange_value=0.5 if name in ("mse", "huber") else None,
        num_tokens=18.0,
        num_sequences=4.0,
    )
    loss.backward()
    assert all(isinstance(value, Posed) for value in (loss, values.grad, *metrics.values()))
    assert not device.waits


def requests(params: SamplingParams) -> list[Request]:
    prompts = [list(range(3, 3 + 40)), [7, 8, 9]]  # a shared prompt, and one that is copied
    return [Request(str(i), prompts[i % 2], params, (i,)) for i in range(6)]


def outputs(hf: torch.nn.Module, params: SamplingParams) -> list[tuple]:
    found = NativeEngine(hf, eos_token_ids=[2]).generate(requests(params))
    return [(one.token_ids, one.log_probs, one.finish_reason) for one in found]


@posed_generation
def test_a_decode_of_64_tokens_waits_once_in_eight_steps():
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    expected = outputs(causal_lm(), params)
    hf = pose(causal_lm())
    with PosedDevice() as device:
        found = outputs(hf, params)
    assert device.waits.total() <= 64 // 8 + 4, (
        device.waits
    )  # and for the tokens, the log-probs, whether they are finite
    for mine, other in zip(found, expected, strict=True):
        assert mine[0] == other[0] and mine[2] == other[2]
        assert mine[1] == pytest.approx(other[1], abs=1e-4)


@posed_generation
def test_captured_steps_wait_for_nothing_between_looks(monkeypatch):
    params, captures = SamplingParams(max_tokens=64, ignore_eos=True), Captures(posed=True)
    expected, waits = outputs(causal_lm(), params), []
    monkeypatch.setitem(replays.CAPTURES, "meta", lambda: captures)
    hf = pose(causal_lm())
    with PosedDevice() as device:
        engine = NativeEngine(hf, eos_token_ids=[2])
        engine.generate(requests(params)[:1])  # tries out how the model can be driven
        step = replays.Replays.__call__
        monkeypatch.setattr(
            replays.Replays,
            "__call__",
            lambda *a: (waits.append(device.waits.total()), step(*a), waits.append(device.waits.total()))[1],
        )
        found = engine.generate(requests(params))
    assert waits[0::2] == waits[1::2] and len(waits) == 2 * 64, "none in a step, captured or repeated"
    assert waits[-1] - waits[0] <= 64 // 8, "and one in eight between them"
    assert len(captures.graphs) == 1 + 1 + 1 and captures.graphs[-1].replays == 63
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other[0] and mine.log_probs == pytest.approx(other[1], abs=1e-4)


@posed_generation
def test_tokens_behind_a_stop_token_are_dropped():
    """On a GPU a row runs on until the next look; what it said after its end is not part of it."""
    params = SamplingParams(max_tokens=50, stop_token_ids=tuple(range(20, 30)))
    expected = outputs(causal_lm(), params)
    assert {reason for _, _, reason in expected} >= {"stop"} and len({len(ids) for ids, _, _ in expected}) > 2
    hf = pose(causal_lm())
    with PosedDevice():
        found = outputs(hf, params)
    assert [(ids, reason) for ids, _, reason in found] == [(ids, reason) for ids, _, reason in expected]


def test_decode_scores_are_float32_before_the_softmax():
    """In bfloat16 weights: products of queries and keys are rounded on a CPU alone."""
    from valor.rollout.native.attention import _products

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 9, 8, generator=generator, dtype=torch.bfloat16) * 30
    queries = torch.randn(2, 2, 3, 8, generator=generator, dtype=torch.bfloat16)
    exact = queries.float() @ keys.float().transpose(2, 3)
    with PosedDevice():
        found = _products(Posed(keys), Posed(queries))
    assert isinstance(found, Posed) and found.dtype is torch.float32
    torch.testing.assert_close(found.held, exact)
    assert not torch.allclose(_products(keys, queries).float(), exact)
